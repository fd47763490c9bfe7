"""The loading controller: ratios, tiers and modules by arithmetic that can be checked by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from conftest import CHUNKS, ask, tiny_model

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.engine import profile
from cached_rag.engine.profile import Controller, Profile, fit, measure, profile_of

# 1000 tokens: 1 s to compute, 0.01 s from memory, 0.2 s from disk.
PROFILE = Profile(0.001, 0.0, 100_000.0 * 10, 5_000.0 * 10, 10)
# Behind 4000 others a token costs twice, behind 8000 three times what it costs alone.
STEEP = dataclasses.replace(PROFILE, pair_s=0.001 / 4000)


def test_the_ratio_is_what_hides_behind_loading_but_never_below_the_floor():
    control = Controller(PROFILE, floor=0.05)
    assert control.decide([(0, 500, "disk"), (500, 500, "disk")]).recompute_ratio == pytest.approx(
        0.2
    )
    fast = control.decide([(0, 500, "memory"), (500, 500, "memory")])
    assert fast.recompute_ratio == 0.05
    assert "the floor" in fast.reason
    mixed = control.decide([(0, 500, "memory"), (500, 500, "disk")])
    assert mixed.recompute_ratio == pytest.approx(0.105)
    assert "hides" in mixed.reason
    assert control.decide([]).recompute_ratio == 0.05


def test_a_module_that_loads_more_slowly_than_it_is_computed_is_computed():
    slow = Profile(0.001, 0.0, 1e6, 5_000.0, 10)  # from disk 2 s for 1000 tokens
    decision = Controller(slow, floor=0.1).decide([(0, 300, "memory"), (300, 700, "disk")])
    assert decision.loaded == (True, False)
    assert decision.recompute_ratio == 0.1


def test_a_prompt_of_8k_costs_what_its_length_makes_it_cost():
    assert STEEP.compute_s(8000) == pytest.approx(8 + 8)
    assert STEEP.compute_s(500, preceding=7500) == pytest.approx(0.5 * (1 + 7750 / 4000))
    places = range(0, 8000, 500)
    pieces = sum(STEEP.compute_s(500, begin) for begin in places)
    assert pieces == pytest.approx(STEEP.compute_s(8000))  # in pieces as in one
    modules = [(begin, 500, "disk") for begin in places]
    flat = Controller(PROFILE, floor=0.05).decide(modules)
    steep = Controller(STEEP, floor=0.05).decide(modules)
    assert flat.recompute_ratio == pytest.approx(0.2)
    assert steep.recompute_ratio == pytest.approx(0.1)  # the same loading hides half as much
    assert "takes 1600.0 ms" in steep.reason
    first = Controller(STEEP, floor=0.05).decide(modules[:1])
    assert first.recompute_ratio == pytest.approx(0.2 / (1 + 250 / 4000))


def test_a_module_is_computed_at_the_front_and_loaded_at_the_end():
    slow = dataclasses.replace(STEEP, disk_bytes_per_s=5_000.0)  # 2 s for 1000 tokens
    control = Controller(slow, floor=0.1)
    decision = control.decide([(begin, 500, "disk") for begin in (0, 3500, 7500)])
    assert decision.loaded == (False, False, True)


def test_the_fit_recovers_the_coefficients_of_made_up_times():
    made = [(n, p, n * 8e-4 + n * (p + n / 2) * 4e-7) for n, p in ((256, 0), (256, 2048), (90, 9))]
    assert fit(made) == pytest.approx((8e-4, 4e-7))
    noisy = [(n, p, s * factor) for (n, p, s), factor in zip(made, (1.1, 0.95, 1), strict=True)]
    assert fit(noisy) == pytest.approx((8e-4, 4e-7), rel=0.25)
    # Noise as large as the slope: the mean, and never a negative rate.
    assert fit([(100, 0, 0.2), (100, 100, 0.1)]) == pytest.approx((0.0015, 0.0))
    assert fit([(100, 0, 0.001), (100, 1000, 1.0)])[0] == 0.0


def test_a_profile_is_measured_at_lengths_that_the_context_has(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path))
    taken = []
    monkeypatch.setattr(profile, "fit", lambda passes: taken.extend(passes) or (1.0, 0.0))
    model = tiny_model("llama")
    measure(model)
    rows = taken[0][0]
    assert [behind for _, behind, _ in taken] == [0, 512, 1024 - rows]  # of 1024
    assert {count for count, _, _ in taken} == {rows}


def test_a_profile_is_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path))
    model = tiny_model("llama")
    first = profile_of(model)
    assert min(first.compute_s(512), first.memory_bytes_per_s, first.disk_bytes_per_s) > 0
    monkeypatch.setattr(profile, "measure", lambda _: pytest.fail("measured again"))
    assert profile_of(model) == first
    (path,) = (tmp_path / "profiles").glob("*.json")
    kept = json.loads(path.read_text())
    old = {"prefill_tokens_per_s": 5000.0} | kept
    del old["token_s"], old["pair_s"]
    backwards = kept | {"pair_s": -1.0}
    for spoilt in ("{", "[]", json.dumps(old), json.dumps(backwards)):
        path.write_text(spoilt)
        with monkeypatch.context() as patch:
            patch.setattr("cached_rag.engine.profile.measure", lambda _: first)
            assert profile_of(model) == first
        assert json.loads(path.read_text()) == kept


@pytest.mark.parametrize("share", [1e-9, 0.4, 5.0])
def test_an_engine_follows_the_controller(share, tmp_path, monkeypatch):
    """Loading takes `share` of what computing the same tokens takes."""
    model = tiny_model("llama")
    disk_rate = model.shapes.bytes_per_token * 5000.0 / share
    profile = Profile(1 / 5000, 0.0, 1e15, disk_rate, model.shapes.bytes_per_token)
    monkeypatch.setattr("cached_rag.engine.choice.profile_of", lambda _: profile)
    settings = StoreConfig(path=str(tmp_path), write_back=False)
    with Engine(model, settings) as engine:
        engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
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
