"""Weights in few bits compute what the same weights do when they are dense."""

from __future__ import annotations

import copy
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from conftest import random_ids, tiny_model, tiny_tokenizer
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import write_gguf
from torch import nn

from cached_rag import ConfigError, load_model, wrap_model
from cached_rag.backends.base import StepInput
from cached_rag.backends.transformers import few_bits, packing
from cached_rag.backends.transformers.few_bits import (
    GROUP,
    FewBitLinear,
    Groups,
    HalfLinear,
    Int4Linear,
    Int8Linear,
    fits_half,
    grouped,
    has_half_kernel,
    in_bytes,
    joined,
)
from cached_rag.backends.transformers.gguf import from_blocks
from cached_rag.backends.transformers.packing import formats, pack, parse_format
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV

TOLERANCE = 1e-4
needs_half_kernel = pytest.mark.skipif(
    not has_half_kernel(), reason="torch has no such kernel for this processor"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHED_RAG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K])
def test_groups_are_what_the_blocks_say(kind):
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (6, 3 * size), np.uint8)
    halves = random.standard_normal((6, 3, 2)).astype(np.float16).view(np.uint8)
    blocks.reshape(6, 3, size)[:, :, :4] = halves  # any other bytes are some level
    groups = from_blocks(blocks, kind)
    assert groups.shape == (6, 3 * columns)
    expected = gguf.dequantize(blocks, kind)
    assert np.array_equal(groups.dense(torch.float32).numpy(), expected)


def test_other_types_are_no_groups():
    blocks = gguf.quantize(np.ones((2, 64), np.float32), Kind.Q8_0)
    assert from_blocks(blocks, Kind.Q8_0) is None


def test_rounding_to_groups_is_off_by_half_a_level_at_most():
    weights = torch.randn(16, 96)
    groups = grouped(weights)
    error = (groups.dense(torch.float32) - weights).abs().view(16, -1, GROUP)
    assert (error <= 0.5001 * groups.scales[..., None]).all()
    again = grouped(groups.dense(torch.float32))
    assert torch.equal(again.levels, groups.levels)
    whole = joined([groups[:5], groups[5:]])
    assert all(torch.equal(a, b) for a, b in zip(*map(parts, (whole, groups)), strict=True))


def parts(groups: Groups):
    return vars(groups).values()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_in_few_bits_are_those_of_the_dense_weights(kind, rows, has_bias):
    weights, bias = torch.randn(48, 64), torch.randn(48) if has_bias else None
    if kind == "int4":
        groups = grouped(weights)
        layer, dense = Int4Linear(groups, torch.float32, bias, None), groups.dense(torch.float32)
    else:
        levels, scales = in_bytes(weights, torch.float32)
        layer, dense = Int8Linear(levels, scales, bias), levels * scales[:, None]
    hidden = torch.randn(2, rows, 64)
    expected = F.linear(hidden, dense, bias)
    assert torch.allclose(layer(hidden), expected, atol=TOLERANCE)
    assert not torch.allclose(layer(hidden), F.linear(hidden, weights, bias), atol=TOLERANCE)


def test_in_fp32_the_kernel_for_bytes_is_not_called(monkeypatch):
    monkeypatch.setattr(few_bits, "_OPS", None)  # for many rows it is slow in fp32
    levels, scales = in_bytes(torch.randn(few_bits._ROWS_AT_ONCE + 40, 64), torch.float32)
    rows = torch.randn(20, 64)
    found = Int8Linear(levels, scales)(rows)
    assert torch.allclose(found, rows @ (levels * scales[:, None]).T, atol=TOLERANCE)


