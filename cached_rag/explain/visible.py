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


def visible(text: str) -> str:
    """The text, with the number of each character that cannot be seen in its place."""
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)
