"""A lower bound of a text's token count, from its length alone.

With it a prompt that cannot fit the model's context is refused before it is tokenised. Knows
tokenizers; knows no prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

# NFC may compose this many characters into one: no canonical decomposition is longer.
_COMPOSED = 4
# Normalizers and pre-tokenizers that remove no character, unless their behaviour is "Removed".
_KEEPING = ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation")


@dataclass(frozen=True)
class Reach:
    """How much text a tokenizer's tokens can stand for.

    Attributes:
        most: most characters that one token can stand for.
        dropped: characters that are dropped, so that they have no token.
    """

    most: int
    dropped: str = ""

    def least_tokens(self, text: str) -> int:
        """The least number of tokens that a text can have."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.most)


def reach_of(backend: Tokenizer) -> Reach | None:
    """How much text a tokenizer's tokens can stand for; None if that is not known for certain.

    It is known for byte-pair encodings in which every character, or one of its bytes, has a token,
    provided that no step before the encoding removes text.
    """
    model, vocabulary = backend.model, backend.get_vocab()
    parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
    added = backend.get_added_tokens_decoder().values()
    if (
        not isinstance(model, models.BPE)
        or not all(map(_keeps, parts))
        or any(token.lstrip or token.rstrip for token in added)  # they swallow white space
    ):
        return None
    composed = _COMPOSED if any(part["type"] == "NFC" for part in parts) else 1
    most = max(map(len, vocabulary)) * composed
    if model.byte_fallback and all(f"<0x{n:02X}>" in vocabulary for n in range(256)):
        return Reach(most)
    is_in_bytes = any(part["type"] == "ByteLevel" for part in parts)
    if not is_in_bytes or not _knows_all_but_ascii(vocabulary):
        return None
    if model.unk_token is not None:  # stands for one unknown character, or for a run if fused
        return None if model.fuse_unk else Reach(most)
    single = map(chr, range(0x80))
    return Reach(most, "".join(c for c in single if _symbols(c) not in vocabulary))


def _knows_all_but_ascii(vocabulary: dict[str, int]) -> bool:
    """Whether every byte that can end a character of several bytes has a token."""
    return all(_symbols(chr(n))[-1] in vocabulary for n in range(0x80, 0xC0))


def _symbols(character: str) -> str:
    """The symbols by which byte-level encodings write a character's bytes."""
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)
    return str(pieces[0][0])


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a step never makes a text shorter, except by composing characters."""
    match part:
        case {"type": "NFC" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new) >= len(old)
        case {"type": kind}:
            return kind in _KEEPING and part.get("behavior") != "Removed"
    return False


def _parts(step: Any) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or a pre-tokenizer, or of each in a sequence."""
    if step is not None:
        settings = json.loads(step.__getstate__())
        yield from settings.get("normalizers") or settings.get("pretokenizers") or [settings]
