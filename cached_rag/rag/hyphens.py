"""Words that were divided at the ends of lines, as printed pages have them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = r"[^\W_]+"
_DIVIDED = re.compile(rf"({_WORD})[-\u2010][ \t]*\n[ \t]*({_WORD})")
# Words, and words of several parts.
_WORDS = re.compile(rf"{_WORD}(?:-{_WORD})*")
# What English words with a hyphen mostly begin with; and what follows one that stands for a part of
# a word, as in "low- and high-pressure".
_BEFORE = frozenset(
    (
        *("cross", "double", "four", "full", "half", "heavy", "high", "ill", "last", "left"),
        *("long", "low", "near", "non", "open", "right", "self", "semi", "short", "single"),
        *("six", "three", "top", "twin", "two", "water", "well"),
    )
)
_BETWEEN = frozenset(("and", "bis", "or", "oder", "to", "und"))
# Words that are no longer, as "in" and "to", are the beginning or end of many others.
_SHORT = 3


def joined(pages: Sequence[str]) -> list[str]:
    """Pages whose divided words are whole again: "pro-", "cedure", but "well-", "known" with "-".

    What else the document says decides, and where it says neither, how the word begins.
    """
    whole = (_DIVIDED.sub(" ", page) for page in pages)
    known = {word.lower() for page in whole for word in _WORDS.findall(page)}

    def word(found: re.Match[str]) -> str:
        begin, end = found[1].lower(), found[2].lower()
        if end in _BETWEEN:
            return f"{found[1]}- {found[2]}"
        is_compound = (
            not (begin.isalpha() and found[2].isalpha() and found[2].islower())
            or f"{begin}-{end}" in known
            or (len(end) > _SHORT and begin in _BEFORE)
            or (min(len(begin), len(end)) > _SHORT and begin in known and end in known)
        )
        hyphen = "-" if is_compound and begin + end not in known else ""
        return f"{found[1]}{hyphen}{found[2]}"

    return [_DIVIDED.sub(word, page) for page in pages]
