"""The loading controller: ratios, tiers and modules by arithmetic that can be checked by hand."""

from __future__ import annotations

import pytest
import torch
from conftest import CHUNKS, tiny_model
from test_engine import ask

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.controller import Controller
from cached_rag.profile import Profile, measure, profile_of

# 1000 tokens: 1 s to compute, 0.01 s from memory, 0.2 s from disk.
PROFILE = Profile(1000.0, 100_000.0 * 10, 5_000.0 * 10, 10)


def test_the_ratio_is_what_hides_behind_loading_but_never_below_the_floor():
    control = Controller(PROFILE, floor=0.05)
    assert control.decide([(500, "disk"), (500, "disk")]).recompute_ratio == pytest.approx(0.2)
    fast = control.decide([(500, "memory"), (500, "memory")])
    assert fast.recompute_ratio == 0.05
    assert "the floor" in fast.reason
    mixed = control.decide([(500, "memory"), (500, "disk")])
    assert mixed.recompute_ratio == pytest.approx(0.105)
    assert "hides" in mixed.reason
    assert control.decide([]).recompute_ratio == 0.05


def test_a_module_that_loads_more_slowly_than_it_is_computed_is_computed():
    slow = Profile(1000.0, 1e6, 5_000.0, 10)  # from disk 2 s for 1000 tokens
    decision = Controller(slow, floor=0.1).decide([(300, "memory"), (700, "disk")])
    assert decision.loaded == (True, False)
    assert decision.recompute_ratio == 0.1


def test_the_cheapest_tier_that_adds_no_delay():
    control = Controller(PROFILE, floor=0.05)
    prices = {"memory": 10.0, "disk": 1.0}
    assert control.cheapest_tier(1000, 0.3, prices) == "disk"
    assert control.cheapest_tier(1000, 0.1, prices) == "memory"
    assert control.cheapest_tier(1000, 0.001, prices) is None


def test_a_profile_is_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path))
    model = tiny_model("llama")
    first = profile_of(model)
    assert min(first.prefill_tokens_per_s, first.memory_bytes_per_s, first.disk_bytes_per_s) > 0
    monkeypatch.setattr("cached_rag.profile.measure", lambda _: pytest.fail("measured again"))
    assert profile_of(model) == first
    (path,) = (tmp_path / "profiles").glob("*.json")
    path.write_text("{")
    monkeypatch.setattr("cached_rag.profile.measure", measure)
    assert profile_of(model).kv_bytes_per_token == first.kv_bytes_per_token


@pytest.mark.parametrize("share", [1e-9, 0.4, 5.0])
def test_an_engine_follows_the_controller(share, tmp_path, monkeypatch):
    """Loading takes `share` of what computing the same tokens takes."""
    model = tiny_model("llama")
    disk_rate = model.shapes.bytes_per_token * 5000.0 / share
    profile = Profile(5000.0, 1e15, disk_rate, model.shapes.bytes_per_token)
    monkeypatch.setattr("cached_rag.prefiller.profile_of", lambda _: profile)
    settings = StoreConfig(path=str(tmp_path), write_back=False)
    with Engine(model, settings) as engine:
        engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]))
        full = engine.prefill(ask(*CHUNKS[::-1]), method="full", max_tokens=4).logits
    options = {"method": "infoflow", "recompute_ratio": 0.1, "max_tokens": 4}
    with Engine(model, settings) as engine:
        plain = engine.prefill(ask(*CHUNKS[::-1]), **options).report
    with Engine(model, settings) as engine:  # nothing in memory
        done = engine.prefill(ask(*CHUNKS[::-1]), adaptive=True, **options)
    assert not plain.decision
    if share < 0.1:  # everything loads at once: as without a controller
        assert done.report.recomputed_tokens == plain.recomputed_tokens
        assert "the floor" in done.report.decision
    elif share < 1:
        assert done.report.recomputed_tokens > plain.recomputed_tokens
        assert "hides" in done.report.decision
    else:  # computing is sooner: nothing is loaded
        assert done.report.modules_hit == 0
        assert torch.allclose(done.logits, full, atol=1e-4)


def test_a_method_without_a_ratio_cannot_be_adaptive(engine):
    with pytest.raises(ConfigError, match="adaptive"):
        engine.generate("x", method="reuse", adaptive=True)
