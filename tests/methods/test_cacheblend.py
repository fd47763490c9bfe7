"""CacheBlend against a twin that goes through the layers by hand, token by token, in fp32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, ask, plain_cache, tiny_model
from modules import TOLERANCE, assembled, copy
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cached_rag import ConfigError, Engine
from cached_rag.backends.base import RepairInput
from cached_rag.cli.options import names
from cached_rag.evaluation.run import make_trials
from cached_rag.methods import SELECTORS, CacheBlend, parse_method

RATIO = 0.4
# How many of the sixty reused tokens each layer goes on with, by hand: r of them from layer 1 on;
# with filtering one and a half times r at layer 1, r at layer 2, half of r at layer 3.
KEPT = {False: {1: 24}, True: {1: 36, 2: 24, 3: 12}}
OPTIONS = [(score, gradual) for score in ("values", "keys", "kv") for gradual in (False, True)]


def distance(score, fresh, cached):
    """Of one token in one layer: sums of squares of one kind, or of absolutes of both."""
    keys, values = ((a - b).flatten().tolist() for a, b in zip(fresh, cached, strict=True))
    if score == "kv":
        return sum(map(abs, keys)) + sum(map(abs, values))
    return sum(x * x for x in (keys if score == "keys" else values))


@torch.inference_mode()
def by_hand(model, buffer, tokens, layout, score, counts):
    """Rows that each layer goes on with, keys and values it leaves, and the last logits."""
    inner, length = model.decoder.model.model, tokens.shape[1]
    hidden = inner.embed_tokens(tokens)
    rotary = inner.rotary_emb(hidden, torch.arange(length)[None])
    hidden_keys = torch.ones(length, length).triu(1).bool()
    rows = [j for j in range(length) if not layout.exact[j]]
    chosen, left = {}, []
    for index, layer in enumerate(inner.layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        query, key, value = (
            project(normed)[0].view(length, -1, attention.head_dim).transpose(0, 1)[None]
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        cached = [kind[index, 0, :, :length].clone() for kind in (buffer.keys, buffer.values)]
        now = [old.clone() for old in cached]
        for fresh, mixed in zip((key[0], value[0]), now, strict=True):
            mixed[:, rows] = fresh[:, rows]
        if index in counts:
            far = {
                j: distance(score, [kv[:, j] for kv in now], [kv[:, j] for kv in cached])
                for j in rows
                if layout.reused[j]
            }
            best = sorted(far, key=far.get, reverse=True)[: counts[index]]
            rows = sorted([*best, *(j for j in rows if layout.fresh[j])])
            chosen[index] = rows
        left.append(now)
        keys, values = (kv.repeat_interleave(attention.num_key_value_groups, 0) for kv in now)
        scores = query[0] @ keys.transpose(1, 2) * attention.scaling
        weights = scores.masked_fill(hidden_keys, float("-inf")).softmax(-1)
        seen = hidden + attention.o_proj((weights @ values).transpose(0, 1).reshape(1, length, -1))
        after = seen + layer.mlp(layer.post_attention_layernorm(seen))
        hidden = hidden.clone()
        hidden[:, rows] = after[:, rows]
    logits = model.decoder.model.lm_head(inner.norm(hidden))[0, -1]
    keys, values = (torch.stack(kind) for kind in zip(*left, strict=True))
    return chosen, keys, values, logits


def recorded(model, buffer, tokens, layout, selector):
    """What the library does: rows by layer, charged pairs, keys and values, logits."""
    chosen, ours = {}, copy(buffer)

    class Recording(CacheBlend):
        def narrow(self, check, layout):
            keep = super().narrow(check, layout)
            chosen[check.layer] = check.slots[keep].tolist()
            return keep

    options = dataclasses.asdict(selector)
    done = model.repair(RepairInput(ours, tokens, layout, Recording(**options)))
    length = tokens.shape[1]
    return chosen, done, ours.keys[:, 0, :, :length], ours.values[:, 0, :, :length]


@pytest.mark.parametrize(("score", "gradual"), OPTIONS)
def test_rows_kv_and_logits_are_those_of_the_layers_by_hand(score, gradual):
    model, buffer, tokens, layout = assembled("llama")
    selector = CacheBlend(RATIO, score=score, gradual=gradual)
    chosen, done, keys, values = recorded(model, buffer, tokens, layout, selector)
    twin = by_hand(model, buffer, tokens, layout, score, KEPT[gradual])
    assert chosen == twin[0]
    assert torch.allclose(keys, twin[1], atol=TOLERANCE)
    assert torch.allclose(values, twin[2], atol=TOLERANCE)
    assert torch.allclose(done.logits[0], twin[3], atol=TOLERANCE)
    for other in {"values", "keys", "kv"} - {score}:  # control: what is measured matters
        assert by_hand(model, buffer, tokens, layout, other, KEPT[gradual])[0] != chosen
    control = by_hand(model, buffer, tokens, layout, score, KEPT[not gradual])
    assert not torch.allclose(done.logits[0], control[3], atol=1e-3)


@pytest.mark.parametrize("score", ["values", "keys", "kv"])
def test_the_first_choice_is_that_of_a_full_prefill(score):
    """Layer 0 is never stale, so at layer 1 what is fresh is what transformers computes."""
    model, buffer, tokens, layout = assembled("llama")
    full = [kind[1] for kind in plain_cache(model, tokens[0].tolist())]
    cached = [kind[1, 0] for kind in (buffer.keys, buffer.values)]
    far = {
        j: distance(score, [kv[:, j] for kv in full], [kv[:, j] for kv in cached])
        for j in layout.reused.nonzero().flatten().tolist()
    }
    best = sorted(far, key=far.get, reverse=True)[:24]
    chosen, *_ = recorded(model, buffer, tokens, layout, CacheBlend(RATIO, score=score))
    assert {j for j in chosen[1] if layout.reused[j]} == set(best)


def test_a_model_that_begins_with_convolutions_is_checked_behind_its_first_attention():
    seen = {}

    class Recording(CacheBlend):
        def narrow(self, check, layout):
            seen[check.layer] = self.deviation(check)[check.reused]
            return super().narrow(check, layout)

    class Early(Recording):
        def check_layers(self, layout):
            return (1,)

    with Engine(tiny_model("lfm2"), NEW_PROMPTS) as engine:
        engine.encode(CHUNKS)
        for method in (Recording(), Early()):
            engine.prefill(ask(*CHUNKS), method=method).release()
    assert seen.keys() == {1, 2}
    assert seen[2].min() > 1e-3
    assert seen[1].median() < 1e-9  # control: in the first attention nothing differs


def test_gradual_filtering_only_ever_drops_rows_and_is_charged_for_what_it_sees():
    model, buffer, tokens, layout = assembled("llama")
    selector = CacheBlend(RATIO, gradual=True)
    chosen, done, *_ = recorded(model, buffer, tokens, layout, selector)
    live, reused = int(layout.fresh.sum()), int(layout.reused.sum())
    assert [len(chosen[layer]) - live for layer in (1, 2, 3)] == [36, 24, 12]
    assert set(chosen[1]) > set(chosen[2]) > set(chosen[3])
    # Every layer computes the keys and values of those that the one before it went on with.
    assert done.computed == 4 * live + reused + reused + 36 + 24
    assert done.rows.tolist() == chosen[3]


def test_options_are_understood_as_text():
    text = "cacheblend:score=kv,gradual=true"
    assert parse_method(text, SELECTORS) == CacheBlend(score="kv", gradual=True)
    # As `cached-rag eval --methods` has them; full prefill is what they are compared with.
    trials = make_trials(names(f"{text},prefix"), [0.15])
    assert [(trial.method, trial.ratio) for trial in trials][1:] == [(text, 0.15), ("prefix", 1.0)]
    encoded = f"{text}@primer:3"
    assert names(f"auto@primer:2,{encoded},prefix") == ["auto@primer:2", encoded, "prefix"]
    for wrong in ("cacheblend:score=both", "cacheblend:gradual=perhaps"):
        with pytest.raises(ConfigError, match=r"values, keys, kv|True or False"):
            parse_method(wrong, SELECTORS)
