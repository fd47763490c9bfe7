"""What benchmarks compare: ways that give the same, and are what they are called."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model

from cached_rag import GenerationConfig
from cached_rag.backends.transformers.attention.kernels import reference
from cached_rag.benchmarks.attention import make_steps, theory
from cached_rag.benchmarks.serving import METHODS, Workload
from cached_rag.kv.buffer import KVShapes
from cached_rag.kv.slab import LONGEST

KV_HEADS, HEADS, DIM = 2, 6, 16


def shapes(dtype=torch.float32):
    return KVShapes(1, KV_HEADS, DIM, DIM, dtype, torch.device("cpu"))


@pytest.mark.parametrize("shared", [40, LONGEST])  # short copies lie in a slab, long ones do not
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_relayed_and_copied_attention_give_the_same(shared, batch):
    steps = make_steps(shapes(), HEADS, batch, shared, private=7)
    relayed, copied = steps["relay"].attend(), steps["copied"].attend()
    assert torch.allclose(relayed, copied, atol=1e-5)
    (common,), (own, *_) = steps["relay"].cache.parts(0)
    query = steps["relay"].query
    keys, values = (
        torch.cat([ahead, mine[own.rows[0]][None, :, :7]], 2)
        for ahead, mine in ((common.keys, own.keys), (common.values, own.values))
    )
    token = int(own.tokens[0])
    folded = query[:, :, token].view(1, KV_HEADS, -1, DIM)
    expected, _ = reference(folded, keys, values, DIM**-0.5)
    assert torch.allclose(relayed[0, :, token], expected.reshape(HEADS, DIM), atol=1e-5)
    alone, _ = reference(folded, common.keys, common.values, DIM**-0.5)
    assert not torch.allclose(relayed[0, :, token], alone.reshape(HEADS, DIM), atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "shared", "relay", "copied"),
    [
        (torch.float32, 100, "flash, padded", "padded"),
        (torch.float32, LONGEST + 1, "flash, padded", "flash"),
        (torch.bfloat16, LONGEST, "flash, padded", "matmul"),
        (torch.bfloat16, LONGEST + 1, "matmul, padded", "matmul"),
    ],
)
def test_the_kernels_named_are_those_of_the_scheduler(dtype, shared, relay, copied, monkeypatch):
    monkeypatch.setattr(
        "cached_rag.backends.transformers.attention.kernels._FLASH_KEYS", ((1, LONGEST),)
    )
    steps = make_steps(shapes(dtype), HEADS, 4, shared, private=7)
    assert (steps["relay"].kernels(), steps["copied"].kernels()) == (relay, copied)


def test_the_theory_is_equation_10():
    assert theory(1, 100, 50) < 1  # the merge costs, and nothing is shared
    assert theory(10**9, 1000, 50) == pytest.approx(1052 / 57)  # the shared part is read for free
    assert theory(16, 2048, 128) > theory(8, 2048, 128) > theory(8, 1024, 128)


def test_all_ways_of_serving_give_the_same_answers():
    work = Workload(tiny_model("qwen3"), shared_tokens=200, private_tokens=20, requests=3)
    config = GenerationConfig(method="prefix", max_tokens=12)
    answers = {name: work.engines[name].generate_batch(work.prompts, config) for name in METHODS}
    tokens = {name: [answer.token_ids for answer in found] for name, found in answers.items()}
    assert all(found == tokens["relay"] for found in tokens.values())
    assert len(set(tokens["relay"])) > 1  # control: prompts differ, and so do answers
    shared = {name: found[-1].report.shared_kv_bytes for name, found in answers.items()}
    assert [name for name, nbytes in shared.items() if nbytes] == ["relay"]
    computed = {name: found[0].report.charged_recompute for name, found in answers.items()}
    assert computed["recomputed"] == 1.0 > 0.3 > computed["copied"]
    work.close()
