"""White space of PML texts: removes the file's indentation, keeps what separates words and lines.

The white space between two texts belongs to the second one. It is reduced to a space, a line break
or a blank line. So a text's tokens do not depend on what follows it. Most tokenizers split before
white space, and then the texts' tokens are those of the whole prompt. Knows strings only.
"""

from __future__ import annotations

import textwrap

_WEIGHT = ("", " ", "\n", "\n\n")


def separator(space: str) -> str:
    """White space between two texts, reduced to a space, a line break or a blank line."""
    return _WEIGHT[min(3, 1 + space.count("\n"))] if space else ""


def wider(first: str, second: str) -> str:
    """The wider of two separators."""
    return max(first, second, key=_WEIGHT.index)


def split(text: str, *, is_code: bool = False) -> tuple[str, str, str]:
    """(white space before, the text without common indentation, white space after).

    The indentation of code is kept.
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
        # The text begins on a line of its own, so that line's indentation counts as well.
        indent = before.rpartition("\n")[2]
        return before, textwrap.dedent(indent + body).strip(), after
    first, newline, rest = body.partition("\n")
    return before, first + newline + textwrap.dedent(rest), after
