"""The lean form of a model computes what transformers' own modules do, or is not used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, random_ids, tiny_model, tiny_tokenizer
from modules import garbage
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cached_rag import wrap_model
from cached_rag.backends.base import StepInput
from cached_rag.backends.transformers import lean, probe
from cached_rag.backends.transformers.lean import LeanModel, lean_model, lean_norm
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV

TOLERANCE = 1e-4
UNDERSTOOD = [name for name, (kind, _) in FAMILIES.items() if kind in lean.FAMILIES]
MORE = {
    "gemma": {"head_dim": 16},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "ministral": {"head_dim": 16, "sliding_window": 9},
    "olmo2": {"pad_token_id": 0},
    "olmo3": {"pad_token_id": 0, "sliding_window": 9},
    "phi3": {"pad_token_id": 0, "rope_parameters": {"partial_rotary_factor": 0.5}},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 0.02, "attn_logit_softcapping": 2.0},
    "qwen2": {"tie_word_embeddings": True},
}


fresh = tiny_model.__wrapped__  # one that no other test has


def random_model(kind):
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = FAMILIES["llama"][1] | MORE[kind]
    if "rope_parameters" in sizes:
        sizes["rope_parameters"] = rope | sizes["rope_parameters"]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(4)
            elif "norm" in name:
                parameter.add_(torch.rand_like(parameter))  # or a norm's weight would do nothing
    return model


def twins(model):
    """A backend that is served leanly, and one whose model computes its passes itself."""
    assert isinstance(model.decoder.network, LeanModel)
    return model, replace(model, decoder=model.decoder.computed_by(model.decoder.model))


@pytest.mark.parametrize("family", UNDERSTOOD)
def test_a_prefill_of_scattered_rows_is_the_models_own(family):
    ids = torch.tensor([random_ids(90, seed=4)])
    rows = torch.tensor(sorted({*range(0, 89, 3), 88, 89}))
    results = []
    start = garbage(tiny_model(family), 90)
    for model in twins(tiny_model(family)):
        buffer = KVBuffer(start.keys.clone(), start.values.clone())
        done = model.prefill(buffer, ids, rows, num_logits=5)
        results.append((done.tail, buffer.keys, buffer.values))
    for ours, own in zip(*results, strict=True):
        assert torch.allclose(ours, own, atol=TOLERANCE)


def test_a_long_prompts_mlps_take_some_rows_at_a_time(monkeypatch):
    model, seen = tiny_model("llama"), []
    whole = lean.LeanLayer._mlp
    monkeypatch.setattr(lean, "_MLP_ROWS", 7)
    monkeypatch.setattr(
        lean.LeanLayer,
        "_mlp",
        lambda self, hidden: seen.append(hidden.shape[1]) or whole(self, hidden),
    )
    test_a_prefill_of_scattered_rows_is_the_models_own("llama")
    assert max(seen) == 7
    assert len(seen) > 2 * len(model.decoder.modules)


@pytest.mark.parametrize("family", [name for name in UNDERSTOOD if name != "longrope"])
def test_steps_of_several_rows_are_the_models_own(family):
    lengths, new = (30, 7, 51), ([3], [9], [8])
    if tiny_model(family).can_append:
        new = ([3, 4, 5], [9], [8, 2])
    results, start = [], garbage(tiny_model(family), 64)
    for model in twins(tiny_model(family)):
        buffers = (KVBuffer(start.keys.clone(), start.values.clone()) for _ in new)
        batch = [
            StepInput(RowKV(buffer, length), ids)
            for buffer, length, ids in zip(buffers, lengths, new, strict=True)
        ]
        logits = model.step(batch)
        kept = [row.kv.own.values[:, :, :, : row.end] for row in batch]
        results.append([logits, *kept])
    for ours, own in zip(*results, strict=True):
        assert torch.allclose(ours, own, atol=TOLERANCE)


@pytest.mark.parametrize("kind", MORE)
def test_other_families_and_settings_are_verified(kind):
    model = random_model(kind)
    found = probe.examine(model, lean_model(model))
    assert isinstance(found.decoder.network, LeanModel)


@pytest.mark.parametrize("kind", MORE)
def test_in_bf16_it_computes_nearly_the_same(kind):
    # A model is examined in fp32, where nothing shows that a dtype is wrong.
    model = random_model(kind).to(torch.bfloat16)
    ids, results = torch.tensor([random_ids(30, seed=4)]), []
    for one in twins(wrap_model(model, tiny_tokenizer(), name=kind, revision=kind)):
        assert one.can_batch
        buffer = KVBuffer.like(one.shapes, 31)
        logits = one.prefill(buffer, ids).logits
        results.append(torch.cat([logits, one.step([StepInput(RowKV(buffer, 30), [7])])]).float())
    ours, own = results
    assert (ours - own).norm() < 0.1 * own.norm()


def test_weights_are_held_once():
    model = fresh("llama").decoder
    own, fused = model.modules[0], model.model.model.layers[0]
    pointers = {w.untyped_storage().data_ptr() for w in own.parameters()}
    assert {w.untyped_storage().data_ptr() for w in fused.parameters()} == pointers


def _swapped(self, hidden_states, position_embeddings, cache):
    gate_up = self.gate_up
    self.gate_up = lambda hidden: gate_up(hidden).roll(gate_up.out_features // 2, -1)
    try:
        return _forward(self, hidden_states, position_embeddings, cache)
    finally:
        self.gate_up = gate_up


_forward = lean.LeanLayer.forward
FAULTS = {
    "no rotation": ("llama", lean, "rotated", lambda states, _: states),
    "no norm": ("llama", lean, "lean_norm", lambda _: nn.Identity()),
    "another norm": ("gemma3", lean, "lean_norm", lambda norm: layer_norm(norm)),
    "gate and up swapped": ("llama", lean.LeanLayer, "forward", _swapped),
}


def layer_norm(norm):
    found = nn.LayerNorm(norm.weight.shape, bias=False)
    found.weight = norm.weight
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_what_computes_something_else_is_not_used(fault, monkeypatch):
    family, where, name, faulty = FAULTS[fault]
    model = fresh(family).decoder.model
    assert probe.examine(model, lean_model(model)).decoder.network is not model
    monkeypatch.setattr(where, name, faulty)
    assert probe.examine(model, lean_model(model)).decoder.network is model


def test_a_bound_or_a_factor_that_is_forgotten_stands_out():
    for kind, attribute in (("granite", "logits_scaling"), ("gemma2", "final_logit_softcapping")):
        model = random_model(kind)
        lean = lean_model(model)
        lean._finish = lambda logits: logits
        assert probe.examine(model, lean).decoder.network is model, attribute


def test_an_unknown_family_computes_itself():
    decoder = tiny_model("gpt_neox").decoder
    assert decoder.network is decoder.model
    assert decoder.computed_by(decoder.model).layers == decoder.layers


def test_a_norm_of_another_kind_is_kept():
    norm = nn.LayerNorm(8)
    assert lean_norm(norm) is norm