@needs_half_kernel
def test_many_rows_use_dense_weights_where_there_are_any():
    groups, zero = grouped(torch.randn(16, 32)), nn.Linear(32, 16, bias=False)
    nn.init.zeros_(zero.weight)
    for dense in (zero, HalfLinear(zero.weight, None)):
        layer = Int4Linear(groups, torch.bfloat16, None, dense)
        assert layer(torch.randn(layer.few_rows, 32)).any()
        assert not layer(torch.randn(layer.few_rows + 1, 32)).any()
    exact = Int4Linear(groups, torch.float32, None, zero)
    assert not exact(torch.randn(1, 32)).any()


@needs_half_kernel
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_in_fp16_are_sixteen_times_as_exact_as_in_bf16(has_bias, rows):
    weights, bias = torch.randn(51, 70), torch.randn(51) if has_bias else None
    hidden = torch.randn(2, rows, 70)
    found, expected = HalfLinear(weights, bias)(hidden), F.linear(hidden, weights, bias)
    assert found.shape == expected.shape
    assert torch.allclose(found, F.linear(hidden, weights.half().float(), bias), atol=TOLERANCE)
    coarse = F.linear(hidden, weights.bfloat16().float(), bias)
    assert (found - expected).norm() < (coarse - expected).norm() / 5
    exact = weights.bfloat16().float()  # as most models are published
    assert torch.allclose(
        HalfLinear(exact, bias)(hidden), F.linear(hidden, exact, bias), atol=TOLERANCE
    )


def test_weights_that_fp16_has_no_room_for_stay_in_fp32():
    weights = torch.randn(16, 32)
    assert fits_half(weights)
    assert fits_half(weights * 1e-3)
    assert not fits_half(weights * 1e-6)  # fp16 has few digits there
    assert fits_half((weights * 1e-6).half().float())  # which these need no more of
    assert fits_half(torch.zeros(2, 32))
    assert not fits_half(torch.full((2, 32), float("nan")))
    weights[3, 5] = 1e5
    assert not fits_half(weights)


def test_few_bits_are_read_in_bf16_for_a_model_in_fp32():
    weights, hidden = torch.randn(48, 64), torch.randn(3, 64)
    expected = hidden @ weights.T
    int4 = Int4Linear(grouped(weights), torch.bfloat16, None, None)
    int8 = Int8Linear(*in_bytes(weights, torch.bfloat16))
    for layer, most in ((int4, 0.15), (int8, 0.02)):
        found = layer(hidden)
        assert found.dtype == torch.float32
        assert 1e-4 < (found - expected).norm() / expected.norm() < most


def test_where_fp32_is_fastest_few_bits_are_read_in_bf16_unless_fp32_is_asked_for(
    file, monkeypatch
):
    monkeypatch.setattr(
        "cached_rag.backends.transformers.loading.fastest_dtype", lambda _: torch.float32
    )
    models = load_model(file, device="cpu"), load_model(file, device="cpu", dtype="float32")
    for model, wanted in zip(models, (torch.bfloat16, torch.float32), strict=True):
        parts = model.decoder.network.modules()
        assert {part.scales.dtype for part in parts if isinstance(part, FewBitLinear)} == {wanted}
        assert model.shapes.dtype == torch.float32
    assert models[0].fingerprint != models[1].fingerprint


@pytest.fixture
def without_bf16(monkeypatch):
    """As on a CPU that computes in fp32, where nobody asks for a dtype."""
    if not has_half_kernel():
        pytest.skip("torch has no such kernel for this processor")
    monkeypatch.setattr(
        "cached_rag.backends.transformers.loading.fastest_dtype", lambda _: torch.float32
    )


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ("as stored", {"int4": 4, "fp16": 5}),
        ("int8", {"fp16": 9}),
        ("int4", {"int4": 8, "fp16": 1}),
    ],
)
def test_without_bf16_dense_weights_are_in_fp16(file, weights, found, without_bf16):
    model = load_model(file, device="cpu", weights=weights)
    assert formats(model.decoder.network) == found
    exact = loaded(file, weights)
    kv, own_kv = answers(model)[1], answers(exact)[1]
    assert torch.allclose(kv, own_kv, atol=0.02 * own_kv.abs().max())
    assert not torch.equal(kv, own_kv)
    assert model.fingerprint != exact.fingerprint
    halves = sum(p.nbytes for p in model.decoder.network.modules() if isinstance(p, HalfLinear))
    assert 0 < halves < model.weights_bytes < exact.weights_bytes
    assert nn.Linear not in {type(part) for part in model.decoder.model.modules()}
    assert_same(model, replace(model, decoder=model.decoder.computed_by(model.decoder.model)))
    plain = load_model(file, device="cpu", weights="bf16")
    assert formats(plain.decoder.network) == {"dense": 9}


