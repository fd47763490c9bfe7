"""How KV is written: as it is, or in fewer bits.

A key's channels differ in size, and each keeps its size from token to token; so keys in four bits
are scaled channel by channel, over tokens that stand together, and values token by token. That is
KIVI (Liu et al., ICML 2024, https://arxiv.org/abs/2402.02750), section 3.
"""

from typing import Protocol

import torch

from cached_rag.errors import ConfigError

# Numbers that have a scale and a least value in common in four bits.
GROUP = 32
Tensors = dict[str, torch.Tensor]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class Codec(Protocol):
    """Turns a module into named tensors and back."""

    name: str

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
        """Contiguous tensors on the CPU that hold (num_layers, heads, seq_len, dim) KV.

        The first axis of each is num_layers, so that layers can be read one by one.
        """

    def decode(self, tensors: Tensors, dtype: torch.dtype) -> KeysAndValues:
        """The keys and values again, in `dtype`.

        Raises:
            KeyError: the tensors are not what `encode` gave.
        """


class RawCodec:
    """Keys and values as they are, in the model's dtype."""

    name = "raw"

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
        """`keys` and `values`, (num_layers, num_kv_heads, seq_len, dim)."""
        return {"keys": keys.contiguous().cpu(), "values": values.contiguous().cpu()}

    def decode(self, tensors: Tensors, dtype: torch.dtype) -> KeysAndValues:
        """The same tensors; `dtype` is theirs already."""
        return tensors["keys"], tensors["values"]


class Int8Codec:
    """8-bit integers with one fp32 scale per layer, head and token, for keys and for values.

    An entry's error is at most 1/254 of the largest entry of the same layer, head and token.
    """

    name = "int8"

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
        """`keys`, `values` as int8 and their scales, (num_layers, num_kv_heads, seq_len, 1)."""
        found = {}
        for name, side in (("key", keys), ("value", values)):
            found[f"{name}s"], found[f"{name}_scales"] = _quantize(side)
        return found

    def decode(self, tensors: Tensors, dtype: torch.dtype) -> KeysAndValues:
        """Integers times scales, rounded once to `dtype`."""
        keys = _dequantize(tensors["keys"], tensors["key_scales"], dtype)
        return keys, _dequantize(tensors["values"], tensors["value_scales"], dtype)


def _quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = tensor.float().cpu()
    largest = exact.abs().amax(dim=-1, keepdim=True) if exact.shape[-1] else exact.sum(-1, True)
    scales = largest / 127
    steps = exact / scales.clamp_min(torch.finfo(torch.float32).tiny)
    return steps.round_().clamp_(-127, 127).to(torch.int8).contiguous(), scales.contiguous()


def _dequantize(integers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return integers.float().mul_(scales).to(dtype)


class Int4Codec:
    """4-bit integers in groups of 32 with a scale and a least value each, in bf16: 5 bits a number.

    A group of keys is one channel of 32 tokens, a group of values 32 channels of one token; the
    last one may be filled up, so short texts and narrow heads take more. An entry's error is a
    thirtieth of the distance between its group's least and largest entry, and the rounding of these
    two.
    """

    name = "int4"

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
        """Levels, two a byte, (num_layers, num_kv_heads, key_dim, groups, 16) of keys and
        (num_layers, num_kv_heads, seq_len, groups, 16) of values; their scales and least values,
        (..., groups, 1); and the width of values, (num_layers, 1).
        """
        found = {"width": torch.full((len(values), 1), values.shape[-1], dtype=torch.int32)}
        for name, side in (("key", keys.mT), ("value", values)):
            found |= {f"{name}_{part}": tensor for part, tensor in _grouped(side).items()}
        return found

    def decode(self, tensors: Tensors, dtype: torch.dtype) -> KeysAndValues:
        """Levels times scales, and the least values; rounded once to `dtype`."""
        keys, values = (
            _ungrouped({part: tensors[f"{name}_{part}"] for part in _PARTS}).to(dtype)
            for name in ("key", "value")
        )
        tokens, width = values.shape[-2], int(tensors["width"][0, 0])
        return keys[..., :tokens].mT.contiguous(), values[..., :width].contiguous()


_PARTS = ("levels", "scales", "least")


def _grouped(side: torch.Tensor) -> Tensors:
    """Entries of the last axis in groups, in four bits; the last entry fills up the last group."""
    missing = -side.shape[-1] % GROUP
    whole = torch.cat([side, side[..., -1:].expand(*side.shape[:-1], missing)], dim=-1)
    entries = whole.float().cpu().reshape(*side.shape[:-1], whole.shape[-1] // GROUP, GROUP)
    lowest, highest = torch.aminmax(entries, dim=-1, keepdim=True)
    least, scales = lowest.bfloat16(), ((highest - lowest) / 15).bfloat16()
    steps = (entries - least.float()) / scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    levels = steps.round_().clamp_(0, 15).to(torch.uint8)
    return dict(
        zip(_PARTS, (levels[..., 0::2] | levels[..., 1::2] << 4, scales, least), strict=True)
    )


def _ungrouped(packed: Tensors) -> torch.Tensor:
    levels, scales, least = (packed[part] for part in _PARTS)
    entries = torch.stack([levels & 15, levels >> 4], dim=-1).flatten(-2).float()
    return entries.mul_(scales.float()).add_(least.float()).flatten(-2)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(), Int8Codec(), Int4Codec())}


def codec_by_name(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _CODECS:
        raise ConfigError(f"codec {name!r} is not one of {', '.join(sorted(_CODECS))}")
    return _CODECS[name]
