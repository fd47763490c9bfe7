"""Gives a loaded model's linear layers few-bit forms, which few rows are computed with.

`densify` comes before the model's lean form is made, `pack` after it. Where memory is short a layer
keeps nothing but its few bits; else it keeps dense weights, too, for passes with many rows
(`few_bits.py`). `fits_dense` says whether there is memory for both.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import nn

from cached_rag.backends.machine import OVERHEAD_BYTES, free_bytes, return_memory
from cached_rag.backends.transformers.few_bits import (
    INT8_COLUMNS,
    METHOD,
    FewBitLinear,
    Groups,
    HalfLinear,
    Int4Linear,
    Int8Linear,
    StoredLinear,
    fits_groups,
    fits_half,
    form_of,
    grouped,
    has_half_kernel,
    in_bytes,
    keep,
)
from cached_rag.errors import ConfigError, ModelError

# Bytes of a weight in few bits, its share of the scales included.
_BYTES = {"int4": 0.75, "int8": 1.0}
Format = Literal["as stored", "bf16", "int8", "int4"]
# What a layer keeps for passes with many rows.
Keeps = Literal["nothing", "dense", "halves"]
_HEAD = "lm_head"
# No subclasses: routers of experts are some, and give back more than a product.
_LINEAR = (nn.Linear, StoredLinear)
FORMATS: tuple[Format, ...] = ("as stored", "bf16", "int8", "int4")


class Fused(nn.Module):
    """A fused layer for those that were fused: computed once for all that ask for it in turn."""

    def __init__(self, whole: nn.Module, askers: int) -> None:
        """Take a layer, and of how many layers it is made."""
        super().__init__()
        self.whole = whole
        self._askers, self._left = askers, 0
        self._asked = self._found = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., out_features) for (..., in_features)."""
        if self._asked is not hidden or not self._left:
            self._asked, self._found, self._left = hidden, self.whole(hidden), self._askers
        self._left -= 1
        found = self._found
        if not self._left:
            self._asked = self._found = torch.empty(0)
        return found


class Slice(nn.Module):
    """Some outputs of a fused layer: it stands for one of the layers that were fused."""

    def __init__(self, fused: Fused, outputs: slice) -> None:
        super().__init__()
        self.fused, self.outputs = fused, outputs

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., number of outputs) for (..., in_features)."""
        return self.fused(hidden)[..., self.outputs]  # type: ignore[no-any-return]


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
    found = _plain(stored.groups.dense(dtype), stored.bias)
    keep(found, stored.groups)
    return found


def pack(model: Any, network: nn.Module, weights: Format, dtype: torch.dtype, keeps: Keeps) -> None:
    """Give linear layers the form that `weights` names.

    Args:
        model: a transformers model.
        network: its lean form, or the model itself.
        dtype: of scales, to which activations are rounded where few bits are read.
        keeps: what is kept beside the few bits, set to the same numbers. With "dense" the model
            goes on with that. Else, and always for the head, its layers become what the network's
            are; with "halves" all others become fp32.
    """
    if weights == "bf16":
        return
    places = _places(model)
    parts = {n: part for n, part in network.named_modules() if type(part) in _LINEAR}

    @torch.no_grad()
    def packed(name: str) -> nn.Module | None:
        return _packed(name, parts[name], weights, dtype, keeps)

    names = sorted(parts, key=lambda name: name != _HEAD)  # the largest goes first
    workers = torch.get_num_threads() if keeps == "halves" else 1  # FBGEMM packs in one thread
    with ThreadPoolExecutor(workers) as pool:
        for name, found in zip(names, pool.map(packed, names), strict=True):
            part = parts.pop(name)
            if found is None:
                continue
            network.set_submodule(name, found)
            stands = places.pop(part, [])
            fused = Fused(found, len(stands))
            for place, outputs in stands:
                if getattr(found, "dense", None) is not part:
                    model.set_submodule(place, Slice(fused, outputs) if outputs else found)
                forget_stored(model.get_submodule(place))
            forget_stored(part)
            del part
            return_memory()  # what a layer is packed by would else be kept, for all layers together
    if keeps == "halves":
        _compute_in_fp32(model)


@torch.no_grad()
def _compute_in_fp32(model: Any) -> None:
    """Make fp32 what is not packed."""
    for part in model.modules():
        if not isinstance(part, FewBitLinear):
            for held in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if held.is_floating_point():
                    held.data = held.data.float()
    model.config.dtype = torch.float32


def _places(model: Any) -> dict[nn.Module, list[tuple[str, slice | None]]]:
    """For each linear layer of a model's lean form, where in the model it, or a part of it, is."""
    found: dict[nn.Module, list[tuple[str, slice | None]]] = {}
    for name, part in model.named_modules():
        if type(part) in _LINEAR:
            whole, outputs = vars(part).get("whole", (part, None))
            found.setdefault(whole, []).append((name, outputs))
    return found


