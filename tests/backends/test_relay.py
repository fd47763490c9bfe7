"""Attention over what rows share equals attention over copies; so do the models' own layers."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, plain_logits, random_ids, tiny_model

from cached_rag.backends.base import StepInput
from cached_rag.backends.transformers import kernels
from cached_rag.backends.transformers.attention import Padded, Part, merge, relay_attention
from cached_rag.backends.transformers.kernels import (
    KERNELS,
    KV,
    Scoring,
    attend,
    attend_causal,
    gives_the_reference,
    kernel_of,
    reference,
)
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import KVShapes, LayerShape, stacks_of
from cached_rag.kv.rows import Piece, RowKV, Run, Slab, SlabRow, Slabs, mask_of, pieces

BATCHING = sorted(f for f in FAMILIES if tiny_model(f).can_batch)
KV_HEADS, HEADS, DIM = 2, 6, 16


def kv(count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, KV_HEADS, count, DIM, generator=generator).to(dtype) for _ in range(2)]


def tokens(count, seed=0):
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 300, 2000])
def test_kernels_give_output_and_lse_of_the_reference(dtype, count):
    query = torch.randn(1, KV_HEADS, 500, DIM).to(dtype)
    keys, values = kv(count, dtype=dtype)
    output, lse = attend(query, KV(keys, values), Scoring(0.3))
    expected, expected_lse = reference(query, KV(keys, values), 0.3)
    atol = 1e-4 if dtype == torch.float32 else 0.04
    assert torch.allclose(output.float(), expected.float(), atol=atol)
    assert torch.allclose(lse, expected_lse, atol=atol)
    assert lse.dtype == torch.float32


def test_the_kernel_is_chosen_by_rows_and_keys(monkeypatch):
    """All give the same; the table decides, and only in bf16 on a CPU."""
    monkeypatch.setattr(kernels, "flash_has_matrix_units", lambda: False)
    monkeypatch.setattr(kernels, "FLASH_KEYS", ((1, 40), (6, 10)))
    taken = []
    for name, kernel in list(KERNELS.items()):
        spy = partial(lambda name, kernel, *given: taken.append(name) or kernel(*given), name)
        monkeypatch.setitem(KERNELS, name, partial(spy, kernel))
    for rows, count, expected in (
        (1, 40, "flash"),
        (5, 41, "matmul"),
        (6, 10, "flash"),
        (9, 11, "matmul"),
    ):
        keys, values = kv(count, dtype=torch.bfloat16)
        query = torch.randn(1, KV_HEADS, rows, DIM).bfloat16()
        assert kernel_of(rows, KV(keys, values)) == expected
        output, _ = attend(query, KV(keys, values), Scoring(0.3))
        assert taken.pop() == expected
        assert torch.allclose(
            output.float(), reference(query, KV(keys, values), 0.3)[0].float(), atol=0.04
        )
        assert kernel_of(rows, KV(keys.float(), values.float())) == "flash"
        assert kernel_of(rows, KV(keys.float(), values[..., :5].float())) == "plain"
    assert not taken
    monkeypatch.setattr(kernels, "flash_has_matrix_units", lambda: True)
    assert kernel_of(9, KV(*kv(11, dtype=torch.bfloat16))) == "flash"


def test_the_lse_does_not_need_the_first_key():
    torch.manual_seed(0)
    query = torch.randn(1, KV_HEADS, 500, DIM).bfloat16()
    keys, values = kv(2000, dtype=torch.bfloat16)
    keys[:, :, 0] = -50 * query[:, :, :1].mean(2)
    keys[:, :, 1] = 50 * query[:, :, 7]
    _, lse = attend(query, KV(keys, values), Scoring(0.3))
    _, expected = reference(query, KV(keys, values), 0.3)
    scores = 0.3 * (query.float() @ keys.float().transpose(2, 3))
    assert (scores[..., 0] - expected).min() < -100
    assert torch.allclose(lse, expected, rtol=0.01, atol=0.5)  # of scores in bf16


def test_causal_kernels_too():
    query = tokens(33).transpose(0, 1)[None]
    keys, values = kv(33)
    output, lse = attend_causal(query, KV(keys, values), Scoring(0.3))
    groups = HEADS // KV_HEADS
    wide = [side.repeat_interleave(groups, 1) for side in (keys, values)]
    expected, expected_lse = reference(query, KV(*wide), 0.3, causal=True)
    assert torch.allclose(output, expected, atol=1e-5)
    assert torch.allclose(lse, expected_lse, atol=1e-5)
    uncausal, _ = reference(query, KV(*wide), 0.3)
    assert not torch.allclose(output, uncausal, atol=1e-2)


def test_values_of_another_width_take_the_plain_way():
    keys, _ = kv(40)
    values = torch.randn(1, KV_HEADS, 40, 5)
    output, lse = attend(torch.randn(1, KV_HEADS, 3, DIM), KV(keys, values), Scoring(0.3))
    assert output.shape == (1, KV_HEADS, 3, 5)
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padded_rows_keep_their_digits_where_scores_are_large(dtype):
    """By the plain way, which devices without the CPU's kernel take, too."""
    query, (keys, values) = tokens(KV_HEADS * 3)[:, 0].view(1, KV_HEADS, 3, DIM), kv(40)
    query[..., 0], keys[..., 0] = 512.0, 256.0  # Qwen 2's keys are far from 0, too
    values, mask = values[..., :5], torch.zeros(1, 1, 1, 40)
    query, keys, values = (side.to(dtype) for side in (query, keys, values))
    found = kernels.attend_padded(query, KV(keys, values), mask.to(dtype), Scoring(0.25))
    for ours, theirs in zip(found, reference(query, KV(keys, values), 0.25), strict=True):
        assert torch.allclose(ours.float(), theirs.float(), atol=0.05)


