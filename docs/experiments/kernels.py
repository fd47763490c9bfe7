"""Times the attention kernels over shared keys beside each other, in a model's shapes.

`prefers_flash` (`transformers/kernels.py`) chooses between them, by a table of these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cached_rag.backends.transformers.kernels import KERNELS, KV, kernel_of
from cached_rag.errors import ConfigError
from cached_rag.kv.layers import KVShapes
from docs.experiments.cold import cold_ms

_COMPARED = ("flash", "matmul")


@dataclass(frozen=True)
class KernelRow:
    """One layer's attention of some tokens over keys that all of them see.

    Attributes:
        rows: the kernel's rows: tokens times the query heads that share a KV head.
        flash_ms, matmul_ms: median milliseconds.
        ratio: `flash_ms` over `matmul_ms`; above 1, flash is slower.
        taken: the kernel that `attend` uses.
    """

    tokens: int
    rows: int
    keys: int
    flash_ms: float
    matmul_ms: float
    ratio: float
    taken: str


def bench_kernels(
    shapes: KVShapes,
    num_heads: int,
    *,
    tokens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    keys: Sequence[int] = (256, 512, 1024, 1536, 2048, 3072, 4096, 8192),
    repeats: int = 15,
) -> list[KernelRow]:
    """Time the kernels in turn on random queries, keys and values.

    Raises:
        ConfigError: a count below 1, or a model whose keys and values differ in width.
    """
    if min(*tokens, *keys) < 1:
        raise ConfigError("tokens and keys must be at least 1")
    if shapes.kinds[0].key_dim != shapes.kinds[0].value_dim:
        raise ConfigError(
            "the flash kernel takes keys and values of one width, unlike this model's"
        )
    group = num_heads // shapes.kinds[0].heads
    return [
        _timed(shapes, count, count * group, many, repeats) for many in keys for count in tokens
    ]


def _timed(shapes: KVShapes, tokens: int, rows: int, keys: int, repeats: int) -> KernelRow:
    def draw(count: int) -> torch.Tensor:
        size = (1, shapes.kinds[0].heads, count, shapes.kinds[0].key_dim)
        return torch.randn(size, dtype=shapes.dtype, device=shapes.device)

    held = KV(draw(keys), draw(keys))
    scale = shapes.kinds[0].key_dim ** -0.5
    ways = {name: partial(KERNELS[name], draw(rows), held, scale) for name in _COMPARED}
    flash, matmul = cold_ms(ways, repeats, shapes.device).values()
    return KernelRow(tokens, rows, keys, flash, matmul, flash / matmul, kernel_of(rows, held))
