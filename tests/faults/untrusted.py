"""Files made to be read as others, to be endless, or to be imported, while documents are read."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from faults.outcome import Outcome

from cached_rag.errors import DocumentError
from cached_rag.rag.document import DocumentLimits
from cached_rag.rag.reading_process import ConfinedReader

Load = Callable[[Path], str]
SECRET = "the signing key of another folder"
SOUND = "The valve is red."
LIMIT = 100_000
MODULES = ("kreuzberg", "markdown_it", "lxml", "docutils", "chardet", "json")


def campaign(trials: int, folder: Path, chance: random.Random) -> list[Outcome]:
    """Try each of the three so many times."""
    swapped = swaps(trials, folder / "swapped", chance)
    bombs = Outcome("small files of very long texts")
    documents = make_documents(folder / "bombs")
    with ConfinedReader(DocumentLimits(max_characters=LIMIT), documents) as reader:
        for _ in range(trials):
            bombs.add(*tried_bomb(documents, chance, lambda path: reader.load(path).text))
    modules = Outcome("a module in the reader's path, among the documents")
    for number in range(trials):
        modules.add(*tried_module(make_documents(folder / f"modules{number}"), chance))
    return [swapped, bombs, modules]


def swaps(trials: int, folder: Path, chance: random.Random) -> Outcome:
    """Try swapped files so many times."""
    outcome = Outcome("a file swapped for a link while it is read")
    documents = make_documents(folder)
    with ConfinedReader(DocumentLimits(), documents) as reader:
        for _ in range(trials):
            outcome.add(*tried_swap(documents, chance, lambda path: reader.load(path).text))
    return outcome


def make_documents(folder: Path) -> Path:
    """A folder of one document, beside one of a secret."""
    (folder / "docs" / "deep").mkdir(parents=True)
    (folder / "outside").mkdir()
    (folder / "outside" / "a.txt").write_text(SECRET)
    (folder / "docs" / "deep" / "a.txt").write_text(SOUND)
    return folder / "docs"


def tried_swap(documents: Path, chance: random.Random, load: Load) -> tuple[int, int, list[str]]:
    """Read a document while it, or its folder, is now itself and now a link to elsewhere."""
    file, is_over, wrong = documents / "deep" / "a.txt", threading.Event(), 0
    victim = chance.choice([file, file.parent])
    target = documents.parent / "outside" / ("a.txt" if victim == file else "")
    swapping = threading.Thread(target=_swap, args=(victim, target, is_over))
    swapping.start()
    try:
        for _ in range(8):
            try:
                wrong += SECRET in load(file)
            except (DocumentError, OSError):
                continue
    finally:
        is_over.set()
        swapping.join()
    return int(load(file) != SOUND), wrong, []


def _swap(victim: Path, target: Path, is_over: threading.Event) -> None:
    aside, link = victim.with_name("aside"), victim.with_name("link")
    while not is_over.is_set():
        link.symlink_to(target)
        victim.rename(aside)
        link.rename(victim)
        victim.unlink()
        aside.rename(victim)


def _csv(size: int) -> str:
    return f"a,{'n' * size}\n" + "1,2\n" * size


def _tsv(size: int) -> str:
    return _csv(size).replace(",", "\t")


def _headings(size: int) -> str:
    return "# " + "h" * 90 + "".join(f"\n\n## {n} {'h' * 80}\n\nt" for n in range(2 * size))


BOMBS: dict[str, Callable[[int], str]] = {
    "csv": _csv,
    "tsv": _tsv,
    "markdown": _headings,
}


def tried_bomb(documents: Path, chance: random.Random, load: Load) -> tuple[int, int, list[str]]:
    """Read a document whose text is some hundred times as long as its file, and a sound one."""
    suffix, found = chance.choice(list(BOMBS)), []
    bomb = documents / f"bomb.{suffix}"
    bomb.write_text(BOMBS[suffix](chance.randint(400, 800)))
    try:
        found.append(f"{len(load(bomb))} characters were read of a .{suffix} file")
    except DocumentError as error:
        if "more than" not in str(error):
            found.append(str(error))
    bomb.unlink()
    return int(load(documents / "deep" / "a.txt") != SOUND), 0, found


def tried_module(documents: Path, chance: random.Random) -> tuple[int, int, list[str]]:
    """Read a document beside a module that says if it is imported, in folders of `sys.path`."""
    name, place = chance.choice(MODULES), chance.choice([documents, documents / "deep"])
    ran = documents / "ran"
    (place / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\nraise ImportError")
    spelled = chance.choice(["", ".", str(place), os.path.relpath(place)])
    (documents / "a.md").write_text(SOUND)
    with _in(place, spelled), ConfinedReader(DocumentLimits(), documents) as reader:
        lost = reader.load(documents / "a.md").text != SOUND
    return int(lost), int(ran.exists()), []


@contextmanager
def _in(place: Path, entry: str):
    """With a current folder, and an entry before all others of `sys.path`."""
    before = os.getcwd()
    os.chdir(place)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        os.chdir(before)
