"""A document: its text, what is known of each part of it, and how much one may take to be read.

Documents are nobody's friends. The file that was found is opened, and no other one: somebody may
put a link in its place meanwhile. What parsers get is a copy, as they open a file by its name, and
some do so several times. Knows no file format.
"""

import os
import re
import stat
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from cached_rag.errors import DocumentError
from cached_rag.options import check_types, require

# Halves of surrogate pairs (U+D800 to U+DFFF) are no characters, and cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f\ud800-\udfff]")
# Carriage returns, form feeds and other characters that end a line or a field, and part words.
_BREAK = re.compile(r"\r\n|[\r\x0b\x0c\x1c-\x1f]")
# Written without a repeated group, which would take a hundred bytes of memory for each line.
_BLANK_LINES = re.compile(r"\n[ \t]*\n[ \t\n]*\n")
# Glyphs that some fonts have for two letters or three, as in "o\ufb03ce", and what they stand for.
_LIGATURES = {code: unicodedata.normalize("NFKC", chr(code)) for code in range(0xFB00, 0xFB07)}
# Shows nothing but where a word may be divided.
_SOFT_HYPHEN = re.compile("\u00ad[ \\t]*\\n[ \\t]*|\u00ad")
# Nobody sees these, and they part no words. Those that join or part letters are among them.
_INVISIBLE = re.compile("[\u00ad\u180e\u200b-\u200d\u2060\ufeff]")
_TITLE = re.compile(r"^Title: *(.+)$", re.MULTILINE)

# Most characters of a chunk's headings, and of a name in a message.
_MOST_HEADINGS, _MOST_SHOWN = 1000, 400

# What is known of a text: its page, its heading, or whatever a user says of it.
Metadata = Mapping[str, str | int | float | bool]
# A text and what is known of it; what a reader makes of a file is a list of these.
Part = tuple[str, Metadata]
# Through no link, and without waiting for whoever would write into a pipe. Windows lacks these.
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)


@dataclass(frozen=True)
class Document:
    """A document's text.

    Attributes:
        source: the file's path, as it was given.
        title: what a line "Title: ..." near its beginning says, else its first line; of source
            code, and of tables and JSON that name none, the file's name.
        text: never empty, and without control characters.
        parts: (begin, metadata) of each part of the text that differs from the one before it in
            its metadata, by the place of its first character: "page", or "heading", with the
            headings above it ("Install > Linux").
        language: what it is written in, if it is source code; as langchain-text-splitters calls it.
    """

    source: str
    title: str
    text: str
    parts: tuple[tuple[int, Metadata], ...] = ()
    language: str = ""

    def metadata(self, begin: int, end: int) -> Metadata:
        """What is known of the characters from `begin` to `end`.

        Of parts that differ the first one's is given, and of headings all, joined by "; ".
        """
        first = bisect_right(self.parts, begin, key=itemgetter(0)) - 1
        last = bisect_left(self.parts, end, key=itemgetter(0))
        found = [known for _, known in self.parts[max(0, first) : last]]
        if first < 0:
            found.insert(0, {})
        headings = dict.fromkeys(str(one["heading"]) for one in found if "heading" in one)
        heading = "; ".join(headings)[:_MOST_HEADINGS]
        return {**found[0], **({"heading": heading} if heading else {})}


def assembled(
    source: str, parts: Iterable[Part], *, title: str = "", language: str = ""
) -> Document:
    """A document of cleaned parts, with a blank line between them; its text may be empty.

    Args:
        title: see `Document`; empty for the text's own.
    """
    texts: list[str] = []
    begins: list[tuple[int, Metadata]] = []
    length = 0
    for raw, metadata in parts:
        text = _clean_code(raw) if language else _clean(raw)
        if not text:
            continue
        if metadata != (begins[-1][1] if begins else {}):
            begins.append((length, metadata))
        texts.append(text)
        length += len(text) + 2
    text = "\n\n".join(texts)
    return Document(source, title or _title(text), text, tuple(begins), language)


def with_line_feeds(text: str) -> str:
    """A text whose lines end with a line feed alone."""
    return _BREAK.sub("\n", text)


def searchable(text: str) -> str:
    """A text as search sees it: with letters for ligatures, and without what nobody sees."""
    return _INVISIBLE.sub("", text.translate(_LIGATURES))


def _clean(text: str) -> str:
    text = _CONTROL.sub("", with_line_feeds(text)).translate(_LIGATURES)
    return _BLANK_LINES.sub("\n\n", _SOFT_HYPHEN.sub("", text)).strip()


