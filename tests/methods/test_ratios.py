"""Ratios that are asked for are taken, wherever they are given, and nonsense is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, tiny_model

from cached_rag import BatchConfig, ConfigError, Engine, GenerationConfig, StoreConfig
from cached_rag.engine.idle import compare
from cached_rag.kv.buffer import Workspace
from cached_rag.methods import CacheBlend

PROMPT = "\n\n".join((*CHUNKS, "Why is copper green?"))


def prefilled(engine, **how):
    done = engine.prefill(PROMPT, max_tokens=1, **how)
    try:
        return done.report.charged_recompute, done.logits.clone()
    finally:
        done.release()


@pytest.mark.parametrize("family", ["falcon", "bloom"])
def test_auto_takes_the_ratio_also_where_attention_cannot_be_watched(family):
    with Engine(tiny_model(family), NEW_PROMPTS) as engine:
        engine.encode(CHUNKS)
        _, full = prefilled(engine, method="full")
        for given in ({"recompute_ratio": 1.0}, {"method": "auto:recompute_ratio=1.0"}):
            charge, whole = prefilled(engine, **given)
            assert charge == 1.0
            assert torch.allclose(whole, full, atol=1e-4)
        some, control = prefilled(engine)
        assert some < 1.0
        assert not torch.allclose(control, full, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ("fast", "epic:anchor_tokens=8+lexical:recompute_ratio=0.03"),
        ("auto:anchor_tokens=64", "epic:anchor_tokens=64+lexical"),
        ("auto:recompute_ratio=0.5", "epic:anchor_tokens=8+lexical:recompute_ratio=0.5"),
    ],
)
def test_auto_keeps_its_options_where_attention_cannot_be_watched(asked, used):
    with Engine(tiny_model("bloom"), NEW_PROMPTS) as engine:
        assert engine.generate(PROMPT, method=asked, max_tokens=1).report.method == used


def test_anchors_of_its_own_do_not_cost_anchorflow_its_ratio():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        engine.encode(CHUNKS)
        _, full = prefilled(engine, method="full")
        given = {"method": "anchorflow:anchor_tokens=4", "recompute_ratio": 1.0}
        _, whole = prefilled(engine, **given)
        assert torch.allclose(whole, full, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": CacheBlend(0.15), "recompute_ratio": 1.0}, "for methods by name"),
        ({"method": "reuse", "recompute_ratio": -5.0}, "must be 0 to 1"),
        ({"method": "prefix", "recompute_ratio": 7.0}, "must be 0 to 1"),
        ({"max_tokens": 2.5}, "max_tokens is a whole number"),
        ({"top_k": 1.5}, "top_k is a whole number"),
        ({"logprobs": 1.5}, "logprobs is a whole number"),
        ({"logprobs": True}, "logprobs is a whole number, not True"),
        ({"temperature": math.inf}, "temperature is 0 or more, and finite"),
        ({"temperature": 10**400}, "temperature is 0 or more, and finite"),
        ({"temperature": math.nan}, "temperature is a number, not nan"),
        ({"temperature": None}, "temperature is a number, not None"),
        ({"ignore_eos": "no"}, "ignore_eos is True or False, not 'no'"),
        ({"stop": 5}, "stop is a string, or several, not 5"),
        ({"grammar": "x"}, "this is no Grammar: 'x'"),
        ({"method": None}, "no method: None"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        GenerationConfig(**settings)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (BatchConfig, {"max_rows": "4"}, "max_rows is a whole number, not '4'"),
        (BatchConfig, {"max_rows": 2.5}, "max_rows is a whole number"),
        (BatchConfig, {"max_bytes": "1GB"}, "max_bytes is a whole number"),
        (StoreConfig, {"memory_bytes": "2GB"}, "memory_bytes is a whole number"),
        (StoreConfig, {"primers": 1.5}, "primers is a whole number"),
        (StoreConfig, {"finish_seconds": None}, "finish_seconds is a number"),
        (StoreConfig, {"namespace": 5}, "namespace is a string"),
        (StoreConfig, {"path": 5}, "path is a string"),
        (StoreConfig, {"path": "~nobody-of-this-name/kv"}, "there is no such user"),
        (StoreConfig, {"path": "a\0b"}, "no folder is called"),
        (StoreConfig, {"codec": "int9"}, "codec is one of raw, int8, int4, not 'int9'"),
    ],
)
def test_settings_of_other_types_or_names_are_refused(kind, settings, says):
    with pytest.raises(ConfigError, match=says):
        kind(**settings)


def test_numbers_of_other_libraries_and_paths_are_settings_too(tmp_path):
    given = {"temperature": 2, "top_k": np.int64(3), "top_p": np.float32(0.5), "seed": np.int64(5)}
    config = GenerationConfig(**given, repetition_penalty=2, max_tokens=2)
    kinds = {name: type(getattr(config, name)) for name in given}
    assert kinds == {"temperature": float, "top_k": int, "top_p": float, "seed": int}
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        assert engine.generate(PROMPT, config).report.output_tokens == 2
    assert StoreConfig(memory_bytes=2e9).memory_bytes == 2_000_000_000
    assert StoreConfig(path=tmp_path).path == str(tmp_path)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda engine: engine.generate(None), "a prompt is a string, or a list of messages"),
        (lambda engine: engine.generate(["a", "b"]), "with a role and a content; 'a' is none"),
        (lambda engine: engine.generate_batch("abc"), "prompts are several"),
        (lambda engine: engine.encode([None]), "texts are strings, not None"),
        (lambda engine: engine.prefetch("abc"), "texts are several"),
        (lambda engine: engine.order("abc"), "texts are several"),
    ],
)
def test_what_is_no_prompt_and_no_text_is_refused(engine, ask, says):
    with pytest.raises(ConfigError, match=says):
        ask(engine)


def test_a_check_layer_that_no_model_has_is_refused():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        engine.encode(CHUNKS)
        with pytest.raises(ConfigError, match=r"check_layer .* there are \d layers"):
            engine.generate(PROMPT, method="cacheblend:check_layer=100", max_tokens=1)


def test_logits_that_are_no_numbers_are_as_far_away_as_can_be():
    model = tiny_model("llama")
    ids = torch.arange(20, 40)[None]
    kl, agrees = compare(model, ids, torch.full((model.vocab_size,), math.nan))
    assert (kl, agrees) == (math.inf, False)


def test_short_prompts_do_not_hold_the_buffer_of_a_long_one():
    space = Workspace(tiny_model("llama").shapes)
    long = space.take(4096)
    space.give(long)
    again = space.take(3000)
    assert again is not long  # which stands for what was in it
    assert again.keys is long.keys
    space.give(again)
    assert space.size(100) < 1024
    assert space.take(100).capacity == space.size(100)


def test_another_question_does_not_take_what_was_repaired_for_the_last_words():
    prompts = [f"{PROMPT} Of the {what}:" for what in ("lighthouse", "sledges")]
    with Engine(tiny_model("llama")) as engine:
        engine.encode(CHUNKS)
        engine.generate(prompts[0], max_tokens=2)
        again = engine.generate(prompts[0], max_tokens=2)  # control
        assert again.report.kept_repaired_tokens > 0
        other = engine.generate(prompts[1], max_tokens=2)
        assert other.report.kept_repaired_tokens == 0
