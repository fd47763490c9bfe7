"""KV read layer by layer while layers run: the same numbers, and damage found before it is used."""

from __future__ import annotations

import dataclasses
import errno
import logging
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNKS, ask, tiny_model
from safetensors import safe_open

from cached_rag import Engine, StoreConfig
from cached_rag.errors import CorruptBlobError
from cached_rag.kv.blob import StoredKV
from cached_rag.kv.buffer import KVBuffer, LayerLoader, ModuleKV
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.tensor_file import TensorFile
from cached_rag.kv.tiers import MemoryStore
from cached_rag.library.plan import Placement

METHODS = ["reuse", "cacheblend", "a3", "auto"]


@pytest.fixture(params=["raw", "int8"])
def folder(request, tmp_path):
    settings = StoreConfig(path=str(tmp_path), codec=request.param, sequence_bytes=0)
    with Engine(tiny_model("llama"), settings) as engine:
        engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
    return settings


def reopened(settings, pipelined=True):
    return Engine(tiny_model("llama"), dataclasses.replace(settings, pipelined=pipelined))


def answer(engine, method):
    done = engine.prefill(ask(*CHUNKS[::-1]), method=method, max_tokens=4)
    done.release()
    return done


@pytest.mark.parametrize("method", METHODS)
def test_reading_while_computing_equals_reading_first(folder, method):
    with reopened(folder, pipelined=False) as first, reopened(folder) as second:
        _, plan = second.plan(ask(*CHUNKS[::-1]), method, answer(first, method).report)
        assert any(isinstance(place.kv, StoredKV) for place in plan.placements)
        eager, lazy = answer(first, method), answer(second, method)
        assert lazy.report.modules_hit == eager.report.modules_hit == 3
        assert torch.equal(lazy.logits, eager.logits)


def test_what_was_read_is_in_memory_the_next_time(folder):
    with reopened(folder) as engine:
        answer(engine, "reuse")
        engine.write_back.drain()
        _, plan = engine.plan(ask(*CHUNKS), "reuse", answer(engine, "reuse").report)
        assert all(isinstance(place.kv, ModuleKV) for place in plan.placements)


@pytest.mark.parametrize("pipelined", [False, True])
def test_what_the_host_has_comes_to_the_device(pipelined, monkeypatch):
    tiers = [MemoryStore(1 << 20), MemoryStore(1 << 20)]
    monkeypatch.setattr("cached_rag.library.library.memory_tiers", lambda *_: tiers)
    with Engine(tiny_model("llama"), StoreConfig(pipelined=pipelined)) as engine:
        engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
        for key in list(tiers[0].held):
            tiers[0].delete(key)
        places = [one for one in answer(engine, "reuse").plan.placements if one.source]
        assert len(places) == 3
        engine.write_back.drain()
        assert {place.origin.tier for place in places} == {"memory"}
        assert all(engine.library.shelf.key(*place.source) in tiers[0] for place in places)


def file_of(store, key):
    (path,) = store.path.glob(f"blobs/*/{key}.*")
    return path


def damage(path, share):
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 255
    path.write_bytes(content)


def test_what_cannot_be_read_midway_is_kept_and_done_without(folder, monkeypatch, caplog):
    with reopened(folder) as engine:
        plain = answer(engine, "full").logits
    with reopened(folder) as engine, caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(TensorFile, "read", _fails_at("values", TensorFile.read))
            done = answer(engine, "cacheblend")
        assert done.report.method == "full"
        assert torch.equal(done.logits, plain)
        assert "It is kept" in caplog.text
        engine.write_back.drain()
        assert answer(engine, "cacheblend").report.modules_hit == 3


def _fails_at(name, read):
    def reading(self, wanted, *rows):
        if wanted == name:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, wanted, *rows)

    return reading