def _clean_code(text: str) -> str:
    """With its indents and blank lines."""
    return _CONTROL.sub("", with_line_feeds(text)).strip("\n").rstrip()


def _title(text: str) -> str:
    named = _TITLE.search(text, 0, 1000)
    title = named.group(1) if named else text.partition("\n")[0]
    return title.replace("``", "")[:200].strip()


def shown(name: object) -> str:
    """A name or path for a message: what would end its line or command a terminal is spelled out.

    Of a very long one the middle is left out.
    """
    text = str(name)
    if len(text) > _MOST_SHOWN:
        text = f"{text[: _MOST_SHOWN // 2]} ... {text[-_MOST_SHOWN // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True)
class DocumentLimits:
    """Limits on reading one document. One beyond them is skipped with its reason.

    Attributes:
        max_document_bytes: most bytes of its file.
        parse_seconds: most seconds that reading it may take; None for any.
        parse_memory_bytes: most memory of the process that reads it, parser included; None for any.
            With neither of the two, documents are read in the process that asks.
        max_characters: most characters of its text, what is known of its parts included. A small
            file may hold a long text: a table whose columns have long names, or one page that is
            shown a thousand times.

    Raises:
        ConfigError: one is of another type, or not positive.
    """

    max_document_bytes: int = 50 << 20
    parse_seconds: float | None = 300.0
    parse_memory_bytes: int | None = 2 << 30
    max_characters: int = 10_000_000

    def __post_init__(self) -> None:
        check_types(self)
        for one in fields(self):
            value = getattr(self, one.name)
            is_one = value is None or 0 < value < 1 << 62
            require(is_one, f"{one.name} is to be positive, not {value}")


def beyond(limit: str, said: str) -> DocumentError:
    """What is said of a document beyond a limit, by the name that it has in `DocumentLimits`."""
    option = limit.replace("_", "-")
    remedy = f"split the file, remove it, or raise the limit ({limit}=, --{option})"
    return DocumentError(f"{said}; {remedy}")


def too_long(max_characters: int) -> DocumentError:
    """What is said of a document with too much text."""
    return beyond("max_characters", f"its text has more than {max_characters} characters")


def limited(parts: Iterable[Part], max_characters: int) -> Iterator[Part]:
    """A document's parts as they are made, what is known of them counted, up to the limit.

    Raises:
        DocumentError: there are more characters.
    """
    left = max_characters
    for part in parts:
        text, known = part
        left -= len(text) + sum(len(str(value)) for value in known.values())
        if left < 0:
            raise too_long(max_characters)
        yield part


@contextmanager
def private_copy(path: Path, inside: Path, max_bytes: int) -> Iterator[Path]:
    """A copy of a file, of its name, that lasts as long as the context does.

    Args:
        inside: the file itself, or a folder in which it lies; with all links followed.

    Raises:
        DocumentError: the path leads elsewhere, to what is no file, or to a larger one.
        OSError: it cannot be read.
    """
    with TemporaryDirectory(prefix="cached-rag-") as folder:
        copy = Path(folder, path.name)
        with open(_descriptor(path, inside), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DocumentError(f"{shown(path)}: is no file, but a folder, pipe or device")
            data = b"" if found.st_size > max_bytes else file.read(max_bytes + 1)
            size = max(found.st_size, len(data))
        if size > max_bytes:
            raise beyond("max_document_bytes", f"{shown(path)}: {size} bytes exceed {max_bytes}")
        copy.write_bytes(data)
        yield copy


def _descriptor(path: Path, inside: Path) -> int:
    """The file, opened where it really lies: from folder to folder, none of which is a link.

    Raises:
        DocumentError: it does not lie in `inside`.
    """
    target = path.resolve(strict=True)
    is_found = target == inside or (
        target.is_relative_to(inside) and target.suffix.lower() == path.suffix.lower()
    )
    if not is_found:
        raise DocumentError(
            f"{shown(path)}: leads out of {shown(inside)}, or to a file of another kind; put the "
            "file there, and no link"
        )
    if os.open not in os.supports_dir_fd:  # Windows
        return _looked_at_again(os.open(target, _FLAGS), path, target)
    start = inside.parent if target == inside else inside
    here = os.open(start, os.O_RDONLY)
    for name in target.relative_to(start).parts:
        try:
            below = os.open(name, _FLAGS, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _looked_at_again(descriptor: int, path: Path, target: Path) -> int:
    if path.resolve() == target and os.path.samestat(os.fstat(descriptor), os.lstat(target)):
        return descriptor
    os.close(descriptor)
    raise DocumentError(f"{shown(path)}: another file was put in its place; read it again")
