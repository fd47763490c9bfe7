"""Which bytes a token stands for. Knows vocabularies; knows no text.

A token may be a part of a character. Decoded by itself it is then a replacement character, whose
bytes are others than the token's; so they are read from the vocabulary.
"""

from __future__ import annotations

import json
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

# GPT-2's: a printable character for each byte.
_ALPHABET = {char: byte for byte, char in bytes_to_unicode().items()}
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes it
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """The bytes of each token of a vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        """Look at how a fast tokenizer of the transformers library decodes."""
        self._tokenizer = tokenizer
        self._added = {token: str(text) for token, text in tokenizer.added_tokens_decoder.items()}
        steps = _steps(tokenizer.backend_tokenizer.decoder)
        self._is_byte_level = "ByteLevel" in steps
        self._is_sentence_piece = bool(steps & {"ByteFallback", "Metaspace"})

    def __call__(self, token: int) -> bytes:
        """A token's bytes, as they stand within a text."""
        if token in self._added:
            return self._added[token].encode()
        if self._is_byte_level or self._is_sentence_piece:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if piece is None:  # a model may have more logits than its tokenizer has tokens
                return b""
            return _from_alphabet(piece) if self._is_byte_level else _from_sentence_piece(piece)
        return str(self._tokenizer.decode([token])).encode()


def _steps(decoder: Any) -> set[str]:
    """The kinds of all steps of a decoder, which only its serialised form tells."""
    found: set[str] = set()

    def collect(part: Any) -> None:
        if isinstance(part, dict):
            found.add(str(part.get("type")))
            for inner in part.get("decoders", []):
                collect(inner)

    collect(json.loads(decoder.__getstate__()) if decoder is not None else None)
    return found


def _from_alphabet(piece: str) -> bytes:
    """A piece in GPT-2's alphabet."""
    return b"".join(
        bytes([_ALPHABET[char]]) if char in _ALPHABET else char.encode() for char in piece
    )


def _from_sentence_piece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace(_SPACE, " ").encode()
