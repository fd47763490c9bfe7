"""Text of documents, made harmless to look at.

Control characters would end a page, move a terminal's cursor, or turn the order of what is read.
They are shown as what they are.
"""

from __future__ import annotations

import re

# C0 and C1 controls but for tabs and line ends, marks of direction, surrogates, noncharacters.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_PICTURES = 0x2400  # the control pictures of Unicode, in the order of the controls


def visible(text: str) -> str:
    """The text with a picture, or the number, of each character that cannot be seen."""
    return _UNSEEN.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(_PICTURES + code) if code < 0x20 else f"⟨U+{code:04X}⟩"
