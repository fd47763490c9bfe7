"""Writes questions about alike entries, of which one is asked: the hardest there are for reused KV.

    python docs/made_questions.py --kinds parts,codes,needle --questions 40 --chunks 8 > made.jsonl
    cached-rag eval --data made.jsonl --methods full,auto,reuse

    python docs/made_questions.py --kinds parts,people,codes,hops,versions --of 24 > made.jsonl
    cached-rag eval --data made.jsonl --methods full,auto,auto@apart,fast,fast@apart

With `--of` a question's chunks are drawn from a document that has more of them, in another order,
as a search would find them. `auto` then has them encoded as a part of it, `auto@apart` each by
itself. `--joined 6` puts six entries into a chunk, as splitters of longer texts do. `--indexed`
has chunks that stand alone read behind those of other questions of their kind, mixed.

Names and numbers are drawn by chance from a seed, so that no model knows them. The same seed, kinds
and sizes give the same file. Sentences of the made texts are ours; `needle` hides one among
paragraphs of the demo's documents.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import cached_rag

_NOUNS = re.findall(
    r"\w+",
    "adapter anchor axle basin bearing belt blade bolt bracket brush cable clamp coil collar crank "
    "damper dial display drum fan filter flange fuse gasket gauge gear grille handle hinge hose "
    "impeller jack knob lamp latch lever lock magnet meter motor mount needle nozzle pedal pipe "
    "piston plate plug pump relay rod roller rotor screen seal sensor shaft shield socket "
    "switch tank timer tray tube valve vent washer wheel winch wire yoke",
)
_FIRST = re.findall(
    r"\w+", "Ada Arno Bram Carla Dora Emil Frida Hugo Ilse Jonas Klaus Lena Mara Odin Petra Wim"
)
_LAST = re.findall(
    r"\w+", "Berg Brandt Dahl Falk Haas Holt Kessler Krog Lind Lund Moss Rask Stern Thal Vos"
)
_BEGIN = re.findall(
    r"\w+", "Al Bor Cal Dun El Far Gar Hal Ib Kor Lor Mer Nor Or Pel Quil Ros Sel Tam Ul Ver"
)
_END = re.findall(
    r"\w+", "ac aro bec dale den eth feld gate ham ira kent lo mere mund nor port sin ton vik"
)
_JOBS = re.findall(
    r"\w+", "baker carpenter clerk glazier miller nurse painter pilot printer sailor tailor"
)
_PETS = ("two dogs", "bees", "pigeons", "a parrot", "goats", "no animals")
# Said in any text, so that entries differ in little.
_ASIDES = (
    "Older notes on this subject are in the archive.",
    "What is said elsewhere about special cases holds here, too.",
    "Two people checked this entry, and neither saw what the other wrote.",
    "A first edition was corrected twice, the last time in spring.",
)


class Asked(NamedTuple):
    """One question; `chunks` are (title, text) pairs."""

    question: str
    answer: str
    chunks: list[tuple[str, str]]


Kind = Callable[[random.Random, int], Asked]


def parts(chance: random.Random, count: int) -> Asked:
    """Tables of two rows each: a price, a number or a place is asked."""
    names = iter(chance.sample(_words(_NOUNS, 2 * count), 2 * count))
    numbers = iter(_numbers(chance, 1000, 10_000, 2 * count))
    others = iter(_numbers(chance, 101, 101 + 9 * count, 4 * count))
    chunks, rows = [], []
    for page in range(1, count + 1):
        lines = ["| part | number | price | place |", "|---|---|---|---|"]
        for _ in range(2):
            row = (next(names), f"TX-{next(numbers)}", next(others), next(others))
            rows.append(row)
            lines.append("| {} | {} | {} EUR | shelf {} |".format(*row))
        aside = f"{chance.choice(_ASIDES)} Prices are without tax."
        chunks.append((f"Spare parts, page {page}", "\n".join([aside, *lines])))
    name, number, price, shelf = chance.choice(rows)
    asked = [
        (f"What does the {name} cost, in EUR?", price),
        (f"What is the number of the {name}?", number),
        (f"Which part has the number {number}?", name),
        (f"On which shelf is the {name}?", shelf),
    ]
    return Asked(*chance.choice(asked), chunks)


def people(chance: random.Random, count: int) -> Asked:
    """Lives: a place, a year, a firm or a name is asked."""
    places, years = _places(chance, 2 * count), _numbers(chance, 1820, 1990, count)
    found = _lives(chance, places, years)
    chunks = [(name, text) for name, _, _, _, text in found]
    name, town, year, firm, _ = chance.choice(found)
    asked = [
        (f"Where was {name} born?", town),
        (f"In which year was {name} born?", year),
        (f"For which firm did {name} work?", firm),
        (f"Who was born in {town}?", name),
    ]
    return Asked(*chance.choice(asked), chunks)


def codes(chance: random.Random, count: int) -> Asked:
    """Fault codes: what one means, or how long one waits."""
    faults = _numbers(chance, 10, 10 + 4 * count, count)
    nouns = [noun for noun in _NOUNS if noun not in ("cable", "switch")]  # said in any text below
    broken, minutes = chance.sample(_words(nouns, count), count), _numbers(chance, 2, 200, count)
    chunks = []
    for fault, part, wait in zip(faults, broken, minutes, strict=True):
        text = (
            f"E{fault} means that the {part} does not answer. Switch the device off, wait {wait} "
            f"minutes, check the {part} and its cable, and switch it on. {chance.choice(_ASIDES)} "
            f"If E{fault} comes back within a day, have the {part} replaced."
        )
        chunks.append((f"Fault E{fault}", text))
    fault, part, wait = chance.choice(list(zip(faults, broken, minutes, strict=True)))
    asked = [
        (f"Which part does not answer at fault E{fault}?", part),
        (f"How many minutes does one wait with E{fault}?", wait),
    ]
    return Asked(*chance.choice(asked), chunks)


def hops(chance: random.Random, count: int) -> Asked:
    """Firms, each with a person who joined it, by whose name something of the firm is asked."""
    half = count // 2
    places, years = _places(chance, 3 * half), _numbers(chance, 1820, 1990, 2 * half)
    lives = _lives(chance, places[: 2 * half], years[:half])
    towns, years = places[2 * half :], years[half:]
    chunks = [(name, text) for name, _, _, _, text in lives]
    for (_, _, _, firm, _), town, year in zip(lives, towns, years, strict=True):
        text = (
            f"{firm} is a firm of middle size. Its head office is in {town}, and it was founded in "
            f"{year} by three friends. {chance.choice(_ASIDES)} It makes instruments today and has "
            "a small museum."
        )
        chunks.append((firm, text))
    (name, *_), town, year = chance.choice(list(zip(lives, towns, years, strict=True)))
    asked = [
        (f"In which town is the head office of the firm that {name} worked for?", town),
        (f"In which year was the firm that {name} worked for founded?", year),
    ]
    return Asked(*chance.choice(asked), chunks)


def versions(chance: random.Random, count: int) -> Asked:
    """Release notes: which version did something, or what its limit is."""
    names = chance.sample([f"{a}.{b}" for a, b in product(range(1, 10), range(10))], count)
    options = chance.sample(_words(_NOUNS, 2 * count), 2 * count)
    limits = _numbers(chance, 101, 101 + 9 * count, count)
    notes = list(zip(names, options[:count], options[count:], limits, strict=True))
    chunks = []
    for name, added, removed, limit in notes:
        text = (
            f"Version {name} adds the option --{added} and removes --{removed}. The limit of open "
            f"files is now {limit}. {chance.choice(_ASIDES)} Two messages were reworded, and it "
            "starts faster where memory is short."
        )
        chunks.append((f"Release {name}", text))
    name, added, removed, limit = chance.choice(notes)
    asked = [
        (f"Which version adds the option --{added}?", name),
        (f"Which version removes --{removed}?", name),
        (f"What is the limit of open files in version {name}?", limit),
    ]
    return Asked(*chance.choice(asked), chunks)


def needle(chance: random.Random, count: int) -> Asked:
    """One sentence among other texts' paragraphs."""
    place, code = _places(chance, 1)[0], _numbers(chance, 1000, 10_000, 1)[0]
    chunks = chance.sample(sorted(_paragraphs()), count)
    at = chance.randrange(count)
    title, text = chunks[at]
    chunks[at] = (title, f"{text} The access code of the station in {place} is {code}.")
    return Asked(f"What is the access code of the station in {place}?", code, chunks)


