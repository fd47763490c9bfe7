"""Numbers of lists as their authors write them: 1, a, A, iv, IV."""

from __future__ import annotations

# What HTML, docutils, Word and PowerPoint, and OpenDocument call them.
_KINDS = {
    **dict.fromkeys(("a", "lowerLetter", "loweralpha", "alphaLc"), "a"),
    **dict.fromkeys(("A", "upperLetter", "upperalpha", "alphaUc"), "A"),
    **dict.fromkeys(("i", "lowerRoman", "lowerroman", "romanLc"), "i"),
    **dict.fromkeys(("I", "upperRoman", "upperroman", "romanUc"), "I"),
}
_ROMAN = {
    **{1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl"},
    **{10: "x", 9: "ix", 5: "v", 4: "iv", 1: "i"},
}


def numeral_kind(name: str) -> str:
    """The kind of numerals that one of these words names: a, A, i, I; or "" for the usual ones."""
    return next((_KINDS[word] for word in name.split() if word in _KINDS), "")


def numeral(number: int, kind: str = "") -> str:
    """A number in numerals of a kind; in the usual ones if that has none for it."""
    if kind in ("a", "A") and 0 < number <= 260:
        said = chr(ord("a") + (number - 1) % 26) * ((number - 1) // 26 + 1)
    elif kind in ("i", "I") and 0 < number < 4000:
        said = ""
        for value, letters in _ROMAN.items():
            said += letters * (number // value)
            number %= value
    else:
        return str(number)
    return said.upper() if kind in ("A", "I") else said
