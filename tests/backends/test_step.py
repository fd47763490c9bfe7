"""One pass for several rows: each gets what a prefill of that row alone gives."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, UNMOVABLE, alike, fill, logits_at, random_ids, tiny_model
from doubles import Plain

from cached_rag.backends.base import StepInput
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import stacks_of
from cached_rag.kv.rows import RowKV, Run, Slabs


def filled(model, length, seed):
    ids = torch.tensor([random_ids(length, seed)])
    buffer = KVBuffer.like(model.shapes, length + 1)
    model.prefill(buffer, ids, num_logits=0)
    return buffer


def step(model, buffer, token, slot):
    """The slow twin: one more token of one row, as a prefill of that row."""
    ids = torch.zeros(1, slot + 1, dtype=torch.int64)
    ids[0, slot] = token
    return model.prefill(buffer, ids, torch.tensor([slot])).logits


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNMOVABLE))
def test_step_of_a_batch_equals_its_rows_alone(family):
    model = tiny_model(family)
    lengths = (5, 40, 23)
    buffers = [filled(model, length, seed) for seed, length in enumerate(lengths)]
    rows = list(zip(buffers, range(7, 10), lengths, strict=True))
    alone = torch.cat([step(model, *row) for row in rows])
    written = [buffer.keys[:, :, :, slot : slot + 1].clone() for buffer, _, slot in rows]
    for buffer, _, slot in rows:
        fill(buffer.keys, slot, 0)
    together = model.step([StepInput(RowKV(b, slot), [token]) for b, token, slot in rows])
    assert torch.allclose(together, alone, atol=1e-4)
    for (buffer, _, slot), keys in zip(rows, written, strict=True):
        assert alike(buffer.keys[:, :, :, slot : slot + 1], keys)
    assert not torch.allclose(together[0], alone[1], atol=1e-2)


def test_step_takes_batches_and_pieces_of_prompts_in_most_families():
    can_batch = {family for family in FAMILIES if tiny_model(family).can_batch}
    can_append = {family for family in FAMILIES if tiny_model(family).can_append}
    assert can_batch >= {"llama", "qwen3", "gemma3", "mistral"}
    assert not can_batch & {"bloom", "longrope"}
    assert can_batch & UNMOVABLE
    assert can_append >= {"llama", "qwen3", "phi3", "gpt_neox"}
    assert can_append <= can_batch - {"mistral"}  # windows take one token a pass


def drafted(model):
    """Four rows, and what each has read: two of one slab, one over a shared run, one with gaps."""
    slabs, read = Slabs(model.shapes), [random_ids(n, n) for n in (33, 21, 40, 12)]
    rows = []
    for ids in read:
        own = slabs.take(len(ids) + 12)
        own.lay_out(range(7, 19) if len(ids) == 12 else None)
        model.prefill(own, torch.tensor([ids]), num_logits=0)
        rows.append(RowKV(own, len(ids)))
    if model.can_batch:
        begun = slabs.take(50)
        rows[2] = rows[2].moved([Run(rows[0].own, 0, 33, 0)], begun)
        read[2][:33] = read[0]
        alone = KVBuffer.like(model.shapes, 40)
        model.prefill(alone, torch.tensor([read[2]]), num_logits=0)
        for target, source in ((begun.keys, alone.keys), (begun.values, alone.values)):
            for to, of in zip(stacks_of(target), stacks_of(source), strict=True):
                to[:, :, :, :7] = of[:, :, :, 33:]
    return rows, read


def expected(model, row, ids, count):
    """(count, vocab_size) logits after the last tokens, by transformers' own forward."""
    at = [row.position(slot) for slot in range(len(ids))]
    ends = range(len(ids) - count + 1, len(ids) + 1)
    return torch.stack([logits_at(model, ids[:end], at[:end]) for end in ends])


APPENDING = [model for f in sorted(FAMILIES) if (model := tiny_model(f)).can_append]


@pytest.mark.parametrize("backend", [*APPENDING, Plain(tiny_model("llama"))], ids=lambda m: m.name)
def test_step_gives_logits_of_several_tokens_which_can_be_taken_back(backend):
    model = tiny_model(backend.name)
    rows, read = drafted(backend)
    counts, wanted = (1, 5, 4, 3), (1, 5, 2, 3)
    for seed, kept in enumerate((0, 1, 2)):
        new = [random_ids(count, seed + count) for count in counts]
        steps = [StepInput(*given) for given in zip(rows, new, wanted, strict=True)]
        found = backend.step(steps).split(wanted)
        for row, ids, added, logits in zip(rows, read, new, found, strict=True):
            assert row.length == len(ids) + len(added)
            own = expected(model, row, [*ids, *added], len(logits))
            assert torch.allclose(logits, own, atol=1e-4)
            ids += added[: 1 + kept]
            row.length = len(ids)  # the others are taken back