def formats(network: nn.Module) -> dict[str, int]:
    """How many linear layers a network has of each format."""
    kinds = (nn.Linear, HalfLinear, FewBitLinear)
    parts = network.named_modules()
    linears = (part for n, part in parts if isinstance(part, kinds) and not n.endswith(".dense"))
    return Counter(getattr(part, "kind", "dense") for part in linears)


def _form(
    name: str, part: nn.Linear | StoredLinear, weights: Format, keeps: Keeps
) -> Groups | str | None:
    """What a layer is to be kept as; None for as it is."""
    stored = form_of(part)
    in_8 = None if part.in_features % INT8_COLUMNS else "int8"
    if weights == "as stored":  # in fp16, 8 bits need not be rounded
        return (None if keeps == "halves" else in_8) if stored == "int8" else stored
    if weights == "int8" or name == _HEAD:  # a head in 4 bits costs most and saves least
        return in_8
    if isinstance(stored, Groups):
        return stored
    return "int4" if fits_groups(part.out_features, part.in_features) else in_8


def _packed(
    name: str,
    part: nn.Linear | StoredLinear,
    weights: Format,
    dtype: torch.dtype,
    keeps: Keeps,
) -> nn.Module | None:
    """A layer's few bits, with what it keeps for many rows, which is set to the same numbers.

    None for a layer that stays as it is.
    """
    wanted = _form(name, part, weights, keeps)
    if wanted is None and keeps != "halves":
        return None
    own = part.groups.dense(torch.float32) if isinstance(part, StoredLinear) else part.weight.data
    if keeps == "halves":
        return _halved(own.float(), part.bias, wanted, dtype)
    # A head has few rows, and its weights may be the embeddings', which are not to be rounded.
    dense = part if keeps == "dense" and name != _HEAD else None
    if wanted == "int8":
        levels, scales = in_bytes(own, dtype)
        if dense is not None:
            own.copy_(levels * scales[:, None].to(own.dtype))
        return Int8Linear(levels, scales, part.bias, dense)
    groups = wanted if isinstance(wanted, Groups) else grouped(own)
    if dense is not None and groups is not wanted:
        own.copy_(groups.dense(own.dtype))
    return Int4Linear(groups, dtype, part.bias, dense)


def _halved(
    own: torch.Tensor, bias: nn.Parameter | None, wanted: Groups | str | None, dtype: torch.dtype
) -> nn.Module:
    """A layer in fp16, and for very few rows in 4 bits, if they are wanted."""
    groups = wanted
    if wanted == "int4":
        groups = grouped(own)
        own = groups.dense(torch.float32)
    elif wanted == "int8":
        levels, scales = in_bytes(own, torch.float32)
        own = levels * scales[:, None]
    dense = HalfLinear(own, bias) if fits_half(own) else _plain(own, bias)
    return Int4Linear(groups, dtype, bias, dense) if isinstance(groups, Groups) else dense


def _plain(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Linear:
    found = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    found.weight = nn.Parameter(weight, requires_grad=False)
    found.register_parameter("bias", bias)
    return found


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


def kept_as(
    name: str, model: Any, dtype: torch.dtype, device: str, weights: Format, *, is_asked: bool
) -> tuple[torch.dtype, Keeps]:
    """In which dtype to load a model that is computed in `dtype`, and what its layers keep.

    Args:
        name, model: see `fits_dense`.
        is_asked: the user asked for this dtype. Else fp32 stands for bf16, which the CPU lacks:
            then weights are kept in fp16, and loaded in 16 bits if the file has no more.

    Raises:
        ModelError: it does not fit.
    """
    has_kernel = device.startswith("cpu") and has_half_kernel()
    stored = getattr(model.config, "quantization_config", None) or {"quant_method": METHOD}
    is_ordinary = weights != "bf16" and stored.get("quant_method") == METHOD
    if dtype == torch.float32 and not is_asked and has_kernel and is_ordinary:
        own = model.config.dtype
        own = own if own in (torch.bfloat16, torch.float16) else dtype
        if fits_dense(name, model, own, device, weights):
            return own, "halves"
    return dtype, "dense" if fits_dense(name, model, dtype, device, weights) else "nothing"


def fits_dense(name: str, model: Any, dtype: torch.dtype, device: str, weights: Format) -> bool:
    """Whether there is memory for a model's dense weights besides those in few bits.

    If not, few bits alone must do; they can only where the model's folder stores them.

    Args:
        model: without weights, see `empty_model`.

    Raises:
        ModelError: neither fits: the system would kill this process while it loads the model.
    """
    dense, few, saved = _weight_bytes(model, dtype, weights)
    # Weights are in the host's memory first, whatever the device.
    free, device = min((free_bytes(place), place) for place in {device, "cpu"})
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
