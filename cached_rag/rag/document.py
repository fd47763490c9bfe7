"""A document: its text, and what is known of each part of it. Knows no file format."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
        first = bisect_right(self.parts, begin, key=_place) - 1
        last = bisect_left(self.parts, end, key=_place)
        found = [known for _, known in self.parts[max(0, first) : last]]
        if first < 0:
            found.insert(0, {})
        headings = dict.fromkeys(str(one["heading"]) for one in found if "heading" in one)
        heading = "; ".join(headings)[:_MOST_HEADINGS]
        return {**found[0], **({"heading": heading} if heading else {})}


def _place(part: tuple[int, Metadata]) -> int:
    return part[0]


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