@pytest.mark.parametrize("share", [0.3, 0.55, 0.95])
def test_damage_found_while_layers_run_costs_a_second_try_and_nothing_else(folder, share, caplog):
    with reopened(folder) as engine:
        whole = answer(engine, "cacheblend").logits
        ids = engine.tokenization.literal(CHUNKS[1]).ids
        key = engine.library.shelf.key(engine.library.encoded_after()[0], ids)
    root = DiskStore(folder.path, codec=folder.codec)
    damage(file_of(root, key), share)
    root.close()
    with reopened(folder) as engine, caplog.at_level(logging.WARNING):
        done = answer(engine, "cacheblend")
        assert done.report.modules_missed == 1
        assert done.report.modules_hit == 2
        assert "checksum" in caplog.text
        assert not torch.equal(done.logits, whole)  # one chunk was computed in its place
        engine.write_back.drain()
        again = answer(engine, "cacheblend")
        assert again.report.modules_missed == 0
        assert torch.allclose(again.logits, whole, atol=0.05 if folder.codec == "int8" else 1e-4)


def test_a_layer_is_checked_when_it_is_read_and_not_before(folder):
    store = DiskStore(folder.path, codec=folder.codec)
    key = next(iter(store.sizes()))
    path = file_of(store, key)
    with safe_open(str(path), framework="pt") as file:
        values = file.get_tensor("values").clone()
    ids = _ids(store, key)
    store.close()
    layers = len(values)
    content, last = path.read_bytes(), values[layers - 1]
    at = content.index(last.contiguous().view(torch.uint8).numpy().tobytes())
    path.write_bytes(content[: at + 3] + bytes([content[at + 3] ^ 255]) + content[at + 4 :])
    store = DiskStore(folder.path, codec=folder.codec)
    source = store.open(key, ids)
    source.layer(0)
    with pytest.raises(CorruptBlobError, match="checksum"):
        source.layer(layers - 1)
    with pytest.raises(CorruptBlobError, match="checksum"):
        store.get(key, ids)
    store.close()


def _ids(store, key):
    with safe_open(str(file_of(store, key)), framework="pt") as file:
        return tuple(file.get_tensor("token_ids").tolist())


class Slow:
    """A source whose layers come one by one, or not at all."""

    token_ids, start, seq_len = (1, 2, 3), 0, 3

    def __init__(self, kv, fails_at=None):
        self.kv, self.fails_at, self.read = kv, fails_at, []

    def layer(self, index):
        self.read.append(index)
        if index == self.fails_at:
            raise CorruptBlobError("layer is damaged")
        return self.kv.layer(index)


def test_a_loader_on_cuda_is_waited_for_where_its_buffer_is(monkeypatch):
    """Not on whatever device is the current one; and for copies that its thread has begun."""
    waited = []
    current = SimpleNamespace(wait_event=waited.append, wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", {torch.device("cpu"): current}.__getitem__)
    model = tiny_model("llama")
    loader = LayerLoader(KVBuffer.like(model.shapes, 8), (), model.rule)
    loader.wait(model.shapes.num_layers - 1)
    loader._stream, loader._ready[1] = "stream", Future()
    loader._ready[1].set_result("second")
    loader.wait(1)
    loader.finish()
    assert waited == ["second", "stream"]


def test_a_loader_gives_layers_in_order_and_hands_errors_over():
    model = tiny_model("llama")
    buffer = KVBuffer.like(model.shapes, 8)
    shape = (model.shapes.num_layers, model.shapes.kinds[0].heads, 3, model.shapes.kinds[0].key_dim)
    kv = ModuleKV((1, 2, 3), 0, torch.randn(shape), torch.randn(shape))
    source = Slow(kv)
    loader = LayerLoader(buffer, [Placement(2, source, is_exact=False)], model.rule)
    loader.wait(len(buffer.keys) - 1)
    loader.finish()
    twin = KVBuffer.like(model.shapes, 8)
    twin.place(kv, 2, model.rule)
    assert source.read == list(range(len(buffer.keys)))
    assert torch.equal(buffer.keys[:, :, :, 2:5], twin.keys[:, :, :, 2:5])
    assert torch.equal(buffer.values[:, :, :, 2:5], twin.values[:, :, :, 2:5])
    failing = Placement(2, Slow(kv, fails_at=1), is_exact=False)
    loader = LayerLoader(buffer, [failing], model.rule)
    with pytest.raises(CorruptBlobError, match="damaged"):
        loader.wait(1)
    loader.finish()
    assert loader.failed is failing
