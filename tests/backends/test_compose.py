"""Chunks of models with recurrent layers, composed of what they do to states: `compose`."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from conftest import CHUNKS, HYBRIDS, ask, plain_logits, random_ids, tiny_model, tiny_tokenizer
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

from cached_rag import ConfigError, Engine, GenerationConfig, StoreConfig
from cached_rag.backends.transformers.loading import wrap_model
from cached_rag.errors import ModelError, RelocationError
from cached_rag.kv.buffer import Change, KVBuffer, LayerLoader
from cached_rag.library.encode import COMPOSE_ANCHORS, encode_composed
from docs.experiments.architectures import _tiny

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
HEAD = "You answer questions about the documents below, briefly and exactly, in one sentence each."
COMPOSED = StoreConfig(composes=True)
# Long enough that their first and last tokens are few.
TEXTS = [" ".join([text, *CHUNKS[:at], *CHUNKS[at + 1 :]]) for at, text in enumerate(CHUNKS)]


@pytest.fixture(params=sorted(set(HYBRIDS) - {"jamba", "minimax"}))  # which read on by token
def model(request):
    return remembering(request.param)


def remembering(family):
    """A tiny model whose states decay slowly, so that what stood before a chunk still counts."""
    return forgetting_slowly(tiny_model(family))


def forgetting_slowly(model):
    """The same with decays near 1."""
    with torch.no_grad():
        for name, parameter in model.decoder.model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.fill_(-3.0)
    return model


def states_behind(model, ids):
    buffer = KVBuffer.like(model.shapes, len(ids))
    model.prefill(buffer, torch.tensor([ids]), num_logits=0)
    return buffer.states


def recurrent(states, layer):
    return states.layers[layer].recurrent_states[0]


def stateful(model):
    return [n for n, layer in enumerate(model.decoder.layers) if layer.is_stateful]


@torch.inference_mode()
def test_states_behind_composed_tokens_are_those_of_running_through_them(model):
    ids, other = random_ids(60, 3), random_ids(20, 4)
    buffer = KVBuffer.like(model.shapes, 60)
    model.prefill(buffer, torch.tensor([ids[:40]]), num_logits=0)
    before = buffer.states.copy()
    change = model.composer.compute(buffer, torch.tensor([ids]), torch.arange(40, 60))
    composed = model.composer.behind(before, change, 60)
    assert composed.length == 60
    plain, found = states_behind(model, ids).tensors(), composed.tensors()
    assert plain.keys() == found.keys()
    for key, tensor in plain.items():
        assert torch.allclose(found[key].float(), tensor.float(), atol=TOLERANCE), key
    stale = model.composer.behind(states_behind(model, other), change, 60)  # control
    for layer in stateful(model):
        error = recurrent(stale, layer) - recurrent(composed, layer)
        assert error.abs().max() > 0.1 * recurrent(composed, layer).abs().max()


FAMILIES = "bamba falcon_h1 kimi_linear lara_mini olmo_hybrid qwen3_5_moe_text qwen3_next"


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES.split())
def test_states_of_other_families_are_composed(family):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(next(_tiny(family))).eval()
    model = forgetting_slowly(wrap_model(plain, tiny_tokenizer(), name=family, revision=family))
    ids = torch.tensor([random_ids(60, 3)])
    buffer = KVBuffer.like(model.shapes, 60)
    model.prefill(buffer, ids[:, :40], num_logits=0)
    before = buffer.states.copy()
    change = model.composer.compute(buffer, ids, torch.arange(40, 60))
    found = model.composer.behind(before, change, 60)
    for layer in stateful(model):
        reached = recurrent(buffer.states, layer)
        error = (recurrent(found, layer) - reached).abs().max()
        assert error <= 1e-3 * reached.abs().max()
        kept = (recurrent(found, layer) - change_alone(model, change, layer)).abs().max()
        assert kept > 0.01 * reached.abs().max()  # control: what was before still counts


def change_alone(model, change, layer):
    """The state behind tokens that stand behind nothing."""
    empty = model.unpacked(change_without_matrices(change), 0)
    for at in stateful(model):
        empty.layers[at].recurrent_states[0].zero_()
    return recurrent(model.composer.behind(empty, change, 20), layer)


def change_without_matrices(change):
    held = {k: v for k, v in load(change.numpy().tobytes()).items() if "matrix" not in k}
    return torch.frombuffer(bytearray(save(held)), dtype=torch.uint8)


@torch.inference_mode()
def test_in_the_first_layer_any_order_is_exact_and_above_it_none_is(model):
    """The inputs of the first layer do not depend on what stands before."""
    chunks = [tuple(random_ids(30, seed)) for seed in (5, 6, 7)]
    head, rule = random_ids(20, 8), model.composer.rule
    kvs = {kv.token_ids: kv for kv in encode_composed(model, head, chunks)}
    first, *_, last = stateful(model)
    for order in permutations(chunks):
        ids = torch.tensor([[*head, *sum(order, ())]])
        plain = states_behind(model, ids[0].tolist())
        buffer, done = KVBuffer.like(model.shapes, 110), 0
        for at, chunk in zip((20, 50, 80), order, strict=True):
            buffer.place(kvs[chunk], at, rule)
            change = kvs[chunk].change
            begin, end = at + change.begin, at + change.end
            model.prefill(buffer, ids[:, :begin], torch.arange(done, begin))
            buffer.states = model.composer.behind(buffer.states, change.packed, end)
            done = end
        model.prefill(buffer, ids, torch.arange(done, 110))
        error = (recurrent(buffer.states, first) - recurrent(plain, first)).abs().max()
        assert error <= TOLERANCE * recurrent(plain, first).abs().max()
        above = (recurrent(buffer.states, last) - recurrent(plain, last)).abs().max()
        assert above > 1e-3 * recurrent(plain, last).abs().max()  # control


def first_logits(engine, messages, **options):
    prompt = engine.prefill(messages, max_tokens=1, **options)
    try:
        return prompt.logits[0].clone(), prompt.report, prompt.ids
    finally:
        prompt.release()


def test_a_chunk_behind_what_it_was_encoded_behind_is_exact(model):
    messages = ask(TEXTS[0], system=HEAD)
    with Engine(model, COMPOSED) as engine:
        assert engine.encode(TEXTS[:1], engine.head(messages, TEXTS[0]), context=None).encoded
        composed, report, ids = first_logits(engine, messages, method="compose")
        plain = plain_logits(model, ids.tolist())[-1]
        assert torch.allclose(composed, plain, atol=TOLERANCE)
        chunk = len(engine.tokenization.literal(TEXTS[0]).ids)
        assert report.cached_tokens >= chunk - COMPOSE_ANCHORS - 4
        answer = engine.generate(messages, method="compose", max_tokens=8, ignore_eos=True)
        full = engine.generate(messages, method="full", max_tokens=8, ignore_eos=True)
        assert answer.token_ids == full.token_ids


def test_chunks_in_another_order_are_composed_and_near(model):
    messages = ask(*TEXTS, system=HEAD)
    with Engine(model, COMPOSED) as engine:
        assert engine.encode([*reversed(TEXTS)]).encoded == 3
        composed, report, ids = first_logits(engine, messages, method="compose")
        assert report.modules_hit == 3
        assert report.charged_recompute < 0.6
        plain = plain_logits(model, ids.tolist())[-1]
        away = (composed - plain).abs().max()
        assert away > TOLERANCE  # it is no full prefill
        alone = plain_logits(model, ids.tolist()[-20:])[-1]  # control: without the chunks
        assert away < (alone - plain).abs().max()
        auto = engine.generate(messages, max_tokens=8, ignore_eos=True)
        full = engine.generate(messages, method="full", max_tokens=8, ignore_eos=True)
        assert auto.token_ids == full.token_ids


def test_kv_that_is_placed_layer_by_layer_is_waited_for(monkeypatch):
    model = remembering("qwen3_5")

    def logits():
        with Engine(model, COMPOSED) as engine:
            engine.encode(TEXTS)
            return first_logits(engine, ask(*TEXTS, system=HEAD), method="compose")[0]

    found, plain = logits(), KVBuffer.place_layer

    def slow(*args):
        time.sleep(0.2)
        plain(*args)

    # As if it were in another device's memory, and slow.
    monkeypatch.setattr("cached_rag.engine.prefill.ModuleKV", LayerLoader)
    monkeypatch.setattr(KVBuffer, "place_layer", slow)
    assert torch.equal(logits(), found)


def test_a_composed_conversation_goes_on(model):
    messages = ask(*TEXTS, system=HEAD)
    with Engine(model, COMPOSED) as engine:
        engine.encode(TEXTS)
        options = {"max_tokens": 8, "ignore_eos": True}
        first = engine.generate(messages, method="compose", **options)
        later = [
            *messages,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And then?"},
        ]
        second = engine.generate(later, method="compose", **options)
        assert second.report.cached_tokens > 0.7 * second.report.prompt_tokens
        exact = engine.generate(later, method="prefix", **options)
        full = engine.generate(later, method="full", **options)
        assert exact.token_ids == full.token_ids  # of what was composed it took nothing


def test_it_is_kept_on_disk_and_damage_is_found(tmp_path, caplog):
    model, store = remembering("qwen3_5"), StoreConfig(path=str(tmp_path), composes=True)
    messages = ask(*TEXTS, system=HEAD)
    with Engine(model, store) as engine:
        engine.encode(TEXTS)
        there, report, _ = first_logits(engine, messages, method="compose")
        assert report.modules_hit == 3
    with Engine(model, replace(store, pipelined=True)) as engine:
        again, report, _ = first_logits(engine, messages, method="compose")
        assert report.modules_hit == 3
        assert torch.equal(again, there)
    for path in tmp_path.glob("blobs/**/*.safetensors"):
        data = bytearray(path.read_bytes())
        at = data.index(b"matrix")  # in the change: its own header
        data[at + 2000] ^= 0xFF
        path.write_bytes(data)
    with Engine(model, StoreConfig(path=str(tmp_path), composes=True)) as engine:
        _, report, _ = first_logits(engine, messages, method="compose")
        assert report.modules_hit == 0
    assert "damaged" in caplog.text


def test_a_part_of_a_module_has_its_change_only_with_all_its_tokens():
    change = Change(8, 20, torch.zeros(1))
    assert change.within(3, 20) == Change(5, 17, change.packed)
    assert change.within(9, 24) is None
    assert change.within(0, 19) is None


def test_what_cannot_be_composed_is_refused(engine):
    with pytest.raises(RelocationError, match="this model has none"):
        engine.generate(ask(*CHUNKS), GenerationConfig(method="compose", max_tokens=1))
    with pytest.raises(ConfigError, match="has none; leave it out"):
        Engine(tiny_model("llama"), COMPOSED)
    with pytest.raises(ConfigError, match="remote store"):
        StoreConfig(composes=True, remote="redis://localhost:1/0")


@torch.inference_mode()
def test_a_state_that_is_not_affine_is_found_out(monkeypatch):
    model = remembering("granite4_h")
    layer = model.decoder.layers[0].module.mamba
    plain = type(layer).forward

    def bent(module, hidden_states, cache=None, **options):
        found = plain(module, hidden_states, cache=cache, **options)
        state = cache.layers[module.layer_idx].recurrent_states[0]
        cache.layers[module.layer_idx].recurrent_states[0] = state.sin() * state
        return found

    monkeypatch.setattr(type(layer), "forward", bent)
    ids = torch.tensor([random_ids(40, 3)])
    buffer = KVBuffer.like(model.shapes, 40)
    model.prefill(buffer, ids[:, :20], num_logits=0)
    with pytest.raises(ModelError, match=r"layer 0 .* is no matrix"):
        model.composer.compute(buffer, ids, torch.arange(20, 40))
