"""One layer's attention alone, relayed and over copies, beside the theory of what is read.

RelayAttention, section 3.4 and figure 6. The copies are attended row by row with the same kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cached_rag.assemble import KVShapes
from cached_rag.plotting import new_figure, save
from cached_rag.relay import Part, relay_attention


@dataclass(frozen=True)
class AttentionRow:
    """A batch of rows over a shared run and their own.

    Attributes:
        relay_ms, copied_ms: medians of one layer's attention.
        speedup: copied over relayed.
        theory: the same by elements moved between memory and processor (equation 10).
    """

    batch: int
    shared_tokens: int
    private_tokens: int
    relay_ms: float
    copied_ms: float
    speedup: float
    theory: float


def theory(batch: int, shared: int, private: int) -> float:
    """Equation 10: (s + c + 2) / (s / b + c + 7)."""
    return (shared + private + 2) / (shared / batch + private + 7)


def bench_attention(
    shapes: KVShapes,
    num_heads: int,
    *,
    batches: Sequence[int] = (1, 4, 8, 16, 32),
    lengths: Sequence[int] = (512, 1024, 2048, 4096),
    private_tokens: int = 128,
    repeats: int = 15,
) -> list[AttentionRow]:
    """Random keys and values in a model's shapes, a token a row."""
    return [
        _timed(shapes, num_heads, batch, shared, private_tokens, repeats)
        for shared in lengths
        for batch in batches
    ]


def plot_attention(rows: Sequence[AttentionRow], path: Path) -> None:
    """Draw speed-ups against shared tokens, a colour for each batch, theory dashed (figure 6).

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


def _timed(
    shapes: KVShapes, num_heads: int, batch: int, shared: int, private: int, repeats: int
) -> AttentionRow:
    def draw(count: int, width: int, heads: int) -> torch.Tensor:
        return torch.randn(1, heads, count, width, dtype=shapes.dtype, device=shapes.device)

    def pair(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (shapes.head_dim, shapes.value_dim)
        keys, values = (draw(count, width, shapes.num_kv_heads) for width in sizes)
        return keys, values

    common, own = pair(shared), [pair(private) for _ in range(batch)]
    query = draw(num_heads, shapes.head_dim, batch)[0]
    rows = [slice(row, row + 1) for row in range(batch)]
    private_parts = [Part(*kv, where) for kv, where in zip(own, rows, strict=True)]
    copies = [
        Part(torch.cat([common[0], keys], 2), torch.cat([common[1], values], 2), where)
        for (keys, values), where in zip(own, rows, strict=True)
    ]
    # What the last call read must not be at hand for the next.
    other = torch.empty(64 << 20, dtype=torch.uint8, device=shapes.device)
    ways: dict[str, Callable[[], object]] = {
        "relay": lambda: relay_attention(query, [Part(*common)], private_parts),
        "copied": lambda: relay_attention(query, [], copies),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 2):
        for name, way in ways.items():
            other.add_(1)
            taken[name].append(_milliseconds(way, shapes.device))
    relay, copied = (statistics.median(taken[name][2:]) for name in ("relay", "copied"))
    expected = theory(batch, shared, private)
    return AttentionRow(
        batch,
        shared,
        private,
        round(relay, 3),
        round(copied, 3),
        round(copied / relay, 2),
        round(expected, 2),
    )


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    with torch.inference_mode():
        work()
    _wait(device)
    return (time.perf_counter() - began) * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
