"""Weights in few bits: their stored form, and linear layers that are read in them.

A group of 32 neighbours in a row shares a scale and a lowest value: weight = level * scale + low,
with levels of 0 to 15. That is the form of GGUF's Q4_0, Q4_1 and Q4_K, so nothing of these is lost.
`gguf.py` writes folders that hold some weights so. transformers loads them; this tells it, as its
quantizers do, which linear layers are stored in which form. Afterwards every layer is an ordinary
one that remembers its stored form, or one that holds nothing else.

Few bits are read where few rows are computed. One row needs every weight once, so its time, as in
decoding, is that of reading them. With many rows arithmetic takes the time, and torch's bf16
product is faster than its few-bit kernels: then a layer uses dense weights, if it has them. Both
hold the same numbers, whatever computes them.

A CPU without bf16 computes in fp32. There dense weights are kept in fp16 (`HalfLinear`): they take
half of the memory and are read in half of the time, and are sixteen times as exact as in bf16.
Knows no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

GROUP = 32
# torch's kernel takes rows by the sixteen.
_ROWS = 16
METHOD = "cached_rag"
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
_LARGEST = torch.finfo(torch.float16).max
# What fp16 rounds most, in rows whose largest weight is larger, is less than that share.
_TINY = torch.finfo(torch.float16).smallest_normal


@dataclass(frozen=True)
class Groups:
    """A matrix of 4-bit weights.

    Attributes:
        levels: (rows, columns / 2) uint8, two neighbours a byte, the first in the low bits.
        scales, lows: (rows, columns / 32) fp32.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weights."""
        return self.levels.shape[0], 2 * self.levels.shape[1]

    def unpacked(self) -> torch.Tensor:
        """(rows, columns) uint8 levels."""
        return torch.stack([self.levels & 15, self.levels >> 4], dim=-1).view(self.shape)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """(rows, columns) weights, computed in fp32 and rounded once."""
        levels = self.unpacked().view(*self.scales.shape, GROUP).float()
        return (
            torch.addcmul(self.lows[..., None], levels, self.scales[..., None])
            .to(dtype)
            .view(self.shape)
        )

    def __getitem__(self, rows: slice | torch.Tensor) -> Groups:
        """Some rows."""
        return Groups(self.levels[rows], self.scales[rows], self.lows[rows])


def fits_groups(rows: int, columns: int) -> bool:
    """Whether a matrix of this size can be kept in groups that torch's kernel takes."""
    return rows % _ROWS == 0 and columns % GROUP == 0


def joined(parts: Sequence[Groups]) -> Groups:
    """The rows of one matrix after those of another."""
    return Groups(
        torch.cat([part.levels for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.lows for part in parts]),
    )


