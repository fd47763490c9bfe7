"""The CPU's matmul attention against scaled_dot_product_attention in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from cached_rag.backends.transformers import attention, kernels
from cached_rag.backends.transformers.attention import Rows
from cached_rag.backends.transformers.kernels import (
    KV,
    Scoring,
    matmul_attention,
    matmul_attention_lse,
    reference,
)
from cached_rag.backends.transformers.row_cache import head_mean


@pytest.fixture(params=[False, True])
def units(request, monkeypatch):
    """Whether the CPU has matrix units, as far as the choice of a kernel goes."""
    monkeypatch.setattr(kernels, "flash_has_matrix_units", lambda: request.param)
    return request.param


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(
    "slots",
    [[249], [10, 11, 30, 249], list(range(230, 250)), list(range(50, 250)), list(range(250))],
)
def test_scattered_rows_in_bf16_match_masked_attention_in_fp32(slots, window, batch, units):
    torch.manual_seed(0)
    rows = Rows(torch.tensor(slots), 250)
    query = torch.randn(batch, 6, len(slots), 16)
    keys, values = torch.randn(batch, 2, 250, 16), torch.randn(batch, 2, 250, 16)
    key, slot = torch.arange(250)[None], torch.tensor(slots)[:, None]
    visible = key <= slot
    if window is not None:
        visible &= key > slot - window
    expected = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible, enable_gqa=True
    )
    exact = rows.attend(query, KV(keys, values), Scoring(window=window))
    assert torch.allclose(exact, expected, atol=1e-5)
    half = [tensor.bfloat16() for tensor in (query, keys, values)]
    rounded = Rows(torch.tensor(slots), 250).attend(half[0], KV(*half[1:]), Scoring(window=window))
    assert torch.allclose(rounded.float(), expected, atol=3e-2)


@pytest.mark.parametrize(("count", "taken"), [(63, 0), (64, 1)])
def test_neighbouring_rows_need_no_mask_where_there_are_matrix_units(
    count, taken, units, monkeypatch
):
    used = []
    whole = Rows._attend_unmasked
    monkeypatch.setattr(Rows, "_attend_unmasked", lambda *a: used.append(a) or whole(*a))
    query, keys, values = (torch.randn(1, 2, n, 16).bfloat16() for n in (count, 100, 100))
    Rows(torch.arange(100 - count, 100), 100).attend(query, KV(keys, values), Scoring())
    assert len(used) == (taken if units else 0)


@pytest.mark.parametrize("count", [128, 129])
@pytest.mark.parametrize("softcap", [None, 9.0])
def test_a_whole_prompt_is_computed_in_blocks_where_products_are_faster(count, softcap, units):
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, 2, count, 16).bfloat16() for _ in range(3))
    rows, how = Rows(torch.arange(count), count), Scoring(softcap=softcap)
    found = rows.attend(query, KV(keys, values), how)
    in_blocks = count > 128 and (softcap is not None or not units)
    assert len(rows._plans[None]) == (2 if in_blocks else 1)
    full = [tensor.float() for tensor in (query, keys, values)]
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    expected = kernels.plain_attention(full[0], KV(*full[1:]), mask, how)
    assert torch.allclose(found.float(), expected, atol=3e-2)


def test_a_gpus_blocks_are_smaller_where_the_scores_of_all_heads_lie_in_memory(monkeypatch):
    monkeypatch.setattr(Rows, "_is_on_gpu", True)
    monkeypatch.setattr(attention, "_GPU_BLOCK_SCORES", 256 * 600)
    query, keys, values = (torch.randn(1, 2, count, 16) for count in (300, 600, 600))
    for softcap, blocks in ((None, 2), (9.0, 3)):
        rows = Rows(torch.arange(0, 600, 2), 600)
        rows.attend(query, KV(keys, values), Scoring(softcap=softcap))
        assert len(rows._plans[None]) == blocks


def test_it_serves_outside_of_inference_mode_after_it_served_inside():
    query, keys, values = (torch.randn(1, 2, 60, 16).bfloat16() for _ in range(3))
    with torch.inference_mode():
        inside = matmul_attention(query, KV(keys, values), None, None)
    assert torch.equal(inside, matmul_attention(query, KV(keys, values), None, None))


def test_a_wrong_mask_is_noticed():
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, 2, 4, 16).bfloat16() for _ in range(3))
    causal = torch.full((4, 4), float("-inf")).triu(1).bfloat16()
    masked = matmul_attention(query, KV(keys, values), causal, None)
    unmasked = matmul_attention(query, KV(keys, values), None, None)
    expected = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
    assert torch.allclose(masked.float(), expected.float(), atol=3e-2)
    assert not torch.allclose(unmasked.float(), expected.float(), atol=3e-2)


@pytest.fixture
def far_keys():
    """bf16 attention whose keys lie around a far point, as those of projections with biases do."""
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, heads, 40, 16) for heads in (4, 2, 2))
    keys += 40 * torch.randn(16)
    return [tensor.bfloat16() for tensor in (query, keys, values)]


def test_what_all_keys_have_in_common_costs_no_precision(far_keys):
    query, keys, values = far_keys
    exact = F.scaled_dot_product_attention(
        *(tensor.float() for tensor in far_keys), enable_gqa=True
    )
    found = matmul_attention(query, KV(keys, values), None, None)
    assert torch.allclose(found.float(), exact, atol=0.05)
    grouped = query.view(1, 2, 80, 16)
    merged, lse = matmul_attention_lse(grouped, KV(keys, values), 0.25)
    assert torch.allclose(merged.view(1, 4, 40, 16).float(), exact, atol=0.05)
    expected = reference(grouped.float(), KV(keys.float(), values.float()), 0.25)[1]
    assert torch.allclose(lse, expected, atol=0.1)
    rows = Rows(torch.arange(40), 40)
    weights = head_mean(query[0], keys[0], rows, Scoring())
    true = head_mean(query[0].float(), keys[0].float(), rows, Scoring())
    assert torch.allclose(weights, true, atol=0.03)