def pairs(chance: random.Random, count: int) -> Asked:
    """Keys and values without a meaning, ten a chunk."""
    keys, values = (
        [f"{number:06x}" for number in chance.sample(range(1 << 20, 1 << 24), 10 * count)]
        for _ in range(2)
    )
    lines = [f"{key}: {value}" for key, value in zip(keys, values, strict=True)]
    chunks = [
        (f"Keys, part {place + 1}", "\n".join(lines[10 * place : 10 * place + 10]))
        for place in range(count)
    ]
    at = chance.randrange(len(keys))
    return Asked(f"Which value has the key {keys[at]}?", values[at], chunks)


KINDS: dict[str, Kind] = {
    kind.__name__: kind for kind in (parts, people, codes, hops, versions, needle, pairs)
}


def made(
    kinds: list[str],
    questions: int,
    chunks: int,
    seed: int,
    of: int | None = None,
    joined: int = 1,
) -> Iterator[dict[str, Any]]:
    """So many questions, of the kinds in turn; see `main` for the sizes."""
    for number in range(questions):
        name, entries = kinds[number % len(kinds)], chunks * joined
        chance = random.Random(f"{seed} {name} {of or entries} {number}")
        found = KINDS[name](chance, of or entries)
        document = [{"title": title, "text": text} for title, text in found.chunks]
        shown = _shown(found, entries, chance)
        chance.shuffle(shown)
        drawn = [document[place] for place in shown]
        yield {
            "id": f"{name}-{seed}-{number}",
            "question": found.question,
            "answers": [found.answer],
            "chunks": [_joined(drawn[at : at + joined]) for at in range(0, entries, joined)],
            **({"document": document} if of else {}),
        }


