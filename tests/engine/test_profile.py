"""Profiles: how fast a model computes on this machine, measured once and kept."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from conftest import tiny_model

from cached_rag.backends import machine as profile
from cached_rag.backends.machine import (
    Profile,
    best_device,
    fastest_dtype,
    fit,
    free_bytes,
    measure,
    profile_of,
)


def test_a_prompt_costs_what_its_length_makes_it_cost():
    steep = Profile(0.001, 0.001 / 4000)  # behind 4000 others a token costs twice
    assert steep.compute_s(8000) == pytest.approx(8 + 8)


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


def test_a_profile_is_measured_while_nobody_else_computes(monkeypatch):
    model = tiny_model("llama")
    seen = []

    def passes(*_):
        seen.append((model.lock.locked(), torch.is_inference_mode_enabled()))
        return [(2, 0, 1.0), (1, 0, 1.0)]

    monkeypatch.setattr(profile, "_passes", passes)
    measure(model)
    assert seen == [(True, True)]
    assert not model.lock.locked()


def test_the_device_is_asked_for_bf16_and_for_memory(monkeypatch):
    at = []
    monkeypatch.setattr(torch.cuda, "device", lambda where: at.append(where) or nullcontext())
    emulates = lambda including_emulation=True: including_emulation  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulates)
    assert fastest_dtype("cuda:1") == torch.float16
    assert at == [torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8, 24))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 15)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5)
    assert free_bytes("cuda:1") == 18  # what earlier models left to torch is free


def test_mps_has_to_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert best_device() == "cpu"


def test_a_profile_is_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path))
    model = tiny_model("llama")
    first = profile_of(model)
    assert first.compute_s(512) > 0
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
            patch.setattr("cached_rag.backends.machine.measure", lambda _: first)
            assert profile_of(model) == first
        assert json.loads(path.read_text()) == kept