def test_fp16_is_for_models_that_nobody_else_packs(without_bf16, monkeypatch):
    model = tiny_model.__wrapped__("llama").decoder.model
    model.config.dtype = torch.float16

    def kept(weights="as stored", device="cpu", is_asked=False):
        return packing.kept_as("m", model, torch.float32, device, weights, is_asked=is_asked)

    assert kept() == (torch.float16, "halves")
    assert kept(is_asked=True) == kept(weights="bf16") == (torch.float32, "dense")
    model.config.quantization_config = {"quant_method": "gptq"}
    assert kept() == (torch.float32, "dense")
    del model.config.quantization_config
    monkeypatch.setattr(packing, "has_half_kernel", lambda: False)
    assert kept() == (torch.float32, "dense")


def test_fp16_that_does_not_fit_leaves_a_layer_as_it_is(file, without_bf16, monkeypatch):
    monkeypatch.setattr(packing, "fits_half", lambda _: False)
    model = load_model(file, device="cpu")
    assert formats(model.decoder.network) == {"int4": 4, "dense": 5}
    assert_same(model, replace(model, decoder=model.decoder.computed_by(model.decoder.model)))


def answers(model):
    """Logits of a prefill and of steps of one and of three tokens behind it; then all KV."""
    ids = torch.tensor([[5, 9, 33, 70, 12, 8, 41, 5, 9, 33, 21, 77, 4, 6, 2, 50, 61, 90]])
    buffer = KVBuffer.like(model.shapes, 22)
    row = RowKV(buffer, ids.shape[1])
    found = [model.prefill(buffer, ids).logits]
    steps = [model.step([StepInput(row, new)]) for new in ([7], [3, 8, 11])]
    return torch.cat([*found, *steps]), torch.cat([buffer.keys, buffer.values])


def assert_same(first, second):
    """KV and logits are equal."""
    (logits, kv), (own_logits, own_kv) = answers(first), answers(second)
    assert torch.allclose(kv, own_kv, atol=TOLERANCE * own_kv.abs().max())
    assert torch.allclose(logits, own_logits, atol=TOLERANCE * own_logits.abs().max())


def loaded(file, weights):
    return load_model(file, dtype="float32", device="cpu", weights=weights)


def test_a_file_in_4_bits_is_kept_as_it_is(file):
    model = loaded(file, "as stored")
    network = model.decoder.network
    # Of gate and up one is stored in 5 bits, so the fused layer of both takes 8.
    assert formats(network) == {"int4": 4, "int8": 5}
    exact = loaded(file, "bf16")
    assert formats(exact.decoder.network) == {"dense": 9}
    for ours, own in zip(network.layers, exact.decoder.network.layers, strict=True):
        for name in ("qkv", "down"):
            layer, dense = getattr(ours, name), getattr(own, name).weight
            hidden = torch.randn(3, layer.in_features)
            assert torch.allclose(layer(hidden), hidden @ dense.T, atol=TOLERANCE)
    assert_same(model, replace(model, decoder=model.decoder.computed_by(model.decoder.model)))
    assert model.fingerprint != exact.fingerprint


