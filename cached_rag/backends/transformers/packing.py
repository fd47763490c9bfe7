"""Gives a loaded model's linear layers few-bit forms, which few rows are computed with.

One row needs every weight once, so its time, as in decoding, is that of reading them. With many
rows arithmetic takes the time, and torch's bf16 product is faster than its few-bit kernels: then a
layer uses dense weights, if it has them. `fits_dense` says whether there is memory for both.

`densify` comes before the model's lean form is made, `pack` after it. Where memory is short a layer
keeps nothing but its few bits; else it keeps dense weights, too, for passes with many rows. Both
hold the same numbers, whatever computes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn

from cached_rag.backends.machine import OVERHEAD_BYTES, free_bytes, return_memory
from cached_rag.backends.transformers.groups import (
    GROUP,
    Groups,
    StoredLinear,
    fits_groups,
    form_of,
    grouped,
    keep,
)
from cached_rag.errors import ConfigError, ModelError

_OPS = torch.ops.aten
# Bytes of a weight in few bits, its share of the scales included.
_BYTES = {"int4": 0.75, "int8": 1.0}
# Up to so many rows, a kernel is faster than the product of dense bf16 weights; measured by
# `python -m docs.experiments kernels --weights` on two cores with AVX-512.
INT4_ROWS = 12
INT8_ROWS = 6
# Weights are converted so many rows at a time, since they pass through fp32.
_ROWS_AT_ONCE = 4096
Format = Literal["as stored", "bf16", "int8", "int4"]
_HEAD = "lm_head"
_LINEAR = (nn.Linear, StoredLinear)
FORMATS: tuple[Format, ...] = ("as stored", "bf16", "int8", "int4")


class FewBitLinear(nn.Module, ABC):
    """A linear layer in few bits, and maybe the same weights dense.

    Attributes:
        weight: (out_features, in_features), dense; None to save memory.
        kind: the format's name.
        few_rows: with more rows, the dense weights are used.
        scales_dtype: what rows are rounded to for the kernel. Torch's kernels are fast in bf16
            alone, on every CPU; in fp32 they are slower than dense weights.
    """

    kind: str
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

    kind, few_rows = "int4", INT4_ROWS

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

    kind, few_rows = "int8", INT8_ROWS
    levels: torch.Tensor
    scales: torch.Tensor

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


class Slice(nn.Module):
    """Some outputs of a fused layer: it stands for one of the layers that were fused."""

    def __init__(self, whole: nn.Module, outputs: slice) -> None:
        super().__init__()
        self.whole, self.outputs = whole, outputs

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., number of outputs) for (..., in_features)."""
        return self.whole(hidden)[..., self.outputs]  # type: ignore[no-any-return]


def densify(model: Any, dtype: torch.dtype, *, keeps_groups: bool = False) -> None:
    """Make a model of stored layers an ordinary one, whose layers remember what they were.

    Args:
        keeps_groups: leave layers that are stored in 4 bits as they are, for want of memory.
    """
    for name in getattr(getattr(model.config, "quantization_config", None), "int8", ()):
        keep(model.get_submodule(name), "int8")
    stored = [name for name, part in model.named_modules() if isinstance(part, StoredLinear)]
    for name in () if keeps_groups else stored:
        model.set_submodule(name, dense_of(model.get_submodule(name), dtype))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config, model.hf_quantizer
        model.is_quantized = False


def forget_stored(model: Any) -> None:
    """Have layers forget what they were stored as: their weights have changed, or are packed."""
    for part in model.modules():
        keep(part, None)


def dense_of(stored: StoredLinear, dtype: torch.dtype) -> nn.Linear:
    """An ordinary layer with the same weights, which remembers its groups."""
    found = nn.Linear(stored.in_features, stored.out_features, bias=False, device="meta")
    found.weight = nn.Parameter(stored.groups.dense(dtype), requires_grad=False)
    found.register_parameter("bias", stored.bias)
    keep(found, stored.groups)
    return found


@torch.no_grad()
def pack(
    model: Any, network: nn.Module, weights: Format, dtype: torch.dtype, *, keeps_dense: bool
) -> None:
    """Give linear layers the form that `weights` names.

    Args:
        model: a transformers model.
        network: its lean form, or the model itself.
        dtype: of scales, to which activations are rounded where few bits are read.
        keeps_dense: keep dense weights beside the few bits, set to the same numbers; the model
            goes on with them. If not, and always for the head, the model's layers become what the
            network's are.
    """
    if weights == "bf16":
        return
    places = _places(model)
    names = [name for name, part in network.named_modules() if isinstance(part, _LINEAR)]
    for name in sorted(names, key=lambda name: name != _HEAD):  # the largest goes first
        part = network.get_submodule(name)
        assert isinstance(part, _LINEAR)
        wanted = _form(name, part, weights)
        if wanted is None:
            continue
        # A head has few rows, and its weights may be the embeddings', which are not to be rounded.
        has_dense = keeps_dense and name != _HEAD
        own = part.groups.dense(model.dtype) if isinstance(part, StoredLinear) else part.weight.data
        packed = _packed(own, part.bias, wanted, dtype, own if has_dense else None)
        network.set_submodule(name, packed)
        for place, outputs in places.pop(part, ()):
            if not has_dense:
                model.set_submodule(place, Slice(packed, outputs) if outputs else packed)
            forget_stored(model.get_submodule(place))
        forget_stored(part)
        return_memory()  # what a layer is packed by would else be kept, for all layers together


