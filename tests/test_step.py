"""One pass for several rows: each gets what a prefill of that row alone gives."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, UNMOVABLE, random_ids, tiny_model

from cached_rag.backends.base import StepInput
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV


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
    written = [buffer.keys[:, :, :, slot].clone() for buffer, _, slot in rows]
    for buffer, _, slot in rows:
        buffer.keys[:, :, :, slot] = 0
    together = model.step([StepInput(RowKV(b, slot), [token]) for b, token, slot in rows])
    assert torch.allclose(together, alone, atol=1e-4)
    for (buffer, _, slot), keys in zip(rows, written, strict=True):
        assert torch.allclose(buffer.keys[:, :, :, slot], keys, atol=1e-4)
    assert not torch.allclose(together[0], alone[1], atol=1e-2)


def test_step_takes_batches_and_pieces_of_prompts_in_most_families():
    can_batch = {family for family in FAMILIES if tiny_model(family).can_batch}
    can_append = {family for family in FAMILIES if tiny_model(family).can_append}
    assert can_batch >= {"llama", "qwen3", "gemma3", "mistral"}
    assert not can_batch & {"bloom", "longrope"}
    assert can_batch & UNMOVABLE
    assert can_append >= {"llama", "qwen3", "phi3", "gpt_neox"}
    assert can_append <= can_batch - {"mistral"}  # windows take one token a pass