def grouped(weights: torch.Tensor) -> Groups:
    """The nearest 4-bit form of (rows, columns) weights; see `fits_groups`."""
    split = weights.float().view(len(weights), -1, GROUP)
    lows, highs = split.amin(-1), split.amax(-1)
    scales = ((highs - lows) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    levels = ((split - lows[..., None]) / scales[..., None]).round_().clamp_(0, 15)
    pairs = levels.to(torch.uint8).view(len(weights), -1, 2)
    return Groups(pairs[..., 0] | (pairs[..., 1] << 4), scales, lows)


@register_quantization_config(METHOD)
class StoredConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Which weights of a folder are stored in fewer bits than their dtype, by module.

    Attributes:
        int4: linear layers stored as `Groups`.
        int8: layers stored in bf16 whose origin had five to eight bits.
    """

    def __init__(self, int4: Sequence[str] = (), int8: Sequence[str] = (), **_: Any) -> None:
        self.quant_method = METHOD
        self.int4, self.int8 = list(int4), list(int8)


class StoredLinear(nn.Module):
    """A linear layer as a folder holds it. It computes slowly: it makes its weights each time."""

    levels: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, groups: Groups, bias: nn.Parameter | None) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.bias = groups.shape, bias
        for name, part in vars(groups).items():
            self.register_buffer(name, part)

    @classmethod
    def like(cls, linear: nn.Linear) -> StoredLinear:
        """A layer of the same shape, without content."""
        rows, columns = linear.out_features, linear.in_features
        levels = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
        sides = torch.empty(2, rows, columns // GROUP, dtype=torch.float32, device="meta")
        return cls(Groups(levels, *sides), linear.bias)

    @classmethod
    def joined(cls, linears: Sequence[StoredLinear]) -> StoredLinear:
        """A layer with the outputs of several, which become views of it."""
        biases: list[torch.Tensor] = [one.bias for one in linears if one.bias is not None]
        bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        whole, begin = cls(joined([linear.groups for linear in linears]), bias), 0
        for linear in linears:
            some = slice(begin, begin := begin + linear.out_features)
            linear.levels, linear.scales, linear.lows = vars(whole.groups[some]).values()
        return whole

    @property
    def groups(self) -> Groups:
        """Its weights."""
        return Groups(self.levels, self.scales, self.lows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., out_features) for (..., in_features)."""
        return F.linear(hidden, self.groups.dense(hidden.dtype), self.bias)


def form_of(linear: nn.Module) -> Groups | str | None:
    """What a layer is stored as: groups, "int8" for five to eight bits, None for dense weights."""
    if isinstance(linear, StoredLinear):
        return linear.groups
    found: Groups | str | None = vars(linear).get("stored")
    return found


def keep(linear: nn.Module, form: Groups | str | None) -> None:
    """Have an ordinary layer remember what it is stored as, see `form_of`."""
    vars(linear)["stored"] = form


@register_quantizer(METHOD)
class StoredQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts a `StoredLinear` where the folder has groups, before transformers loads the weights."""

    requires_calibration = True  # such weights come from a file, never from a running model

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for name in self.quantization_config.int4:
            model.set_submodule(name, StoredLinear.like(model.get_submodule(name)))

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return False

    def is_serializable(self) -> bool:
        """Whether the model can be saved as it was loaded."""
        return False


class FewBitLinear(nn.Module, ABC):
    """A linear layer in few bits, and maybe the same weights dense.

    Torch's kernels are fast in bf16 alone, on every CPU; in fp32 they are slower than dense
    weights. While a model is examined, it is fp32 (`recording.py`).

    Attributes:
        dense: a layer of the same numbers, for many rows; None to save memory.
        kind: the format's name.
        few_rows: with more rows, `dense` computes.
        scales: to whose dtype rows are rounded for the kernel.
    """

    kind: str
    few_rows: int
    scales: torch.Tensor
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
        few = 0 if self.scales.dtype == torch.float32 else self.few_rows
        if self.dense is not None and len(rows) > few:
            return self.dense(hidden)  # type: ignore[no-any-return]
        found = self.product(rows.to(self.scales.dtype)).to(hidden.dtype)
        if self.bias is not None:
            found = found + self.bias
        return found.view(*hidden.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor | None:
        """Those of `dense`: some models read a layer's weights themselves (Jamba)."""
        return getattr(self.dense, "weight", None)

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
    """Whether fp16 has room for (rows, columns) weights: none too large, and few too small."""
    weight = weight.detach()
    most = torch.maximum(weight.amax(1), -weight.amin(1))
    # Only rows of tiny weights can lose more, and they are few: reading all is what takes time.
    tiny = most < _TINY
    rows = weight[tiny]
    error = (rows.half().to(rows.dtype) - rows).abs().amax(1)
    return bool((most <= _LARGEST).all() and (error <= _ROUNDING * most[tiny]).all())


class Int4Linear(FewBitLinear):
    """Levels of 4 bits, in the order that torch's kernel on this machine wants.

    Attributes:
        scales: (columns / 32, rows, 2), each with the weight of a level of 8.
    """

    kind = "int4"
    packed: torch.Tensor

    def __init__(
        self, groups: Groups, dtype: torch.dtype, bias: torch.Tensor | None, dense: nn.Module | None
    ) -> None:
        """Reorder a matrix for the kernel.

        Args:
            dtype: of scales.
        """
        super().__init__(groups.shape, bias, dense)
        self.few_rows = INT4_ROWS_OF_HALVES if isinstance(dense, HalfLinear) else INT4_ROWS
        levels = groups.unpacked().int()
        packed = _OPS._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.register_buffer("packed", packed, persistent=False)
        # The kernel takes a level of 8 for zero.
        pairs = torch.stack([groups.scales, groups.lows + 8 * groups.scales], dim=-1)
        pairs = pairs.transpose(0, 1).contiguous().to(dtype)
        self.register_buffer("scales", pairs, persistent=False)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """See `FewBitLinear`."""
        return _OPS._weight_int4pack_mm_for_cpu(  # type: ignore[no-any-return]
            rows.contiguous(), self.packed, GROUP, self.scales
        )


class Int8Linear(FewBitLinear):
    """Levels of -127 to 127 and one scale for each output."""

    kind, few_rows = "int8", INT8_ROWS
    levels: torch.Tensor

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

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """See `FewBitLinear`."""
        if self.scales.dtype == torch.float32:  # for 256 rows the kernel takes 25 times as long
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
        exact = weights[rows].float()
        scales[rows] = (exact.abs().amax(1) / 127).clamp(min=1e-30).to(dtype)
        levels[rows] = (exact / scales[rows].float()[:, None]).round_().clamp_(-127, 127).char()
    return levels, scales
