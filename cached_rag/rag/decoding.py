"""Files as text: which encoding they have. Knows bytes; knows no format."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

from cached_rag.errors import DocumentError

# Of UTF-16 and UTF-32, which alone have zeros in texts.
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
# A text is UTF-8 with damage in it if at least so many characters are whole for each that is not.
# In texts of other encodings it is the other way round.
_WHOLE = 4
# Beyond ASCII, what texts in Western European languages have; but for letters in whose place others
# have their own, as Turkish has for those of Icelandic, and for those that Czech has, too.
_LETTERS = "àáâäåãæçèéêëìíîïñòóôöõøùúûüßœÿ"
_MARKS = bytes((*range(0x80, 0x8A), 0x8B, *range(0x91, 0x9A), 0x9B, *range(0xA0, 0xC0), 0xD7))
_WESTERN = {*_LETTERS, *_MARKS.decode("cp1252", errors="ignore")}


def decoded(path: Path) -> str:
    """A file's text: UTF-8, or what its bytes are likeliest to be.

    Raises:
        DocumentError: it is no text.
    """
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        if (damaged := _damaged_utf8(data)) is not None:
            return damaged
        from charset_normalizer import from_bytes

        found = from_bytes(data)
        best = found.best()
        if best is None or (b"\x00" in data[:4096] and not data.startswith(_BYTE_ORDER_MARKS)):
            raise DocumentError(f"{path}: is not text in any known encoding") from None
        return _western(data, found) or str(best)


def _damaged_utf8(data: bytes) -> str | None:
    """UTF-8 with U+FFFD for what is none, as where a file was cut; None if it is another encoding.

    A guess would turn all its other characters into nonsense.
    """
    text = data.decode("utf-8-sig", errors="replace")
    lost = text.count("\ufffd")
    whole = sum(not character.isascii() for character in text) - lost
    has_mark = data.startswith(codecs.BOM_UTF8)
    is_utf8 = has_mark or (whole >= _WHOLE * lost and b"\x00" not in data[:4096])
    return text if is_utf8 else None


def _western(data: bytes, found: Any) -> str | None:
    """The text in cp1252, if that is as good a guess as any; None if another one is better.

    Of guesses that are as good the library takes any, which turns French into Lithuanian letters.

    Args:
        found: the library's guesses, the best one first.
    """
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        return None
    letters = {letter for letter in text.lower() if not letter.isascii()}
    is_hungarian = "õ" in letters and "ã" not in letters  # õ stands where cp1250 has ő
    guesses = (one for one in found if "cp1252" in (one.encoding, *one.could_be_from_charset))
    guess = next(guesses, None)
    if guess is None or is_hungarian or not letters <= _WESTERN:
        return None
    return text if guess.coherence >= found.best().coherence else None
