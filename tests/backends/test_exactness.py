"""Every fast path against its slow twin, over all families, fp32; each with a negative control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import (
    CHUNKS,
    FAMILIES,
    RELOCATABLE,
    UNMOVABLE,
    alike,
    fill,
    plain_cache,
    plain_logits,
    random_ids,
    tiny_model,
    tiny_tokenizer,
)
from modules import MODULE, PREFIX, QUESTION, TOLERANCE, garbage, layout_of, three_modules
from transformers import AutoConfig, AutoModelForCausalLM

from cached_rag import Engine, StoreConfig, wrap_model
from cached_rag.backends.base import RepairInput
from cached_rag.backends.transformers.attention import IMPLEMENTATION
from cached_rag.errors import RelocationError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.library.encode import encode_chunks
from cached_rag.methods import CacheBlend, Reuse


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_everything_over_garbage_equals_full_prefill(family):
    model = tiny_model(family)
    ids = random_ids(48)
    plain = plain_logits(model, ids)[-1]
    tokens = torch.tensor([ids])
    layout = layout_of(model, 48, reused=[(4, 40)])
    done = model.repair(RepairInput(garbage(model, 60), tokens, layout, CacheBlend(1.0)))
    assert torch.allclose(done.logits[0], plain, atol=TOLERANCE)
    assert done.computed == 48 * model.shapes.num_layers
    stale = model.repair(RepairInput(garbage(model, 60), tokens, layout, Reuse()))
    assert not torch.allclose(stale.logits[0], plain, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_scattered_rows_over_true_kv_equal_full_prefill(family):
    """Garbage exactly at the recomputed rows is repaired; garbage elsewhere is not."""
    model = tiny_model(family)
    ids = random_ids(48, seed=7)
    tokens, plain = torch.tensor([ids]), plain_logits(model, ids)[-1]
    rows = torch.tensor([0, 3, 4, 17, 18, 30, 46, 47])
    buffer = KVBuffer.like(model.shapes, 60)
    model.prefill(buffer, tokens)
    fill(buffer.keys, rows, 5.0)
    fill(buffer.values, rows, 5.0)
    repaired = model.prefill(buffer, tokens, rows).logits[0]
    assert torch.allclose(repaired, plain, atol=TOLERANCE)
    fill(buffer.values, 41, 5.0)
    spoilt = model.prefill(buffer, tokens, rows).logits[0]
    assert not torch.allclose(spoilt, plain, atol=1e-2)


@pytest.mark.parametrize("family", RELOCATABLE)
def test_relocated_keys_equal_keys_computed_there(family):
    """Twin: the same tokens computed alone at the far positions, by explicit position ids."""
    model, delta = tiny_model(family), 333
    ids = random_ids(MODULE, seed=8)
    tokens = torch.tensor([ids])
    near, far = (KVBuffer.like(model.shapes, MODULE) for _ in range(2))
    far.lay_out(range(delta, delta + len(ids)))
    model.prefill(near, tokens)
    model.prefill(far, tokens)
    ours = near.read(0, MODULE, tuple(ids))
    moved = KVBuffer.like(model.shapes, MODULE).lay_out(range(delta, delta + len(ids)))
    moved.place(ours, 0, model.rule)
    assert alike(moved.keys, far.keys)
    assert alike(moved.values, far.values)
    if any(rule.style != "none" for rule in (*model.rule.layers, *model.rule.values)):
        wrong = KVBuffer.like(model.shapes, MODULE).lay_out(range(delta + 1, delta + 1 + len(ids)))
        wrong.place(ours, 0, model.rule)
        assert not (alike(wrong.keys, far.keys, 1e-2) and alike(wrong.values, far.values, 1e-2))


@pytest.mark.parametrize("family", FAMILIES)
def test_true_prefix_and_module_behind_it_are_lossless(family):
    model = tiny_model(family)
    prefix, (first, *_), _ = three_modules(model)
    ids = [*prefix.token_ids, *first.token_ids, *random_ids(QUESTION, 9)]
    buffer, end = garbage(model, 60), PREFIX + MODULE
    buffer.place(prefix, 0, model.rule)
    buffer.place(first, PREFIX, model.rule)
    layout = layout_of(model, len(ids), exact=[(0, end)])
    tokens = torch.tensor([ids])
    done = model.repair(RepairInput(buffer, tokens, layout, CacheBlend(0.15)))
    assert torch.allclose(done.logits[0], plain_logits(model, ids)[-1], atol=TOLERANCE)
    assert done.computed == QUESTION * model.shapes.num_layers
    keys, values = plain_cache(model, ids)
    assert alike(buffer.keys[:, 0, :, : len(ids)], keys)
    assert alike(buffer.values[:, 0, :, : len(ids)], values)


@pytest.mark.parametrize("family", RELOCATABLE)
def test_layer_0_of_relocated_modules_equals_full_prefill(family):
    model = tiny_model(family)
    prefix, modules, ids = three_modules(model)
    buffer = garbage(model, len(ids))
    buffer.place(prefix, 0, model.rule)
    for i, module in enumerate(modules):
        buffer.place(module, PREFIX + i * MODULE, model.rule)
    keys, values = plain_cache(model, ids)
    covered = slice(0, PREFIX + 3 * MODULE)
    assert alike(buffer.keys[0][0, :, covered], keys[0][:, covered])
    assert alike(buffer.values[0][0, :, covered], values[0][:, covered])
    later = slice(PREFIX + MODULE, PREFIX + 3 * MODULE)
    deep = max(i for i, shape in enumerate(model.shapes.layers) if shape)
    assert not alike(buffer.values[deep][0, :, later], values[deep][:, later], 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_encoding_equals_encoding_one_by_one(family):
    model = tiny_model(family)
    (prefix,) = encode_chunks(model, [None], [tuple(random_ids(PREFIX, 1))])
    modules = [tuple(random_ids(length, length)) for length in (20, 7, 13)]
    together = list(encode_chunks(model, [prefix], modules))
    assert [kv.seq_len for kv in together] == [20, 13, 7]
    for kv in together:
        ids = [*prefix.token_ids, *kv.token_ids]
        keys, values = plain_cache(model, ids)
        assert kv.start == PREFIX
        assert alike(kv.keys, keys[:, :, PREFIX:])
        assert alike(kv.values, values[:, :, PREFIX:])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox"])
def test_fast_attention_equals_the_models_own_masks(family):
    """The dense way, in which the model builds its own masks, is the fast way's twin."""
    model = tiny_model(family)
    assert model.decoder.is_fast
    ids = random_ids(150, seed=11)
    tokens = torch.tensor([ids])
    rows = torch.tensor(sorted({*range(0, 149, 2), 149}))
    start = garbage(model, 150)

    def run(model):
        buffer = KVBuffer(start.keys.clone(), start.values.clone())
        return model.prefill(buffer, tokens, rows).logits, buffer.values

    fast, fast_kv = run(model)
    model.decoder.model.set_attn_implementation("eager")
    try:
        dense, dense_kv = run(
            replace(
                model,
                decoder=replace(model.decoder.computed_by(model.decoder.model), is_fast=False),
            )
        )
    finally:
        model.decoder.model.set_attn_implementation(IMPLEMENTATION)
    assert torch.allclose(fast, dense, atol=TOLERANCE)
    assert torch.allclose(fast_kv, dense_kv, atol=TOLERANCE)