def indexed(rows: list[dict[str, Any]], seed: int) -> None:
    """Give each row as its document the chunks of all rows of its kind, mixed."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(row["id"].partition("-")[0], []).append(row)
    for some in by_kind.values():
        document = [chunk for row in some for chunk in row["chunks"]]
        random.Random(seed).shuffle(document)
        for row in some:
            row["document"] = document


def _joined(entries: list[dict[str, str]]) -> dict[str, str]:
    """One chunk of these, with the first one's title and the others' above their texts."""
    texts = [f"{entry['title']}\n{entry['text']}" for entry in entries[1:]]
    return {"title": entries[0]["title"], "text": "\n\n".join([entries[0]["text"], *texts])}


def _shown(found: Asked, count: int, chance: random.Random) -> list[int]:
    """Places of so many chunks, those that the answer needs among them."""
    places = range(len(found.chunks))
    answer = re.compile(rf"(?<!\w){re.escape(found.answer)}(?!\w)")
    needed = [
        place
        for place, (title, text) in enumerate(found.chunks)
        if answer.search(f"{title}\n{text}") or title in found.question
    ]
    others = [place for place in places if place not in needed]
    return needed + chance.sample(others, min(len(others), count - len(needed)))


def _lives(
    chance: random.Random, places: list[str], years: list[str]
) -> list[tuple[str, str, str, str, str]]:
    """Name, town, year, firm and text of as many people as there are years."""
    count = len(years)
    names = chance.sample([f"{a} {b}" for a, b in product(_FIRST, _LAST)], count)
    found = []
    for name, town, firm, year in zip(names, places[:count], places[count:], years, strict=True):
        job, own = chance.choice(_JOBS), name.split()[0]
        text = (
            f"{name} was born in {town} in {year}. After school {own} became a {job} and worked "
            f"for {firm} for {chance.randint(3, 40)} years. {chance.choice(_ASIDES)} {own} never "
            f"married, kept {chance.choice(_PETS)}, and is remembered by a bench near the bridge."
        )
        found.append((name, town, year, firm, text))
    return found


def _places(chance: random.Random, count: int) -> list[str]:
    return chance.sample([a + b for a, b in product(_BEGIN, _END)], count)


def _words(nouns: list[str], count: int) -> list[str]:
    """The nouns, or if there are too few, two of them for each."""
    return (
        nouns if count <= len(nouns) else [f"{a} {b}" for a, b in product(nouns, nouns) if a != b]
    )


def _paragraphs() -> Iterator[tuple[str, str]]:
    """Paragraphs of 50 to 90 words of the demo's documents, each with its document's name."""
    folder = Path(cached_rag.__file__).parent / "cli" / "demo_corpus"
    for path in sorted(folder.rglob("*.rst")):
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            words = paragraph.split()
            if 50 <= len(words) <= 90:
                yield path.stem, " ".join(words)


def _numbers(chance: random.Random, low: int, high: int, count: int) -> list[str]:
    return [str(number) for number in chance.sample(range(low, high), count)]


def main() -> None:
    """Write the questions to standard output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument(
        "--chunks", type=int, default=8, help="of each question; 40 are some 4k tokens"
    )
    parser.add_argument("--of", type=int, help="chunks of the document that they are drawn from")
    parser.add_argument("--joined", type=int, default=1, help="entries that make one chunk")
    parser.add_argument("--indexed", action="store_true", help="read with others of the kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"unknown kinds {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if options.joined < 1 or not 2 <= options.chunks * options.joined <= 80:
        parser.error("a question has 2 to 80 entries")
    if options.of is not None and not options.chunks <= options.of <= 80:
        parser.error("a document has as many chunks as a question at least, and at most 80")
    if options.of is not None and options.joined > 1:
        parser.error("entries drawn from a document are not joined: leave out --of or --joined")
    if options.of is not None and options.indexed:
        parser.error("either chunks have a document of their own, --of, or they are --indexed")
    if options.of is not None and "needle" in kinds:
        parser.error("a needle's chunks are of several documents: leave out --of")
    sizes = (options.questions, options.chunks, options.seed, options.of, options.joined)
    rows = [*made(kinds, *sizes)]
    if options.indexed:
        indexed(rows, options.seed)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