@pytest.mark.parametrize("weights", ["as stored", "int4"])
def test_where_memory_is_short_no_dense_weights_are_kept(file, weights, monkeypatch):
    rich = loaded(file, weights)
    size, count = rich.weights_bytes, loaded(file, "bf16").num_weights
    monkeypatch.setattr(packing, "free_bytes", lambda _: packing.OVERHEAD_BYTES + 340_000)
    poor = loaded(file, weights)
    assert poor.weights_bytes < size / 2
    assert poor.fingerprint == rich.fingerprint
    assert poor.num_weights == rich.num_weights == count
    kinds = {type(part) for part in poor.decoder.model.model.layers.modules()}
    assert nn.Linear not in kinds
    assert_same(poor, rich)
    assert_same(poor, replace(poor, decoder=poor.decoder.computed_by(poor.decoder.model)))


def test_where_memory_is_short_a_model_in_bf16_is_examined_too(file, monkeypatch):
    monkeypatch.setattr(packing, "free_bytes", lambda _: packing.OVERHEAD_BYTES + 220_000)
    model = load_model(file, dtype="bfloat16", device="cpu")  # its scales are fp32 meanwhile
    few = {part for part in model.decoder.network.modules() if isinstance(part, FewBitLinear)}
    assert len(few) == 9
    assert all(part.dense is None for part in few)
    assert {part.scales.dtype for part in few} == {torch.bfloat16}
    assert answers(model)[0].isfinite().all()


def test_what_fits_a_gpu_has_to_fit_the_host_first(monkeypatch):
    monkeypatch.setattr(packing, "free_bytes", {"cuda": 80 << 30, "cpu": 1 << 20}.get)
    model = tiny_model("llama").decoder.model
    with pytest.raises(ModelError, match="are free on cpu"):
        packing.fits_dense("tiny", model, torch.bfloat16, "cuda", "bf16")


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_is_rounded_whole(family, weights):
    exact, model = tiny_model(family), tiny_model.__wrapped__(family)
    network = model.decoder.network
    pack(model.decoder.model, network, weights, torch.float32, "dense")
    assert set(formats(network)) == {weights, "int8"}
    if network is not model.decoder.model:
        assert_same(model, replace(model, decoder=model.decoder.computed_by(model.decoder.model)))
    assert not torch.allclose(answers(model)[1], answers(exact)[1], atol=TOLERANCE)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_layer_whose_rows_are_no_whole_runs_of_the_kernel_stays_dense(weights):
    network = nn.ModuleDict({"odd": nn.Linear(40, 16), "even": nn.Linear(48, 16)})
    pack(network, network, weights, torch.bfloat16, "dense")
    assert formats(network) == {"dense": 1, "int8": 1}
    assert isinstance(network["odd"], nn.Linear)


@needs_half_kernel
@pytest.mark.parametrize("how", [("int8", "dense"), ("as stored", "halves")])
@pytest.mark.parametrize("family", ["llama4", "jamba"])
def test_routers_and_layers_whose_weights_are_read_compute_as_before(family, how):
    weights, keeps = how
    plain = tiny_model(family).decoder.model
    model = wrap_model(
        *(copy.deepcopy(plain), tiny_tokenizer()),
        **{"name": family, "revision": family, "weights": weights, "keeps": keeps},
    )
    assert formats(model.decoder.network)["int8" if weights == "int8" else "fp16"] > 9
    ids = torch.tensor([random_ids(12)])
    found, own = model.forward(ids)[0], plain(input_ids=ids).logits[0, -1]
    assert F.cosine_similarity(found, own, dim=0) > 0.99


def test_formats_that_do_not_exist_or_not_here_are_refused(model_folder):
    with pytest.raises(ConfigError, match="not one of as stored, bf16, int8, int4"):
        load_model(model_folder, weights="q4")
    with pytest.raises(ConfigError, match="needs a CPU"):
        parse_format("int4", "cuda:0")
    assert parse_format("as stored", "cuda") == "bf16"