@pytest.mark.parametrize("family", sorted(UNMOVABLE))
def test_models_with_learned_positions_refuse_relocation(family):
    model = tiny_model(family)
    _, (module, *_), _ = three_modules(model)
    with pytest.raises(RelocationError, match="learned positions"):
        garbage(model, 90).place(module, module.start + 1, model.rule)
    garbage(model, 90).place(module, module.start, model.rule)  # where it was computed


def test_longrope_refuses_prompts_across_its_switch():
    rule = tiny_model("longrope").rule
    assert rule.limit == 64
    rule.check(10, 64)
    with pytest.raises(RelocationError, match="switch at 64"):
        rule.check(0, 65)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_switch_of_some_layers_alone_is_seen(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    sizes = {"max_position_embeddings": 80}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope["original_max_position_embeddings"], sizes = 80, {}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    sizes |= {"rope_parameters": {"full_attention": rope, "sliding_attention": plain}}
    config = AutoConfig.for_model("gemma3_text", **(FAMILIES["gemma3"][1] | sizes))
    model = AutoModelForCausalLM.from_config(config)
    found = wrap_model(model, tiny_tokenizer(), name=kind, revision=kind)
    assert found.rule.limit == 80
    assert not found.can_batch


def test_dynamic_rotation_does_not_remember_longer_prompts():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    sizes = FAMILIES["llama"][1] | {"rope_parameters": rope, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    found = wrap_model(model, tiny_tokenizer(), name="dynamic", revision="dynamic")
    ids = torch.tensor([random_ids(200)])
    first, _, again = (found.forward(ids[:, :length]) for length in (100, 200, 100))
    assert torch.equal(again, first)


def test_cacheblend_computes_what_it_charges():
    model = tiny_model("llama")
    prefix, modules, ids = three_modules(model)
    buffer = garbage(model, len(ids))
    buffer.place(prefix, 0, model.rule)
    for i, module in enumerate(modules):
        buffer.place(module, PREFIX + i * MODULE, model.rule)
    end = PREFIX + MODULE
    layout = layout_of(model, len(ids), reused=[(end, end + 2 * MODULE)], exact=[(0, end)])
    done = model.repair(RepairInput(buffer, torch.tensor([ids]), layout, CacheBlend(0.25)))
    chosen = int(0.25 * 2 * MODULE)
    everything, narrowed = 2 * MODULE + QUESTION, chosen + QUESTION
    assert len(done.rows) == narrowed
    assert done.computed == 2 * everything + 2 * narrowed  # layers 0 and 1 in full, 2 and 3 not


@pytest.mark.parametrize("method", ["auto", "prefix", "full"])
def test_kept_kv_is_not_used_across_longropes_switch(method):
    model = tiny_model("longrope")
    with Engine(model, StoreConfig(write_back=False)) as engine:
        engine.register([CHUNKS[0]])
        short = f"{CHUNKS[0]} Who?"
        long = f"{short} {CHUNKS[1]} What colour does it have after all these years in the air?"
        assert engine.count_tokens(short) < model.rule.limit < engine.count_tokens(long)
        for prompt in (short, long, short, long):
            engine.generate(prompt, method=method, max_tokens=2, ignore_eos=True)
        assert engine.generate(short, method=method, max_tokens=2).report.kept_tokens > 0  # control
        asked = engine.prefill(short, method=method, max_tokens=2)
        assert len(asked.kept_beginning()) > 0  # control
        asked.held.answer = [0] * model.rule.limit
        assert len(asked.kept_beginning()) == 0
        asked.release()
        for prompt in (short, long):
            request = engine.prefill(prompt, method="prefix", max_tokens=2)
            try:
                want = plain_logits(model, request.tokens.ids)[-1]
                torch.testing.assert_close(request.logits[0], want, atol=1e-4, rtol=0)
            finally:
                request.release()
