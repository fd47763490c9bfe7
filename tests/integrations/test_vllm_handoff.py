"""From the prefill node to the connector, with a vLLM that is nothing but its base classes."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, plain_cache, tiny_model
from vllm_cached_rag.node import Handed, PrefillNode

from cached_rag import ConfigError, Engine
from cached_rag.spi import Handoff

BLOCK, BLOCKS = 16, 40
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BODY = {"messages": [{"role": "user", "content": "\n\n".join([*CHUNKS, "Who lit the lamp?"])}]}


class Base:
    def __init__(self, vllm_config, role, kv_cache_config):
        pass

    def bind_connector_metadata(self, metadata):
        self.metadata = metadata

    def _get_connector_metadata(self):
        return self.metadata


class Layer:
    """An attention layer; its cache is (2, heads, slots, dim), as only its own code knows."""

    num_kv_heads, head_size = 2, 16

    def __init__(self):
        self.kv_cache = torch.zeros(2, self.num_kv_heads, BLOCK * BLOCKS, self.head_size)
        self.impl = self

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        kv_cache[0][:, slot_mapping] = key.transpose(0, 1)
        kv_cache[1][:, slot_mapping] = value.transpose(0, 1)


@pytest.fixture
def connector_class(monkeypatch):
    parts = BASE.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base = sys.modules[BASE]
    base.KVConnectorBase_V1, base.KVConnectorMetadata = Base, type("Metadata", (), {})
    monkeypatch.delitem(sys.modules, "vllm_cached_rag.connector", raising=False)
    yield importlib.import_module("vllm_cached_rag.connector").CachedRAGConnector
    del sys.modules["vllm_cached_rag.connector"]


@pytest.fixture
def node(tmp_path):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode(CHUNKS, context=None)
    node = PrefillNode(engine, str(tmp_path / "prompts"), "reuse")
    yield node
    node.close()


class Vllm:
    """A scheduler and a worker around the connector, one request at a time."""

    def __init__(self, connector_class, settings, layers=4, **changes):
        self.layers = {f"model.layers.{n}.attn": Layer() for n in reversed(range(layers))}
        extra = settings.transfer_config()["kv_connector_extra_config"] | changes
        transfer = SimpleNamespace(
            kv_connector_extra_config=extra, kv_load_failure_policy="recompute"
        )
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            parallel_config=SimpleNamespace(world_size=1),
            model_config=SimpleNamespace(dtype=torch.float32),
            cache_config=SimpleNamespace(block_size=BLOCK),
            compilation_config=SimpleNamespace(
                static_forward_context={**self.layers, "model.layers.0.mlp": object()}
            ),
        )
        self.scheduler, self.worker = (connector_class(config, role, None) for role in (0, 1))

    def step(self, request, local=0):
        """(tokens from us, blocks that failed, KV of the request's tokens by layer)."""
        count, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
        assert not is_async
        length = len(request.prompt_token_ids)
        ids = torch.randperm(BLOCKS)[: -(-length // BLOCK)].tolist()
        blocks = SimpleNamespace(get_block_ids=lambda: (ids,))
        self.scheduler.update_state_after_alloc(request, blocks, count)
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        self.worker.start_load_kv(None)
        slots = [block * BLOCK + row for block in ids for row in range(BLOCK)][:length]
        names = [f"model.layers.{n}.attn" for n in range(len(self.layers))]
        kv = torch.stack([self.layers[name].kv_cache[:, :, slots] for name in names])
        failed = self.worker.get_block_ids_with_load_errors()
        assert not self.worker.get_block_ids_with_load_errors()
        return count, {ids.index(block) for block in failed}, kv


def request_of(handed, **changes):
    fields = handed.ticket.fields(handed.token_ids)
    return SimpleNamespace(
        request_id="r",
        prompt_token_ids=handed.token_ids,
        kv_transfer_params=changes.get("params", fields["kv_transfer_params"]),
        cache_salt=changes.get("salt", fields["cache_salt"]),
        lora_request=changes.get("lora"),
    )


def prefilled(node):
    handed = node.prefill(BODY)
    assert isinstance(handed, Handed)
    return handed


def test_vllm_has_in_its_blocks_what_the_node_computed(connector_class, node):
    handed = prefilled(node)
    assert handed.report.modules_hit == 3
    count, failed, kv = Vllm(connector_class, node.settings).step(request_of(handed))
    assert not failed
    assert 0 < len(handed.token_ids) - count <= BLOCK
    _, again, _ = node._engine.prompt_kv(BODY["messages"], method="reuse")
    wanted = torch.stack([again.keys, again.values], dim=1)
    torch.testing.assert_close(kv[:, :, :, :count], wanted[:, :, :, :count])
    assert not kv[:, :, :, count:].any()  # the rest is vLLM's


def test_the_kv_is_full_prefills_where_nothing_is_reused(tmp_path):
    model = tiny_model("llama")
    ids, kv, report = Engine(model, NEW_PROMPTS).prompt_kv(BODY["messages"], method="full")
    keys, values = plain_cache(model, ids)
    torch.testing.assert_close(kv.keys, keys[:, :, :-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kv.values, values[:, :, :-1], atol=1e-4, rtol=1e-4)
    assert (kv.start, list(kv.token_ids), report.method) == (0, ids[:-1], "full")


def test_what_the_connector_needs_loads_no_model_library():
    code = (
        "import sys; from cached_rag.errors import CachedRAGError, ConfigError\n"
        "from cached_rag.spi import Handoff\n"
        "import vllm_cached_rag.agreed\n"
        "assert not {'transformers', 'fastapi', 'httpx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_vllm_keeps_what_it_has(connector_class, node):
    handed = prefilled(node)
    whole, _, full = Vllm(connector_class, node.settings).step(request_of(handed))
    count, _, kv = Vllm(connector_class, node.settings).step(request_of(handed), local=2 * BLOCK)
    assert count == whole - 2 * BLOCK
    assert not kv[:, :, :, : 2 * BLOCK].any()
    assert torch.equal(kv[:, :, :, 2 * BLOCK :], full[:, :, :, 2 * BLOCK :])
    assert Vllm(connector_class, node.settings).step(request_of(handed), local=whole)[0] == 0


@pytest.mark.parametrize("changes", [{"salt": None}, {"salt": "x"}, {"params": None}])
def test_without_salt_or_ticket_vllm_computes_all(connector_class, node, changes):
    vllm = Vllm(connector_class, node.settings)
    assert vllm.step(request_of(prefilled(node), **changes))[0] == 0


def test_a_request_for_a_lora_adapter_gets_no_kv_of_the_model_without_it(
    connector_class, node, caplog
):
    vllm = Vllm(connector_class, node.settings)
    asked = request_of(prefilled(node), lora=SimpleNamespace(lora_name="poems"))
    for _ in range(2):  # vLLM may ask several times
        count, _, kv = vllm.step(asked)
        assert count == 0
        assert not kv.any()
    assert caplog.text.count("LoRA adapter") == 1
    assert vllm.step(request_of(prefilled(node)))[0] > 0


def test_other_tokens_and_other_models_find_nothing(connector_class, node):
    handed = prefilled(node)
    asked = request_of(handed)
    asked.prompt_token_ids = [*handed.token_ids[:-2], 7, 7]
    assert Vllm(connector_class, node.settings).step(asked)[0] == 0
    vllm = Vllm(connector_class, node.settings, fingerprint="another")
    assert vllm.step(request_of(handed))[0] == 0


def test_kv_is_gone_after_the_answer(connector_class, node):
    handed = prefilled(node)
    node.forget(handed)
    assert Vllm(connector_class, node.settings).step(request_of(handed))[0] == 0


def damaged(folder):
    for path in folder.rglob("*"):
        if path.is_file() and "sqlite" not in path.name and path.stat().st_size > 10_000:
            data = bytearray(path.read_bytes())
            data[-5000] ^= 1
            path.write_bytes(data)


def test_damage_is_found_and_vllm_computes_it(connector_class, node, tmp_path):
    handed = prefilled(node)
    vllm = Vllm(connector_class, node.settings)
    damaged(tmp_path / "prompts")
    count, failed, _ = vllm.step(request_of(handed))
    assert failed == set(range(count // BLOCK))


def test_a_model_of_another_shape_gets_no_kv(connector_class, node, caplog):
    vllm = Vllm(connector_class, node.settings, layers=3)
    count, failed, kv = vllm.step(request_of(prefilled(node)))
    assert failed == set(range(count // BLOCK))
    assert not kv.any()
    assert "3 layers" in caplog.text
    vllm = Vllm(connector_class, node.settings)
    for layer in vllm.layers.values():
        layer.num_kv_heads = 4
    assert vllm.step(request_of(prefilled(node)))[1]


def test_a_folder_that_cannot_be_read_is_a_miss(connector_class, node, monkeypatch):
    handed = prefilled(node)
    vllm = Vllm(connector_class, node.settings)
    for store in (vllm.scheduler._handoff, vllm.worker._handoff):
        store._disk.close()
    monkeypatch.setattr(Handoff, "has", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    assert vllm.step(request_of(handed))[0] == 0


def test_an_unknown_method_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError):
        PrefillNode(Engine(tiny_model("llama")), str(tmp_path), "nothing")


def test_a_prompt_of_one_token_has_nothing_to_hand_over(connector_class, node):
    handed = node.prefill({"prompt": "a"})
    assert len(handed.token_ids) == 1
    assert Vllm(connector_class, node.settings).step(request_of(handed))[0] == 0


def test_what_cannot_be_prefilled_is_said(node):
    long = {"prompt": "word " * 5000}
    assert "ContextOverflowError" in node.prefill(long)
    assert "renders" in node.prefill({"prompt": [1, 2]})


def test_a_folder_that_was_removed_and_made_anew_is_found_again(tmp_path):
    folder = tmp_path / "prompts"
    _, kv, _ = Engine(tiny_model("llama"), NEW_PROMPTS).prompt_kv(CHUNKS[0])
    vllm, node = Handoff(folder, "model"), Handoff(folder, "model")
    for _ in range(2):
        assert vllm.has(node.put(kv), kv.token_ids)
        shutil.rmtree(folder)  # both have the files open still
        assert vllm.has(node.put(kv), kv.token_ids)
        node.close()
        node = Handoff(folder, "model")  # restarted
    node.close()
    vllm.close()


def test_a_handoff_gives_back_what_was_put_and_bounds_what_stays(tmp_path):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    _, kv, _ = engine.prompt_kv(CHUNKS[0])
    ids = kv.token_ids
    store = Handoff(tmp_path, "model", max_bytes=5 * kv.nbytes // 2)
    names = [store.put(kv) for _ in range(3)]
    assert [store.has(name, ids) for name in names] == [False, True, True]
    keys, values = store.open(names[2], ids).layer(1)
    assert torch.equal(keys, kv.keys[1])
    assert torch.equal(values, kv.values[1])
    assert store.open(names[2], ids[:-1]) is None
    assert store.delete(names[2], ids)
    assert not store.has(names[2], ids)
    store.close()
