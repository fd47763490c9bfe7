"""Models whose layers differ: their KV is stored, read layer by layer, shared and answered with."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import CHUNKS, alike, ask, random_ids, tiny_model

from cached_rag import Engine, StoreConfig
from cached_rag.errors import CorruptBlobError
from cached_rag.kv.blob import contents, opened
from cached_rag.kv.buffer import KVBuffer, LayerLoader, ModuleKV
from cached_rag.kv.codecs import codec_by_name
from cached_rag.kv.layers import Ragged
from cached_rag.kv.tensor_file import TensorFile
from cached_rag.kv.wire import Sizes
from cached_rag.library.encode import encode_chunks
from cached_rag.library.plan import Placement

FAMILIES = ("gemma4", "gemma3n", "lfm2", "deepseek_v3")


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_process_answers_with_what_is_on_disk(family, codec, tmp_path):
    store = StoreConfig(path=str(tmp_path), codec=codec)
    with Engine(tiny_model(family), store) as engine:
        engine.encode(CHUNKS)
        first = engine.generate(ask(*CHUNKS), max_tokens=8)
    with Engine(tiny_model(family), store) as engine:
        assert engine.encode(CHUNKS).present == 3
        again = engine.generate(ask(*CHUNKS), max_tokens=8)
    assert first.report.modules_hit == again.report.modules_hit == 3
    if codec == "raw":
        assert again.token_ids == first.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_are_made_together_are_those_made_alone(family):
    prompts = [ask(*CHUNKS), ask(*CHUNKS[::-1]), ask(CHUNKS[1])]
    with Engine(tiny_model(family), StoreConfig(sequence_bytes=0)) as engine:
        engine.encode(CHUNKS)
        for method in ("auto", "reuse"):
            options = {"method": method, "max_tokens": 6, "ignore_eos": True}
            alone = [engine.generate(prompt, **options).token_ids for prompt in prompts]
            together = engine.generate_batch(prompts, **options)
            assert [one.token_ids for one in together] == alone


def module(family, tmp_path):
    """A module in memory, and in a file."""
    model = tiny_model(family)
    (kv,) = encode_chunks(model, [None], [tuple(random_ids(30, 3))])
    codec = codec_by_name("raw")
    tensors, header = contents("key", kv, codec)
    return model, kv, codec, tensors, header


def written(tmp_path, tensors, header):
    from safetensors.torch import save_file

    path = tmp_path / "one.safetensors"
    save_file(tensors, str(path), header)
    return TensorFile.at(path)


def test_layers_are_read_one_by_one_and_placed(tmp_path):
    model, kv, codec, tensors, header = module("gemma4", tmp_path)
    assert isinstance(kv.keys, Ragged)
    stored = opened(written(tmp_path, tensors, header), "it", "key", kv.token_ids, codec, None)
    whole, twin = (KVBuffer.like(model.shapes, 40) for _ in range(2))
    loader = LayerLoader(whole, [Placement(5, stored, is_exact=False)], model.rule)
    loader.wait(model.shapes.num_layers - 1)
    loader.finish()
    twin.place(kv, 5, model.rule)
    assert alike(whole.keys[:, 0, :, 5:35], twin.keys[:, 0, :, 5:35], 0)
    assert alike(stored.slice(3, 9).load().values, kv.slice(3, 9).values, 0)
    with pytest.raises(IndexError, match="keeps nothing"):
        stored.layer(5)


@pytest.mark.parametrize("places", [[[0, 0], [0, 2]], [[0, 0]], [[0, 0], [1, 0], [9, 9]], 7])
def test_a_file_that_places_its_layers_wrongly_is_damaged(places, tmp_path):
    _, kv, codec, tensors, header = module("gemma4", tmp_path)
    file = written(tmp_path, tensors, header | {"places": json.dumps(places)})
    with pytest.raises(CorruptBlobError, match="places layers wrongly"):
        opened(file, "it", "key", kv.token_ids, codec, None)


def test_foreign_sizes_do_not_fit():
    shapes = {family: tiny_model(family).shapes for family in (*FAMILIES, "llama")}
    ids = tuple(random_ids(9, 3))
    kvs = {f: next(encode_chunks(tiny_model(f), [None], [ids])) for f in shapes}
    for family, own in shapes.items():
        fitting = {name for name, kv in kvs.items() if Sizes(own, 512, 240).fits(kv)}
        assert fitting == {family}
    kv = kvs["gemma4"]
    other = ModuleKV(kv.token_ids, 0, kv.keys.to(torch.float16), kv.values.to(torch.float16))
    assert not Sizes(shapes["gemma4"], 512, 240).fits(other)