def _places(model: Any) -> dict[nn.Module, list[tuple[str, slice | None]]]:
    """For each linear layer of a model's lean form, where in the model it, or a part of it, is."""
    found: dict[nn.Module, list[tuple[str, slice | None]]] = {}
    for name, part in model.named_modules():
        if isinstance(part, _LINEAR):
            whole, outputs = vars(part).get("whole", (part, None))
            found.setdefault(whole, []).append((name, outputs))
    return found


def formats(network: nn.Module) -> dict[str, int]:
    """How many linear layers a network has of each format."""
    linears = (part for part in network.modules() if isinstance(part, (nn.Linear, FewBitLinear)))
    return Counter(getattr(part, "kind", "dense") for part in linears)


def _form(name: str, part: nn.Linear | StoredLinear, weights: Format) -> Groups | str | None:
    """What a layer is to be kept as; None for as it is."""
    stored = form_of(part)
    if weights == "as stored":
        return stored
    if weights == "int8" or name == _HEAD:  # a head in 4 bits costs most and saves least
        return "int8"
    if isinstance(stored, Groups):
        return stored
    return "int4" if fits_groups(part.out_features, part.in_features) else "int8"


def _packed(
    own: torch.Tensor,
    bias: nn.Parameter | None,
    wanted: Groups | str,
    dtype: torch.dtype,
    kept: torch.Tensor | None,
) -> FewBitLinear:
    """A layer's few bits; `kept`, its dense weights, are set to the same numbers."""
    if wanted == "int8":
        levels, scales = in_bytes(own, dtype)
        if kept is not None:
            kept.copy_(levels * scales[:, None].to(kept.dtype))
        return Int8Linear(levels, scales, bias, kept)
    groups = wanted if isinstance(wanted, Groups) else grouped(own)
    if kept is not None and groups is not wanted:
        kept.copy_(groups.dense(own.dtype))
    return Int4Linear(groups, dtype, bias, kept)


def parse_format(weights: str, device: str) -> Format:
    """A format of weights from its name.

    Raises:
        ConfigError: there is no such format, or not on this device.
    """
    if weights not in FORMATS:
        raise ConfigError(f"weights {weights!r} is not one of {', '.join(FORMATS)}")
    if device.startswith("cpu"):
        return weights
    if weights in ("int8", "int4"):
        raise ConfigError(
            f"weights={weights!r} needs a CPU, and the model is on {device}; use weights='bf16' or "
            "device='cpu'"
        )
    return "bf16"


def fits_dense(name: str, model: Any, dtype: torch.dtype, device: str, weights: Format) -> bool:
    """Whether there is memory for a model's dense weights besides those in few bits.

    If not, few bits alone must do; they can only where the model's folder stores them.

    Args:
        model: without weights, see `empty_model`.

    Raises:
        ModelError: neither fits: the system would kill this process while it loads the model.
    """
    dense, few, saved = _weight_bytes(model, dtype, weights)
    free = free_bytes(device)
    if dense + few + OVERHEAD_BYTES <= free:
        return True
    least = dense + few - saved
    if least + OVERHEAD_BYTES <= free:
        return False
    kind = str(dtype).removeprefix("torch.")
    smaller = '; dtype="bfloat16" takes half of it.' if dtype == torch.float32 else "."
    raise ModelError(
        f"{name} does not fit: its weights take {least / 2**30:.1f} GiB in {kind} and "
        f"loading {OVERHEAD_BYTES / 2**30:.1f} GiB more, and {max(free, 0) / 2**30:.1f} GiB of "
        f"memory are free on {device}. Free some, use a smaller model or its Q4 GGUF on a CPU, or "
        f"a machine with more memory{smaller}"
    )


def _weight_bytes(model: Any, dtype: torch.dtype, weights: Format) -> tuple[float, float, float]:
    """How much memory a model's weights take, by its configuration.

    Returns:
        Bytes of dense weights in `dtype`; of those in few bits besides; and how many fewer there
        are while the model is loaded without dense weights of layers stored in 4 bits.
    """
    dense = sum(int(part.numel()) for part in model.parameters()) * dtype.itemsize
    stored = getattr(model.config, "quantization_config", None) or {}
    few = saved = 0.0
    for name, part in model.named_modules():
        if not isinstance(part, torch.nn.Linear):
            continue
        kind = next((kind for kind in _BYTES if name in stored.get(kind, ())), "bf16")
        wanted, count = kind if weights == "as stored" else weights, part.weight.numel()
        few += count * _BYTES.get(wanted, 0)
        if kind == wanted == "int4":
            saved += count * (dtype.itemsize - _BYTES["int4"])
    return dense, few, saved
