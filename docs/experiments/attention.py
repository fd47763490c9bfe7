"""One layer's attention over shared KV, read once ("relay") or copied for each row ("copied").

Figures stand beside the theory of RelayAttention, sections 3.1 and 3.4, figure 6. Both ways are
what a decoding step of the scheduler does, with and without sharing: keys lie in the same buffers,
short rows in one slab, and the same kernels compute each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cached_rag.backends.base import StepInput
from cached_rag.backends.transformers.attention import Padded
from cached_rag.backends.transformers.batch import BatchCache
from cached_rag.backends.transformers.kernels import KV, Scoring, kernel_of
from cached_rag.backends.transformers.model import LanguageModel
from cached_rag.evaluation.summary import new_figure, save
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import KVShapes, stacks_of
from cached_rag.kv.rows import RowKV, Run, Slabs
from docs.experiments.cold import cold_ms


@dataclass(frozen=True)
class AttentionRow:
    """A batch of rows, one token each, over a shared run of keys and their own keys.

    Attributes:
        relay_ms, copied_ms: median milliseconds of one layer's attention.
        speedup: `copied_ms` over `relay_ms`.
        theory: the speed-up if only the elements read and written counted (equation 10).
        intensity, copied_intensity: operations for each byte moved, of the queries' product with
            the shared keys, read once or by each row (equation 3, 2 bytes an element). Below what
            the machine computes in the time of a byte, memory is the bound.
        relay_kernels, copied_kernels: names in `kernels.KERNELS`; "padded" for the kernel that
            computes all rows of a slab together.
    """

    batch: int
    shared_tokens: int
    private_tokens: int
    relay_ms: float
    copied_ms: float
    speedup: float
    theory: float
    intensity: float
    copied_intensity: float
    relay_kernels: str
    copied_kernels: str


def query_heads(model: LanguageModel) -> int:
    """The number of query heads of a transformers model, which may exceed its KV heads."""
    return int(model.decoder.model.config.get_text_config().num_attention_heads)


def theory(batch: int, shared: int, private: int) -> float:
    """Equation 10: (s + c + 2) / (s / b + c + 7), with b rows, s shared and c private tokens."""
    return (shared + private + 2) / (shared / batch + private + 7)


def intensity(queries: int, keys: int, head_dim: int) -> float:
    """Equation 3: operations a byte of (queries, head_dim) times (head_dim, keys)."""
    return 1 / (1 / queries + 1 / keys + 1 / head_dim)


def bench_attention(
    shapes: KVShapes,
    num_heads: int,
    *,
    batches: Sequence[int] = (1, 4, 8, 16, 32),
    lengths: Sequence[int] = (512, 1024, 2048, 4096),
    private_tokens: int = 128,
    repeats: int = 15,
) -> list[AttentionRow]:
    """Time the attention of every batch size over every length, on random tensors.

    Args:
        shapes: sizes, dtype and device of a model's KV.
        num_heads: its query heads.
        batches: numbers of rows, one token each.
        lengths: numbers of shared tokens.
        private_tokens: tokens that each row has for itself.
    """
    return [
        _timed(shapes, num_heads, batch, shared, private_tokens, repeats)
        for shared in lengths
        for batch in batches
    ]


def plot_attention(rows: Sequence[AttentionRow], path: Path) -> None:
    """Draw speed-up against shared tokens, a colour per batch size, theory dashed (figure 6).

    Raises:
        EvaluationError: matplotlib is missing, or does not know the format.
    """
    figure, axes = new_figure()
    for batch in sorted({row.batch for row in rows}):
        drawn = [row for row in rows if row.batch == batch]
        tokens = [row.shared_tokens for row in drawn]
        (line,) = axes.plot(tokens, [row.speedup for row in drawn], "o-", label=str(batch))
        axes.plot(tokens, [row.theory for row in drawn], linestyle="--", color=line.get_color())
    axes.set(xlabel="shared tokens", ylabel="attention over copies / relayed", yscale="log")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(title="rows (dashed: eq. 10)", loc="outside right upper")
    save(figure, path)


@dataclass(frozen=True)
class Step:
    """The attention of one layer in a decoding step, one token per row.

    Attributes:
        cache: divides the rows' keys into shared and private parts, as in the scheduler's steps.
        query: (1, num_heads, batch, head_dim).
    """

    cache: BatchCache
    query: torch.Tensor

    def attend(self) -> torch.Tensor:
        """(1, num_heads, batch, value_dim)."""
        return self.cache.attend(0, self.query, KV(self.query, self.query), Scoring())

    def kernels(self) -> str:
        """Names of the kernels that compute, those of shared parts first."""
        batch, heads = self.query.shape[2], self.query.shape[1]
        found = []
        for part in (*self.cache.shared, *self.cache.private):
            if isinstance(part, Padded):
                found.append("padded")
                continue
            tokens, kv = len(torch.arange(batch)[part.tokens]), part.of(0)
            found.append(kernel_of(tokens * (heads // kv.keys.shape[1]), kv))
        return ", ".join(dict.fromkeys(found))


def make_steps(
    shapes: KVShapes, num_heads: int, batch: int, shared: int, private: int
) -> dict[str, Step]:
    """One decoding step over random keys and values, in both ways: "relay" and "copied".

    Args:
        shapes: of one layer.
        private: tokens that each row has for itself, the new one included.
    """
    slabs = Slabs(shapes)
    common = KVBuffer.like(shapes, shared)
    _fill(common, 0, shared)
    relayed, copied = [], []
    for _ in range(batch):
        own, copy = slabs.take(private), slabs.take(shared + private)
        _fill(own, 0, private)
        for side, held, whole in (
            (own.keys, common.keys, copy.keys),
            (own.values, common.values, copy.values),
        ):
            stacks_of(whole)[0][..., :shared, :] = stacks_of(held)[0]
            private_side = stacks_of(side)[0][..., :private, :]
            stacks_of(whole)[0][..., shared : shared + private, :] = private_side
        done = shared + private - 1
        relayed.append(StepInput(RowKV(own, done, [Run(common, 0, shared, 0)]), [0]))
        copied.append(StepInput(RowKV(copy, done), [0]))
    size = (1, num_heads, batch, shapes.kinds[0].key_dim)
    query = torch.randn(size, dtype=shapes.dtype, device=shapes.device)
    ways = {"relay": relayed, "copied": copied}
    return {name: Step(BatchCache(rows, (None,)), query) for name, rows in ways.items()}


def _fill(buffer: KVBuffer, begin: int, end: int) -> None:
    for side in (buffer.keys, buffer.values):
        stacks_of(side)[0][..., begin:end, :].normal_()


def _timed(
    shapes: KVShapes, num_heads: int, batch: int, shared: int, private: int, repeats: int
) -> AttentionRow:
    steps = make_steps(replace(shapes, layers=shapes.layers[:1]), num_heads, batch, shared, private)
    ways = {name: step.attend for name, step in steps.items()}
    found = cold_ms(ways, repeats, shapes.device)
    group = num_heads // shapes.kinds[0].heads  # query heads that have the same keys
    return AttentionRow(
        batch,
        shared,
        private,
        found["relay"],
        found["copied"],
        found["copied"] / found["relay"],
        theory(batch, shared, private),
        intensity(batch * group, shared, shapes.kinds[0].key_dim),
        intensity(group, shared, shapes.kinds[0].key_dim),
        steps["relay"].kernels(),
        steps["copied"].kernels(),
    )
