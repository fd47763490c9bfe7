"""Weights of 4 bits in groups of 32: the form of GGUF's Q4_0, Q4_1 and Q4_K.

A group of 32 neighbours in a row shares a scale and a lowest value: weight = level * scale + low,
with levels of 0 to 15. So these types are kept as they are, nothing is lost. Knows tensors; knows
no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

GROUP = 32
# torch's kernel takes rows by the sixteen.
_ROWS = 16
# Bytes of GGUF's blocks before their levels, and how many groups a block has.
_SUPER = 8


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
