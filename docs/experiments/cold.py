"""Times short calls, as a model makes them: with nothing of theirs in the processor's caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from cached_rag.evaluation.timing import Name, medians, milliseconds

# More than a processor's caches hold.
_FLUSH_BYTES = 64 << 20


def cold_ms(
    variants: Mapping[Name, Callable[[], object]], rounds: int, device: torch.device
) -> dict[Name, float]:
    """Median milliseconds of short calls, with the processor's caches emptied before each.

    Two rounds to warm up come first.
    """
    other = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def timed(work: Callable[[], object]) -> dict[str, float]:
        other.add_(1)
        with torch.inference_mode():
            return {"ms": milliseconds(work, device)}

    calls = {name: partial(timed, work) for name, work in variants.items()}
    return {name: found["ms"] for name, found in medians(calls, rounds, warm_up=2).items()}
