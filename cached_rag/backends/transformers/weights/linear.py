"""Linear layers that read few bits a weight where few rows are computed, as in decoding.

One row needs every weight once, so its time is that of reading them. With many rows arithmetic
takes the time, and torch's bf16 product is faster than its few-bit kernels: then a layer uses dense
weights, if it has them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn

from cached_rag.backends.transformers.weights.groups import GROUP, Groups

_OPS = torch.ops.aten
# Up to so many rows, a kernel is faster than the product of dense bf16 weights; measured by
# `python -m docs.experiments kernels --weights` on two cores with AVX-512.
INT4_ROWS = 12
INT8_ROWS = 6
# Weights are converted so many rows at a time, since they pass through fp32.
_ROWS_AT_ONCE = 4096


class FewBitLinear(nn.Module, ABC):
    """A linear layer in few bits, and maybe the same weights dense.

    Attributes:
        weight: (out_features, in_features), dense; None to save memory.
        few_rows: with more rows, the dense weights are used.
        scales_dtype: what rows are rounded to for the kernel. Torch's kernels are fast in bf16
            alone, on every CPU; in fp32 they are slower than dense weights.
    """

    few_rows: int
    scales_dtype: torch.dtype
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, shape: tuple[int, int], bias: torch.Tensor | None, weight: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        for name, given in (("bias", bias), ("weight", weight)):
            kept = None if given is None else nn.Parameter(given, requires_grad=False)
            self.register_parameter(name, kept)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., out_features) for (..., in_features)."""
        rows = hidden.reshape(-1, self.in_features)
        few = 0 if self.scales_dtype == torch.float32 else self.few_rows
        if self.weight is not None and len(rows) > few:
            return F.linear(hidden, self.weight, self.bias)
        found = self.product(rows.to(self.scales_dtype)).to(hidden.dtype)
        if self.bias is not None:
            found = found + self.bias
        return found.view(*hidden.shape[:-1], self.out_features)

    @abstractmethod
    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """(num_rows, out_features) without bias for (num_rows, in_features)."""


class Int4Linear(FewBitLinear):
    """Levels of 4 bits, in the order that torch's kernel on this machine wants."""

    few_rows = INT4_ROWS

    def __init__(
        self,
        groups: Groups,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> None:
        """Reorder a matrix for the kernel.

        Args:
            dtype: of scales, see `scales_dtype`.
        """
        super().__init__(groups.shape, bias, weight)
        self.scales_dtype = dtype
        levels = groups.unpacked().int()
        packed = _OPS._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.register_buffer("packed", packed, persistent=False)
        # The kernel takes a level of 8 for zero.
        pairs = torch.stack([groups.scales, groups.lows + 8 * groups.scales], dim=-1)
        pairs = pairs.transpose(0, 1).contiguous().to(dtype)
        self.register_buffer("pairs", pairs, persistent=False)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """See `FewBitLinear`."""
        return _OPS._weight_int4pack_mm_for_cpu(  # type: ignore[no-any-return]
            rows.contiguous(), self.packed, GROUP, self.pairs
        )


class Int8Linear(FewBitLinear):
    """Levels of -127 to 127 and one scale for each output."""

    few_rows = INT8_ROWS

    def __init__(
        self,
        levels: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> None:
        """Take (out_features, in_features) int8 levels and (out_features,) scales."""
        super().__init__((levels.shape[0], levels.shape[1]), bias, weight)
        self.scales_dtype = scales.dtype
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """See `FewBitLinear`."""
        return _OPS._weight_int8pack_mm(  # type: ignore[no-any-return]
            rows.contiguous(), self.levels, self.scales
        )


def in_bytes(weights: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) weights as int8 levels and (rows,) scales of a dtype."""
    levels = torch.empty_like(weights, dtype=torch.int8)
    scales = weights.new_empty(len(weights), dtype=dtype)
    for begin in range(0, len(weights), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        levels[rows], scales[rows] = _in_bytes(weights[rows], dtype)
    return levels, scales


def _in_bytes(weights: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    exact = weights.float()
    scales = (exact.abs().amax(1) / 127).clamp(min=1e-30).to(dtype)
    levels = (exact / scales.float()[:, None]).round_().clamp_(-127, 127)
    return levels.to(torch.int8), scales
