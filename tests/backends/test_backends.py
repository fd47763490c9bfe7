"""The seam to what runs a model: the whole engine runs on a backend of forty lines."""

from __future__ import annotations

import pytest
import torch
from conftest import CHUNKS, ask, random_ids, tiny_model
from doubles import Plain, Recording

from cached_rag import Engine, Schema, StoreConfig
from cached_rag.errors import ModelError

METHODS = (
    "full",
    "prefix",
    "reuse",
    "epic:anchor_tokens=8",
    "lexical",
    "random:recompute_ratio=0.5",
)


@pytest.mark.parametrize("split", [None, 7])
def test_a_backend_by_hand_computes_what_the_model_does(split):
    model, ids = tiny_model("llama"), torch.tensor([random_ids(40)])
    assert torch.allclose(Plain(model).forward(ids, split), model.forward(ids, split), atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_runs_on_any_backend(method):
    found = []
    for backend in (Plain(tiny_model("llama")), tiny_model("llama")):
        with Engine(backend) as engine:
            assert engine.encode(CHUNKS, context=None).encoded == len(CHUNKS)
            alone = engine.generate(ask(*CHUNKS), method=method, max_tokens=6)
            prompts = [ask(*CHUNKS), ask(*CHUNKS[::-1])]
            both = engine.generate_batch(prompts, method=method, max_tokens=6)
            found.append([(a.token_ids, a.report.modules_hit) for a in (alone, *both)])
            assert found[-1][0] == found[-1][1]
    assert found[0] == found[1]
    assert any(hit for _, hit in found[0]) == (method not in ("full", "prefix"))


def test_schemas_and_stores_run_on_any_backend(tmp_path):
    source = '<schema name="s">Rules. <module name="a">Copper is green.</module></schema>'
    prompt = Schema.from_string(source).prompt_from_string('<prompt schema="s"><a/>Why?</prompt>')
    found = []
    for backend in (Plain(tiny_model("llama")), tiny_model("llama")):
        store = StoreConfig(str(tmp_path / type(backend).__name__), pipelined=True)
        with Engine(backend, store) as engine:
            engine.encode(CHUNKS, context=None)
        with Engine(backend, store) as engine:
            texts = engine.generate(ask(*CHUNKS), method="reuse", max_tokens=4)
            assert texts.report.modules_hit == len(CHUNKS)
            found.append([texts.token_ids, engine.generate(prompt, max_tokens=4, method="reuse")])
    assert found[0][0] == found[1][0]
    assert found[0][1].token_ids == found[1][1].token_ids


def test_what_a_backend_cannot_do_is_refused_by_name():
    with Engine(Plain(tiny_model("llama"))) as engine:
        engine.encode(CHUNKS, context=None)
        with pytest.raises(ModelError, match="CacheBlend"):
            engine.generate(ask(*CHUNKS), method="cacheblend", max_tokens=2)


def test_a_backend_is_asked_for_nothing_but_the_protocols_members():
    with Engine(Recording(tiny_model("llama"))) as engine:
        engine.generate("Why is copper green?", max_tokens=5, ignore_eos=True, method="full")
        assert engine.model.steps == [[1]] * 4  # the first token is the prefill's
