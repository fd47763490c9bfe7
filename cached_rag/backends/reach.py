"""How many tokens a text has at least, so that what cannot fit is refused before it is read.

Knows tokenizers; knows no prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

# A character's canonical decomposition has at most four: so many may become one.
_COMPOSED = 4
_KEEPING = ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation")


@dataclass(frozen=True)
class Reach:
    """What tokens can stand for.

    Attributes:
        most: characters that one token can stand for.
        dropped: characters that no token stands for.
    """

    most: int
    dropped: str = ""

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.most)


def reach_of(backend: Tokenizer) -> Reach | None:
    """What a tokenizer's tokens can stand for; None if nothing is certain.

    It is certain of byte-pair encodings that have a token for every character, or for one of its
    bytes, if nothing is left out on the way to them.
    """
    model, vocabulary = backend.model, backend.get_vocab()
    parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
    added = backend.get_added_tokens_decoder().values()
    if (
        not isinstance(model, models.BPE)
        or not all(map(_keeps, parts))
        or any(token.lstrip or token.rstrip for token in added)  # with all white space beside them
    ):
        return None
    composed = _COMPOSED if any(part["type"] == "NFC" for part in parts) else 1
    most = max(map(len, vocabulary)) * composed
    if model.byte_fallback and all(f"<0x{n:02X}>" in vocabulary for n in range(256)):
        return Reach(most)
    is_in_bytes = any(part["type"] == "ByteLevel" for part in parts)
    if not is_in_bytes or not _knows_all_but_ascii(vocabulary):
        return None
    if model.unk_token is not None:  # each unknown character is one, or a whole run of them is
        return None if model.fuse_unk else Reach(most)
    single = map(chr, range(0x80))
    return Reach(most, "".join(c for c in single if _symbols(c) not in vocabulary))


def _knows_all_but_ascii(vocabulary: dict[str, int]) -> bool:
    """Whether all bytes are known that end a character of several."""
    return all(_symbols(chr(n))[-1] in vocabulary for n in range(0x80, 0xC0))


def _symbols(character: str) -> str:
    """What byte-level encodings write for a character's bytes."""
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)
    return str(pieces[0][0])


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a step makes no text shorter, other than by composing characters."""
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
