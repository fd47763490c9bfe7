"""Positions that jump, as a schema's do: over every family, against transformers' own forward."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    FAMILIES,
    RELOCATABLE,
    alike,
    fill,
    logits_at,
    plain_logits,
    random_ids,
    tiny_model,
)

from cached_rag.backends.base import StepInput
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV

TOLERANCE = 1e-4
POSITIONS = [*range(3, 15), *range(19, 31), *range(48, 60)]
# longrope's frequencies depend on how far a prompt reaches.
GAPPED = sorted(set(FAMILIES) - {"longrope"})


@pytest.mark.parametrize("family", GAPPED)
def test_rows_at_positions_that_jump_equal_the_models_own_forward(family):
    model = tiny_model(family)
    ids = random_ids(len(POSITIONS), seed=21)
    own = logits_at(model, ids, POSITIONS)
    buffer = KVBuffer.like(model.shapes, 40).lay_out(POSITIONS)
    whole = model.prefill(buffer, torch.tensor([ids])).logits[0]
    assert torch.allclose(whole, own, atol=TOLERANCE)
    rows = torch.tensor([5, 6, 20, 35])
    fill(buffer.values, rows, 5.0)
    some = model.prefill(buffer, torch.tensor([ids]), rows).logits[0]
    assert torch.allclose(some, own, atol=TOLERANCE)
    assert not torch.allclose(plain_logits(model, ids)[-1], own, atol=1e-3)


@pytest.mark.parametrize("family", GAPPED)
def test_tokens_to_come_follow_the_last_position(family):
    model = tiny_model(family)
    ids = random_ids(len(POSITIONS) + 1, seed=22)
    own = logits_at(model, ids, [*POSITIONS, 60])
    buffers = [KVBuffer.like(model.shapes, 40).lay_out(POSITIONS) for _ in range(2)]
    for buffer in buffers:
        model.prefill(buffer, torch.tensor([ids[:-1]]))
    steps = [StepInput(RowKV(buffer, len(POSITIONS)), ids[-1:]) for buffer in buffers]
    for logits in model.step(steps):
        assert torch.allclose(logits, own, atol=TOLERANCE)


@pytest.mark.parametrize("family", RELOCATABLE)
def test_modules_are_placed_at_positions_not_at_slots(family):
    model = tiny_model(family)
    ids = torch.tensor([random_ids(12, seed=23)])
    near = KVBuffer.like(model.shapes, 12)
    model.prefill(near, ids)
    far = KVBuffer.like(model.shapes, 12).lay_out(range(70, 82))
    model.prefill(far, ids)
    gapped = KVBuffer.like(model.shapes, 20).lay_out([0, 1, *range(70, 82)])
    gapped.place(near.read(0, 12, tuple(ids[0].tolist())), 2, model.rule)
    assert alike(gapped.keys[:, :, :, 2:14], far.keys)
    assert gapped.read(2, 14, tuple(ids[0].tolist())).start == 70
