"""The fault campaign's judges see faults where there are some; `make test-faults` runs it whole."""

from __future__ import annotations

import random

import pytest
import torch
from faults import flips, kills, world

from cached_rag.kv.module import ModuleKV
from cached_rag.kv.store import blob


def test_a_few_trials_of_each_are_survived(tmp_path):
    chance = random.Random(1)
    outcomes = flips.campaign(2, tmp_path / "flips", chance)
    outcomes += kills.campaign(2, tmp_path / "kills", chance)
    assert [one.fault for one in outcomes if one.survived < one.trials] == []
    assert len(outcomes) == 12


def test_without_checksums_damage_is_seen_as_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(blob, "layer_sums", lambda tensors: ["0"] * len(tensors["keys"]))
    outcomes = flips.campaign(12, tmp_path, random.Random(2))
    assert sum(one.wrong for one in outcomes if "KV files" in one.fault) > 0


def test_a_module_of_other_numbers_is_seen(tmp_path):
    with world.engine(tmp_path) as store:
        store.encode(world.TEXTS)
        assert world.wrong_modules(store) == 0
        behind, (chunk, *_) = store.library.encoded_after()[0], list(store.library.table)
        kv = store.library.fetch(behind, chunk.token_ids)
        spoilt = ModuleKV(kv.token_ids, kv.start, kv.keys + 0.01, kv.values)
        store.library.put(behind, spoilt, chunk.text_digest)
        assert world.wrong_modules(store) == 1
        assert not world.is_right(spoilt)
        assert torch.isfinite(spoilt.keys).all()


def test_what_is_left_over_is_seen(tmp_path):
    with world.engine(tmp_path) as store:
        store.encode(world.TEXTS[:1])
        (kv, *_) = world.right_kv()[next(iter(store.library.table)).token_ids]
        store.library.disk.put("a" * 40, kv)  # which no text has
    assert any("orphan" in fault for fault in world.litter(tmp_path))


@pytest.mark.parametrize("seconds", [0.05])
def test_a_child_that_ends_by_itself_is_no_trial(tmp_path, seconds):
    with pytest.raises(AssertionError, match="ended by itself"):
        kills._killed(lambda *_: None, tmp_path, random.Random(0), seconds + 1)
