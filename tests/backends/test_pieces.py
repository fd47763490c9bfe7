"""Repair in pieces, several prompts in a pass: the same KV and logits as one prompt in one pass."""

from __future__ import annotations

import pytest
import torch
from conftest import alike, tiny_model
from modules import WATCHED, assembled, copy
from test_step import filled, step

from cached_rag.backends.base import RepairInput, StepInput
from cached_rag.kv.rows import RowKV
from cached_rag.methods import AnchorFlow, CacheBlend, Epic, InfoFlow, ProphetKV, Random, Reuse

TOLERANCE = 1e-4
BATCHING = [family for family in WATCHED if tiny_model(family).can_batch]
METHODS = [
    *(Reuse(), Epic(3), Random(0.3), ProphetKV(0.2), InfoFlow(0.2)),
    *(AnchorFlow(0.1, anchor_tokens=3), AnchorFlow(0.1, anchor_tokens=3, transfers_drift=False)),
]


def inputs(model, buffer, tokens, layout, method, cuts):
    """A repair as pieces that end before these slots."""
    chosen = model.choose(RepairInput(buffer, tokens, layout, method))
    row, found = RowKV(buffer, tokens.shape[1]), []
    modules = layout.modules if method.transfers_drift else ()
    for begin, end in zip([0, *cuts], [*cuts, tokens.shape[1]], strict=True):
        slots = [slot for slot in chosen.left.tolist() if begin <= slot < end]
        is_last = end == tokens.shape[1]
        if slots:
            ids = tokens[0, slots].tolist()
            found.append(StepInput(row, ids, int(is_last), slots, modules))
    return chosen, found


def cuts_of(layout, method):
    """Where a prompt may be cut; in the midst of chunks only if they move as one."""
    length = len(layout.fresh)
    return [begin for begin, _ in layout.modules] if method.transfers_drift else range(3, length, 4)


@pytest.mark.parametrize("family", BATCHING)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_pieces_of_a_repair_give_what_one_pass_gives(family, method):
    model, buffer, tokens, layout = assembled(family)
    whole, parts = copy(buffer), copy(buffer)
    done = model.repair(RepairInput(whole, tokens, layout, method))
    chosen, steps = inputs(model, parts, tokens, layout, method, cuts_of(layout, method))
    assert len(steps) > 1
    for one in steps[:-1]:
        assert model.step([one]).shape[0] == 0
    assert torch.allclose(model.step(steps[-1:]), done.logits, atol=TOLERANCE)
    assert alike(parts.keys, whole.keys)
    assert alike(parts.values, whole.values)
    assert torch.equal(chosen.rows, done.rows)
    without = copy(buffer)
    _, fewer = inputs(model, without, tokens, layout, method, cuts_of(layout, method))
    model.step(fewer[-1:])
    if model.decoder.windows[0] is None:  # control; tiny windows point at the last piece only
        assert not alike(without.values, whole.values, 1e-2)


def test_methods_that_choose_layer_by_layer_are_not_cut():
    model, buffer, tokens, layout = assembled("llama")
    assert model.choose(RepairInput(buffer, tokens, layout, CacheBlend(0.2))) is None


def test_a_piece_that_failed_can_be_tried_again():
    """What a failed pass has written, drift included, does not change what the next one gives."""
    model, buffer, tokens, layout = assembled("llama")
    method = AnchorFlow(0.1, anchor_tokens=3)
    once, twice = copy(buffer), copy(buffer)
    for kv, count in ((once, 1), (twice, 2)):
        _, steps = inputs(model, kv, tokens, layout, method, cuts_of(layout, method))
        for one in steps:
            for _ in range(count):
                model.step([one])
    assert alike(once.keys, twice.keys)
    assert alike(once.values, twice.values)


@pytest.mark.parametrize("family", BATCHING)
def test_rows_of_several_prompts_are_repaired_beside_answers_in_one_pass(family):
    model, buffer, tokens, layout = assembled(family)
    methods = (AnchorFlow(0.1, anchor_tokens=3), Epic(5))
    kept = [copy(buffer) for _ in methods]
    wholes = [copy(buffer) for _ in methods]
    expected = [
        model.repair(RepairInput(whole, tokens, layout, method)).logits
        for whole, method in zip(wholes, methods, strict=True)
    ]
    repairs = [
        inputs(model, kv, tokens, layout, method, ())[1][0]
        for kv, method in zip(kept, methods, strict=True)
    ]
    answers = [filled(model, length, length) for length in (33, 12)]
    alone = [step(model, kv, 7, length) for kv, length in zip(answers, (33, 12), strict=True)]
    decoding = [StepInput(RowKV(kv, n), [7]) for kv, n in zip(answers, (33, 12), strict=True)]
    batch = [decoding[0], repairs[0], decoding[1], repairs[1]]
    found = model.step(batch)
    twin = torch.cat([alone[0], expected[0], alone[1], expected[1]])
    assert torch.allclose(found, twin, atol=TOLERANCE)
    for kv, whole in zip(kept, wholes, strict=True):
        assert alike(kv.values, whole.values)
    assert [row.kv.length for row in batch] == [34, tokens.shape[1], 13, tokens.shape[1]]
    assert not torch.allclose(found[1], found[3], atol=1e-3)