def test_what_sees_nothing_weighs_nothing():
    query, none = torch.randn(1, KV_HEADS, 3, DIM), torch.zeros(1, KV_HEADS, 0, DIM)
    nothing = reference(query, KV(none, none), 1.0)
    assert torch.isneginf(nothing[1]).all()
    keys, values = kv(9)
    whole = reference(query, KV(keys, values), 1.0)
    merged = merge(whole, nothing)
    assert torch.allclose(merged[0], whole[0])
    assert torch.allclose(merged[1], whole[1])


def whole_attention(query, keys, values):
    """Twin: one softmax over all keys, token i of m seeing all but the last m - 1 - i."""
    count = len(query)
    groups = HEADS // KV_HEADS
    wide = [side.repeat_interleave(groups, 1) for side in (keys, values)]
    found = [
        reference(
            query[i][None, :, None],
            KV(*(side[:, :, : side.shape[2] - count + 1 + i] for side in wide)),
            DIM**-0.5,
        )
        for i in range(count)
    ]
    return torch.stack([output[0, :, 0] for output, _ in found])


def part(sides, tokens):
    """A run of one layer."""
    keys, values = sides
    return Part([keys], [values], tokens)


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 1, 6)])
def test_relayed_attention_equals_attention_over_the_concatenation(counts):
    """A tree: one run seen by all rows, one by two of them, and each row's own."""
    system, document = kv(20, 1), kv(7, 2)
    own = [kv(5 + count, 3 + count) for count in counts]
    query = tokens(sum(counts))
    begins = [0, counts[0], counts[0] + counts[1]]
    where = [slice(b, b + c) for b, c in zip(begins, counts, strict=True)]
    both = torch.tensor([i for w in (where[0], where[2]) for i in range(w.start, w.stop)])
    private = [part(sides, w) for sides, w in zip(own, where, strict=True)]
    every = slice(None)
    shared = [part(system, every), part(document, both)]
    relayed = relay_attention(query, shared, private, 0, Scoring())
    for row, held in enumerate(((system, document), (system,), (system, document))):
        runs = [*held, own[row]]
        keys, values = (torch.cat([run[side] for run in runs], 2) for side in (0, 1))
        expected = whole_attention(query[where[row]], keys, values)
        assert torch.allclose(relayed[where[row]], expected, atol=1e-5)
    everyone = relay_attention(
        query, [part(system, every), part(document, every)], private, 0, Scoring()
    )
    assert not torch.allclose(everyone[where[1]], relayed[where[1]], atol=1e-3)
    assert torch.allclose(everyone[where[0]], relayed[where[0]], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_slab_are_attended_together(dtype):
    shapes = KVShapes((LayerShape(KV_HEADS, DIM, DIM),), dtype, torch.device("cpu"))
    slab = Slab(shapes, 5, 40)
    spans = {1: (0, 17), 2: (5, 40), 4: (0, 3)}  # rows 0 and 3 are somebody else's, or nobody's
    for row in (slab.take() for _ in range(5)):
        row.keys.normal_()
        row.values.normal_()
    query = tokens(4).to(dtype)
    system = kv(20, 1, dtype)
    seen = slice(1, 5)
    together = Padded(
        slab.whole.keys[:, seen],
        slab.whole.values[:, seen],
        mask_of(spans, 1, 4, slab.whole.keys),
        torch.tensor([3, 0, 1]),
        torch.tensor([0, 1, 3]),
        torch.tensor([16, 39, 2]),
    )
    other = kv(9, 2, dtype)
    private = [together, part(other, slice(2, 3))]
    relayed = relay_attention(query, [part(system, slice(None))], private, 0, Scoring())
    sides = [(slab.whole.keys[0, row], slab.whole.values[0, row]) for row in range(5)]
    runs = [
        [side[None, :, 5:40] for side in sides[2]],
        [side[None, :, 0:3] for side in sides[4]],
        other,
        [side[None, :, 0:17] for side in sides[1]],
    ]
    for token, own in enumerate(runs):
        keys, values = (torch.cat([system[i], own[i]], 2) for i in (0, 1))
        expected = whole_attention(query[token : token + 1], keys, values)
        atol = 1e-5 if dtype == torch.float32 else 0.03
        assert torch.allclose(relayed[token].float(), expected[0].float(), atol=atol)


def test_slabs_hand_out_rows_and_take_them_back():
    model = tiny_model("llama")
    slabs = Slabs(model.shapes)
    rows = [slabs.take(100) for _ in range(20)]
    assert all(row.capacity == 256 for row in rows)
    assert len({(id(row.slab), row.row) for row in rows}) == 20
    assert all(not row.keys.any() for row in rows)
    for side in (rows[3].keys, rows[3].values):
        side.fill_(torch.nan)  # an answer's numbers may overflow
    slabs.give(rows[3])
    again = slabs.take(200)
    assert again.row == rows[3].row
    assert not again.keys.any()
    assert not again.values.any()
    long = slabs.take(5000)
    assert not isinstance(long, SlabRow)
    slabs.give(long)
    for row in rows:
        slabs.give(row)
    slabs.drop_idle()
    assert not any(slabs._slabs.values())


def test_rows_are_cut_where_others_begin_and_end():
    first, second = (KVBuffer(*torch.zeros(2, 1, 1, 1, 100, 1)) for _ in range(2))
    rows = [
        [Run(first, 0, 90, 0)],
        [Run(first, 0, 60, 0), Run(second, 0, 30, 60)],
        [Run(first, 0, 40, 0), Run(second, 10, 20, 40)],
    ]
    assert pieces(rows) == [
        Piece(first, 0, 40, (0, 1, 2)),
        Piece(first, 40, 60, (0, 1)),
        Piece(first, 60, 90, (0,)),
        Piece(second, 0, 10, (1,)),
        Piece(second, 10, 20, (1, 2)),
        Piece(second, 20, 30, (1,)),
    ]


def test_pieces_hold_exactly_what_rows_refer_to():
    draw = random.Random(0)
    buffers = [KVBuffer(*torch.zeros(2, 1, 1, 1, 50, 1)) for _ in range(3)]
    for _ in range(50):
        rows = []
        for _ in range(draw.randint(1, 5)):
            runs, slot = [], 0
            for buffer in draw.sample(buffers, draw.randint(1, 3)):
                begin, end = sorted(draw.sample(range(51), 2))
                runs.append(Run(buffer, begin, end, slot))
                slot += end - begin
            rows.append(runs)
        expected = {
            (index, id(run.buffer), at)
            for index, runs in enumerate(rows)
            for run in runs
            for at in range(run.begin, run.end)
        }
        found = [
            (index, id(piece.buffer), at)
            for piece in pieces(rows)
            for index in piece.rows
            for at in range(piece.begin, piece.end)
        ]
        assert len(found) == len(expected)
        assert set(found) == expected


def prefilled(model, ids, room=8):
    buffer = KVBuffer.like(model.shapes, len(ids) + room)
    model.prefill(buffer, torch.tensor([ids]), num_logits=0)
    return buffer


def on(model, ids, count, base):
    """A prompt whose first `count` tokens' KV is in `base`, the others' in a buffer of its own."""
    whole = prefilled(model, ids)
    own = KVBuffer.like(model.shapes, len(ids) - count + 8)
    for target, source in ((own.keys, whole.keys), (own.values, whole.values)):
        for to, of in zip(stacks_of(target), stacks_of(source), strict=True):
            to[:, :, :, : len(ids) - count] = of[:, :, :, count : len(ids)]
    return RowKV(own, len(ids), [Run(base, 0, count, 0)])


@pytest.mark.parametrize("family", BATCHING)
def test_rows_that_share_a_beginning_step_as_rows_with_copies(family):
    model = tiny_model(family)
    system, document = random_ids(30, 1), random_ids(20, 2)
    prompts = [
        [*system, *document, *random_ids(5, 3)],
        [*system, *document, *random_ids(11, 4)],
        [*system, *random_ids(8, 5)],
    ]
    base = prefilled(model, prompts[0])
    rows = [
        RowKV(base, len(prompts[0])),
        on(model, prompts[1], 50, base),
        on(model, prompts[2], 30, base),
    ]
    for token in (5, 6, 7):
        logits = model.step([StepInput(row, [token]) for row in rows])
        for prompt, row, found in zip(prompts, rows, logits, strict=True):
            prompt.append(token)
            assert row.length == len(prompt)
            assert torch.allclose(found, plain_logits(model, prompt)[-1], atol=1e-4)


@pytest.mark.parametrize("family", [f for f in BATCHING if tiny_model(f).can_append])
def test_prompts_are_prefilled_in_pieces_beside_answers(family):
    model = tiny_model(family)
    system = random_ids(30, 1)
    answered, asked = [*system, *random_ids(5, 2)], [*system, *random_ids(17, 3)]
    alone = random_ids(12, 4)
    base = prefilled(model, answered)
    rows = [
        RowKV(base, len(answered)),
        RowKV(KVBuffer.like(model.shapes, 30), 30, [Run(base, 0, 30, 0)]),
        RowKV(KVBuffer.like(model.shapes, 20), 0),
    ]
    first = [[9], asked[30:40], alone[:7]]
    model.step([StepInput(row, ids) for row, ids in zip(rows, first, strict=True)])
    second = [[8], asked[40:], alone[7:]]
    logits = model.step([StepInput(row, ids) for row, ids in zip(rows, second, strict=True)])
    for ids, found in zip(([*answered, 9, 8], asked, alone), logits, strict=True):
        assert torch.allclose(found, plain_logits(model, ids)[-1], atol=1e-4)


def test_a_kernel_that_does_something_else_is_not_used(caplog):
    def swapped(*args, **options):
        return reference(*args, **options)[::-1]

    def shifted(*args, **options):
        output, lse = reference(*args, **options)
        return output, lse + 1

    assert gives_the_reference(reference, torch.float32, 8, "cpu")
    assert not gives_the_reference(swapped, torch.float32, 8, "cpu")
    assert not gives_the_reference(shifted, torch.float32, 8, "cpu")
    assert "other results" in caplog.text


def test_a_kernel_is_tried_where_it_is_used_and_again_if_there_was_no_memory(monkeypatch):
    places, away = (
        [],
        SimpleNamespace(shape=(1, 1, 1, 8), dtype=torch.bfloat16, device=torch.device("cuda", 1)),
    )

    def full(*_, **__):
        raise torch.OutOfMemoryError

    def tried(_, dtype, dim, device):
        places.append(device)
        return gives_the_reference(full, dtype, dim, "cpu")

    monkeypatch.setattr(kernels, "gives_the_reference", tried)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            kernels._on_cuda(KV(away, away))
    assert places == [away.device] * 2
