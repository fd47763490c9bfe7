"""Whether a prompt has anything of a text, however its form was changed. Knows text only."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable

# How many letters and digits in a row are no coincidence: some eight words, or a sentence where
# one letter is a word. Blocks begin so often, so that a run of a few more contains a whole one.
_BLOCK, _STRIDE = 40, 8
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


def is_like(prompt: str, texts: Iterable[str]) -> bool:
    """Whether a prompt says a few words in a row as one of the texts does.

    Case, white space, punctuation and escapes of HTML and JSON do not matter.
    """
    blocks = {
        bare[at : at + _BLOCK]
        for bare in map(_bare, texts)
        for at in range(0, len(bare) - _BLOCK + 1, _STRIDE)
    }
    said = _bare(prompt)
    return any(said[at : at + _BLOCK] in blocks for at in range(len(said) - _BLOCK + 1))


def _bare(text: str) -> str:
    """A text's letters and digits, without case."""
    plain = html.unescape(_ESCAPED.sub(lambda found: chr(int(found[1], 16)), text))
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", plain).casefold()))
