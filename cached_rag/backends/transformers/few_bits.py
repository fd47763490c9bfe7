"""Linear layers that are read in few bits where few rows are computed.

One row needs every weight once, so its time, as in decoding, is that of reading them. With many
rows arithmetic takes the time, and torch's bf16 product is faster than its few-bit kernels: then a
layer uses dense weights, if it has them. Both hold the same numbers, whatever computes them.

A CPU without bf16 computes in fp32. There dense weights are kept in fp16 (`HalfLinear`): they take
half of the memory and are read in half of the time, and are sixteen times as exact as in bf16.
Knows no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from cached_rag.backends.transformers.groups import GROUP, Groups

_OPS = torch.ops.aten
# Up to so many rows, a kernel is faster than the product of dense bf16 weights; measured by
# `python -m docs.experiments kernels --weights` on two cores with AVX-512.
INT4_ROWS = 12
INT8_ROWS = 6
# The same beside weights in fp16, on two cores with AVX2; levels of 8 bits are never faster there.
INT4_ROWS_OF_HALVES = 2
# Torch's kernel for bytes reads so many inputs at once, past the end of a row, too.
INT8_COLUMNS = 16
# Weights are converted so many rows at a time, since they pass through fp32.
_ROWS_AT_ONCE = 4096
# Weights are kept in fp16 if that moves none further than bf16 would: by this share of the largest
# weight of its row.
_ROUNDING = 2.0**-9


class FewBitLinear(nn.Module, ABC):
    """A linear layer in few bits, and maybe the same weights dense.

    Attributes:
        dense: a layer of the same numbers, for many rows; None to save memory.
        kind: the format's name.
        few_rows: with more rows, `dense` computes.
    """

    kind: str
    few_rows: int
    bias: nn.Parameter | None

    def __init__(
        self, shape: tuple[int, int], bias: torch.Tensor | None, dense: nn.Module | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        kept = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", kept)
        self.dense = dense

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., out_features) for (..., in_features)."""
        rows = hidden.reshape(-1, self.in_features)
        few = 0 if self.scales_dtype == torch.float32 else self.few_rows
        if self.dense is not None and len(rows) > few:
            return self.dense(hidden)  # type: ignore[no-any-return]
        found = self.product(rows.to(self.scales_dtype)).to(hidden.dtype)
        if self.bias is not None:
            found = found + self.bias
        return found.view(*hidden.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor | None:
        """Those of `dense`: some models read a layer's weights themselves (Jamba)."""
        return getattr(self.dense, "weight", None)

    @property
    @abstractmethod
    def scales_dtype(self) -> torch.dtype:
        """What rows are rounded to for the kernel.

        Torch's kernels are fast in bf16 alone, on every CPU; in fp32 they are slower than dense
        weights. While a model is examined, it is fp32 (`recording.py`).
        """

    @abstractmethod
    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """(num_rows, out_features) without bias for (num_rows, in_features)."""


class HalfLinear(nn.Module):
    """A linear layer for inputs in fp32 on a CPU, with weights in fp16; sums are in fp32.

    The kernel is FBGEMM's, which torch has for x86 alone.

    Attributes:
        nbytes: what the weights take.
    """

    kind = "fp16"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Round (out_features, in_features) weights."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.nbytes = 2 * weight.numel()
        own = None if bias is None else bias.detach().float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float(), own)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., out_features) for (..., in_features)."""
        return torch.ops.quantized.linear_dynamic_fp16(  # type: ignore[no-any-return]
            hidden, self.packed
        )

    @property
    def weight(self) -> torch.Tensor:
        """(out_features, in_features) fp32 weights, unpacked each time; see `FewBitLinear`."""
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0]  # type: ignore[no-any-return]

    @property
    def bias(self) -> torch.Tensor | None:
        """(out_features,) fp32, if there is one."""
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[1]  # type: ignore[no-any-return]


def has_half_kernel() -> bool:
    """Whether this torch, on this processor, has the kernel of `HalfLinear`."""
    is_there = "fbgemm" in torch.backends.quantized.supported_engines
    return is_there and hasattr(torch.ops.quantized, "linear_prepack_fp16")


def fits_half(weight: torch.Tensor) -> bool:
    """Whether fp16 has room for these weights: none too large, and few too small."""
    for rows in torch.split(weight.detach(), _ROWS_AT_ONCE):
        error = (rows.half().to(rows.dtype) - rows).abs().amax(1)
        if not bool((error <= _ROUNDING * rows.abs().amax(1)).all()):
            return False
    return True


class Int4Linear(FewBitLinear):
    """Levels of 4 bits, in the order that torch's kernel on this machine wants."""

    kind = "int4"
    packed: torch.Tensor
    pairs: torch.Tensor

    def __init__(
        self,
        groups: Groups,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        dense: nn.Module | None = None,
    ) -> None:
        """Reorder a matrix for the kernel.

        Args:
            dtype: of scales, see `scales_dtype`.
        """
        super().__init__(groups.shape, bias, dense)
        self.few_rows = INT4_ROWS_OF_HALVES if isinstance(dense, HalfLinear) else INT4_ROWS
        levels = groups.unpacked().int()
        packed = _OPS._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.register_buffer("packed", packed, persistent=False)
        # The kernel takes a level of 8 for zero.
        pairs = torch.stack([groups.scales, groups.lows + 8 * groups.scales], dim=-1)
        pairs = pairs.transpose(0, 1).contiguous().to(dtype)
        self.register_buffer("pairs", pairs, persistent=False)

    @property
    def scales_dtype(self) -> torch.dtype:
        """See `FewBitLinear`."""
        return self.pairs.dtype

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """See `FewBitLinear`."""
        return _OPS._weight_int4pack_mm_for_cpu(  # type: ignore[no-any-return]
            rows.contiguous(), self.packed, GROUP, self.pairs
        )


class Int8Linear(FewBitLinear):
    """Levels of -127 to 127 and one scale for each output."""

    kind, few_rows = "int8", INT8_ROWS
    levels: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self,
        levels: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        dense: nn.Module | None = None,
    ) -> None:
        """Take (out_features, in_features) int8 levels and (out_features,) scales."""
        super().__init__((levels.shape[0], levels.shape[1]), bias, dense)
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def scales_dtype(self) -> torch.dtype:
        """See `FewBitLinear`."""
        return self.scales.dtype

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """See `FewBitLinear`."""
        if self.scales_dtype == torch.float32:  # for 256 rows the kernel takes 25 times as long
            parts = [rows @ levels.float().T for levels in torch.split(self.levels, _ROWS_AT_ONCE)]
            return torch.cat(parts, dim=-1).mul_(self.scales)
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
