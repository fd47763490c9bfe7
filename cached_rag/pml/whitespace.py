"""White space of PML texts: the file's indentation goes, what separates words and lines stays.

A text run owns the white space before it, reduced to a space, a line break or a blank line; so a
run's tokens do not depend on what follows. Most tokenizers split there, and then the tokens of the
runs are the tokens of the whole text. Knows strings only.
"""

from __future__ import annotations

import textwrap

_WEIGHT = ("", " ", "\n", "\n\n")


def separator(space: str) -> str:
    """What is left of white space between two texts."""
    return _WEIGHT[min(3, 1 + space.count("\n"))] if space else ""


def wider(first: str, second: str) -> str:
    """The stronger of two separators."""
    return max(first, second, key=_WEIGHT.index)


def split(text: str, *, is_code: bool = False) -> tuple[str, str, str]:
    """(white space before, the text without common indentation, white space after).

    Of code, the indentation stays.
    """
    body = text.strip()
    if not body:
        return text, "", ""
    at = text.index(body)
    before, after = text[:at], text[at + len(body) :]
    if is_code:
        before, newline, indent = before.rpartition("\n")
        return before + newline, indent + body, after
    if "\n" in before:
        # The first line's own indentation counts: it stands on a line of its own.
        indent = before.rpartition("\n")[2]
        return before, textwrap.dedent(indent + body).strip(), after
    first, newline, rest = body.partition("\n")
    return before, first + newline + textwrap.dedent(rest), after
