"""Weights of 4 bits in groups of 32: the form of GGUF's Q4_0, Q4_1 and Q4_K, and layers of it.

A group of 32 neighbours in a row shares a scale and a lowest value: weight = level * scale + low,
with levels of 0 to 15. So these types are kept as they are, nothing is lost.

`gguf.py` writes folders that hold some weights so. transformers loads them; this tells it, as its
quantizers do, which linear layers are stored in which form. Afterwards every layer is an ordinary
one that remembers its stored form, or one that holds nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

GROUP = 32
# torch's kernel takes rows by the sixteen.
_ROWS = 16
# Bytes of GGUF's blocks before their levels, and how many groups a block has.
_SUPER = 8
METHOD = "cached_rag"


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


def from_blocks(blocks: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> Groups | None:
    """The same weights as (rows, bytes) GGUF blocks; None if the type is not one of groups of 32.

    Layouts: ggml-quants.c of llama.cpp; `gguf.quants` has the same in numpy.
    """
    readers = {
        gguf.GGMLQuantizationType.Q4_0: _q4_0,
        gguf.GGMLQuantizationType.Q4_1: _q4_1,
        gguf.GGMLQuantizationType.Q4_K: _q4_k,
    }
    if kind not in readers:
        return None
    _, size = gguf.GGML_QUANT_SIZES[kind]
    levels, scales, lows = readers[kind](blocks.reshape(-1, size))
    rows = len(blocks)
    packed = torch.from_numpy(levels.reshape(rows, -1, 2))
    sides = (torch.from_numpy(side.astype(np.float32).reshape(rows, -1)) for side in (scales, lows))
    return Groups(packed[..., 0] | (packed[..., 1] << 4), *sides)


Parts = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def _q4_0(blocks: np.ndarray[Any, Any]) -> Parts:
    scales = _half(blocks, 0)
    return _halves(blocks[:, 2:], GROUP), scales, -8 * scales


def _q4_1(blocks: np.ndarray[Any, Any]) -> Parts:
    return _halves(blocks[:, 4:], GROUP), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: np.ndarray[Any, Any]) -> Parts:
    factors, offsets = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    scales = _half(blocks, 0)[:, None] * factors.astype(np.float32).reshape(-1, _SUPER)
    lows = -(_half(blocks, 2)[:, None] * offsets.astype(np.float32).reshape(-1, _SUPER))
    return _halves(blocks[:, 16:], 2 * GROUP), scales, lows


def _half(blocks: np.ndarray[Any, Any], at: int) -> np.ndarray[Any, Any]:
    """The fp16 number at a byte of each block, in fp32."""
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float32)


def _halves(bytes_: np.ndarray[Any, Any], run: int) -> np.ndarray[Any, Any]:
    """Levels: of every `run`, the first half lies in low bits, the second half in high bits."""
    split = bytes_.reshape(len(bytes_), -1, run // 2)
    return np.stack([split & 15, split >> 4], axis=2).reshape(len(bytes_), -1)


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
