"""Where tokens stand in vLLM's paged KV cache. Knows numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# vLLM 0.32 extends one contiguous beginning. Once it takes external KV with gaps (its pull request
# 32785), a `Load` gets several spans, and vLLM itself computes what lies between them.


@dataclass(frozen=True)
class Load:
    """KV that the worker puts into a request's blocks.

    Attributes:
        name: of the ticket.
        token_ids: the tokens that the KV was handed over for: all of the prompt's but the last.
        begin, end: those of them (`end` exclusive) that are taken; vLLM has the ones before.
        block_ids: the request's blocks, from its first token on.
    """

    name: str
    token_ids: tuple[int, ...]
    begin: int
    end: int
    block_ids: tuple[int, ...]

    def slots(self, block_size: int) -> list[int]:
        """The slot of each token that is taken."""
        return [
            self.block_ids[at // block_size] * block_size + at % block_size
            for at in range(self.begin, self.end)
        ]

    def blocks(self, block_size: int) -> set[int]:
        """The blocks that are written to."""
        return set(self.block_ids[self.begin // block_size : -(-self.end // block_size)])


def whole_blocks(num_tokens: int, block_size: int) -> int:
    """How many of a prompt's tokens, from the first, are handed over: all but its last block's.

    vLLM computes the rest, one token at least, and thereby what follows in its own precision.
    """
    return max(0, num_tokens - 1) // block_size * block_size


def layers_in_order(names: Sequence[str] | Mapping[str, object]) -> list[str]:
    """Names of attention layers by the number in them, as in "model.layers.12.self_attn.attn".

    Raises:
        ValueError: a name has not exactly one number, or they do not count from 0: it is not known
            then which layer is which.
    """
    numbers = {}
    for name in names:
        found = [int(part) for part in name.split(".") if part.isdecimal()]
        if len(found) != 1:
            raise ValueError(f"layer {name!r} has {len(found)} numbers in its name, expected one")
        numbers[name] = found[0]
    ordered = sorted(numbers, key=lambda name: numbers[name])
    if [numbers[name] for name in ordered] != list(range(len(ordered))):
        raise ValueError(f"layers {ordered[:3]}... do not count from 0 on, one by one")
    return ordered
