"""Codecs: what comes back is within their bounds, and takes the bytes they say."""

from __future__ import annotations

import pytest
import torch

from cached_rag.config import CODEC_NAMES
from cached_rag.kv.blob import layer_sums
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.codecs import codec_by_name
from cached_rag.kv.layers import KVShapes, LayerShape
from cached_rag.kv.wire import Sizes, Wire

LEVELS = 15


def test_each_name_that_a_setting_may_have_is_a_codec_s():
    assert tuple(codec_by_name(name).name for name in CODEC_NAMES) == CODEC_NAMES


def kv(heads=2, tokens=70, key_dim=16, value_dim=64, dtype=torch.float32):
    """Keys whose channels differ in size, as real ones do, and values."""
    torch.manual_seed(0)
    sizes = torch.logspace(-1, 2, key_dim) if key_dim else torch.ones(0)
    keys = (torch.randn(3, heads, tokens, key_dim) + 5) * sizes
    return keys.to(dtype), torch.randn(3, heads, tokens, value_dim).to(dtype)


def back(codec, keys, values):
    codec = codec_by_name(codec)
    return codec.decode(codec.encode(keys, values), keys.dtype)


def spread(side, dim, group):
    """Of each entry, the distance between its group's least and largest, and the largest size."""
    parts = side.split(group, dim=dim)
    extents = [torch.aminmax(part, dim=dim, keepdim=True) for part in parts]
    far = [(high - low).expand_as(p) for p, (low, high) in zip(parts, extents, strict=True)]
    size = [part.abs().amax(dim, keepdim=True).expand_as(part) for part in parts]
    return torch.cat(far, dim), torch.cat(size, dim)


def test_four_bits_err_by_a_thirtieth_of_a_groups_extent():
    keys, values = kv()
    found = back("int4", keys, values)
    for side, got, dim in ((keys, found[0], 2), (values, found[1], 3)):
        extent, size = spread(side, dim, 32)
        rounding = 2**-8 * (size + extent)
        assert ((got - side).abs() <= extent / (2 * LEVELS) + rounding).all()
        assert (got - side).abs().max() > 0  # control


def test_keys_are_scaled_by_channel_so_a_large_one_costs_the_small_ones_nothing():
    keys, values = kv()
    large = keys.clone()
    large[..., -1] *= 1000
    small = back("int4", keys, values)[0][..., :-1]
    assert torch.equal(back("int4", large, values)[0][..., :-1], small)
    by_token, _ = back("int8", large, values)  # control: one scale for all channels of a token
    assert not torch.equal(by_token[..., :-1], back("int8", keys, values)[0][..., :-1])


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_single_token_is_not_too_many_bytes_to_be_brought(codec):
    shapes = KVShapes((LayerShape(8, 128, 128),) * 32, torch.bfloat16, torch.device("cpu"))
    wire = Wire(codec_by_name(codec), sizes=Sizes(shapes, 8192, 128256))
    sent = ModuleKV((5,), 0, *(side.zero_() for side in shapes.empty(1)))
    packed = wire.pack("name", "a key", sent)
    assert wire.unpack("name", packed, "a key", (5,)).token_ids == (5,)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33])
@pytest.mark.parametrize("dims", [(16, 64), (0, 24), (40, 0), (7, 3), (16, 34)])
@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_any_shape_comes_back(codec, dims, tokens):
    keys, values = kv(tokens=tokens, key_dim=dims[0], value_dim=dims[1])
    found = back(codec, keys, values)
    parts = {name: list(part) for name, part in codec_by_name(codec).encode(keys, values).items()}
    assert len(layer_sums(parts)) == len(keys)
    assert [side.shape for side in found] == [keys.shape, values.shape]
    for side, got in zip((keys, values), found, strict=True):
        if side.numel():
            assert (got - side).abs().max() <= side.abs().max() * 0.1


def test_bytes_are_a_third_of_sixteen_bits():
    keys, values = kv(tokens=256, key_dim=64, dtype=torch.bfloat16)
    sizes = {
        name: sum(t.nbytes for t in codec_by_name(name).encode(keys, values).values())
        for name in ("raw", "int8", "int4")
    }
    assert sizes["int8"] / sizes["raw"] < 0.54
    assert sizes["int4"] / sizes["raw"] < 0.32
