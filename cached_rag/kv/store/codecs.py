"""What a module is turned into before it is written to a file. Knows tensors; knows no file."""

from __future__ import annotations

from typing import Protocol

import torch

from cached_rag.errors import ConfigError
from cached_rag.kv.module import ModuleKV

Tensors = dict[str, torch.Tensor]


class Codec(Protocol):
    """Turns a module into named tensors and back."""

    name: str

    def encode(self, kv: ModuleKV) -> Tensors:
        """Contiguous tensors on the CPU that hold the module's keys and values.

        The first axis of each is num_layers, so that layers can be read one by one.
        """
        ...

    def decode(
        self, tensors: Tensors, token_ids: tuple[int, ...], start: int, dtype: torch.dtype
    ) -> ModuleKV:
        """The module again, in `dtype`.

        Raises:
            KeyError, ConfigError: the tensors are not what `encode` gave.
        """
        ...


class RawCodec:
    """Keys and values as they are, in the model's dtype."""

    name = "raw"

    def encode(self, kv: ModuleKV) -> Tensors:
        """`keys` and `values`, (num_layers, num_kv_heads, seq_len, dim)."""
        return {"keys": kv.keys.contiguous().cpu(), "values": kv.values.contiguous().cpu()}

    def decode(
        self, tensors: Tensors, token_ids: tuple[int, ...], start: int, dtype: torch.dtype
    ) -> ModuleKV:
        """The same tensors; `dtype` is theirs already."""
        return ModuleKV(token_ids, start, tensors["keys"], tensors["values"])


class Int8Codec:
    """8-bit integers with one fp32 scale per layer, head and token, for keys and for values.

    An entry's error is at most 1/254 of the largest entry of the same layer, head and token.
    """

    name = "int8"

    def encode(self, kv: ModuleKV) -> Tensors:
        """`keys`, `values` as int8 and their scales, (num_layers, num_kv_heads, seq_len, 1)."""
        keys, key_scales = _quantize(kv.keys)
        values, value_scales = _quantize(kv.values)
        return {
            "keys": keys,
            "key_scales": key_scales,
            "values": values,
            "value_scales": value_scales,
        }

    def decode(
        self, tensors: Tensors, token_ids: tuple[int, ...], start: int, dtype: torch.dtype
    ) -> ModuleKV:
        """Integers times scales, rounded once to `dtype`."""
        keys = _dequantize(tensors["keys"], tensors["key_scales"], dtype)
        values = _dequantize(tensors["values"], tensors["value_scales"], dtype)
        return ModuleKV(token_ids, start, keys, values)


def _quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = tensor.float().cpu()
    scales = exact.abs().amax(dim=-1, keepdim=True) / 127
    steps = exact / scales.clamp_min(torch.finfo(torch.float32).tiny)
    return steps.round_().clamp_(-127, 127).to(torch.int8).contiguous(), scales.contiguous()


def _dequantize(integers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return integers.float().mul_(scales).to(dtype)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(), Int8Codec())}

CODEC_NAMES = tuple(_CODECS)


def codec_by_name(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _CODECS:
        raise ConfigError(f"codec {name!r} is not one of {', '.join(sorted(_CODECS))}")
    return _CODECS[name]
