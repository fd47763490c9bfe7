"""Partial prefill: chosen rows of a prompt over a KV that already holds the others.

CacheBlend, section 4.2, and the methods after it. Knows when to run which rows; `row_pass.py` runs
them. Knows nothing of text or stores.

Two ways through the model give the same numbers. In the fast one only the rows enter it, and
attention is ours (`attention.py`). In the dense one all tokens enter, the model builds its own
masks and biases, and every per-row input is narrowed before layer 0: slower, for families whose
attention cannot be replaced, and the twin against which the fast one is tested.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cached_rag.backends.base import Prefilled
from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.backends.transformers.drift import Drift
from cached_rag.backends.transformers.observe import Observer
from cached_rag.backends.transformers.row_pass import Decoder, RowPass
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods.base import Layout, Selector
from cached_rag.methods.question import QuestionSelector


@torch.inference_mode()
def prefill_rows(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    num_logits: int = 1,
) -> Prefilled:
    """Compute the rows at `slots` in every layer; the buffer must hold the others.

    Args:
        token_ids: (batch, seq_len) int64, the whole prompt.
        slots: (num_rows,) ascending; None for all.
        num_logits: of how many last rows logits are wanted; with 0 the head is skipped.

    Effects: writes the rows' slots of `buffer`.
    """
    slots = torch.arange(token_ids.shape[1]) if slots is None else slots
    run = RowPass(decoder, buffer, token_ids, slots.to(token_ids.device), num_logits)
    with run.hooked():
        return run.forward()


@torch.inference_mode()
def prefill_selected(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    layout: Layout,
    selector: Selector,
    rows_type: type[Rows] = Rows,
    ready: Callable[[int], object] | None = None,
) -> Prefilled:
    """Compute the rows a method chooses, narrowing them at its check layers.

    Args:
        token_ids: (1, seq_len) int64, the whole prompt.
        layout: which slots of `buffer` hold reusable KV.
        selector: the method.
        rows_type: what rows see; other than `Rows` only to reproduce others' faults.
        ready: called with each layer before its cached KV is used, to wait for it.

    Effects: writes the chosen rows' slots of `buffer`.
    """
    if isinstance(selector, QuestionSelector) and selector.observed_layers(layout):
        return _prefill_asked(decoder, buffer, token_ids, layout, selector, ready)
    slots = selector.first_rows(layout).nonzero().squeeze(1)
    device = token_ids.device
    run = RowPass(decoder, buffer, token_ids, slots.to(device), 1, rows_type, ready)
    run.layout, run.selector = layout, selector
    run.checks = frozenset(selector.check_layers(layout))
    run.cache.drift = Drift(layout.modules) if selector.transfers_drift else None
    with run.hooked():
        return run.forward()


def _prefill_asked(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    layout: Layout,
    selector: QuestionSelector,
    ready: Callable[[int], object] | None,
) -> Prefilled:
    """The question over the stale KV, then the rows it points at, and the question again.

    What the first pass computed stays where it is valid: live rows before the first chosen one
    saw nothing that changes, and layer 0's output of the others depends on no stale KV, for keys
    and values of layer 0 never are.
    """
    if not decoder.is_fast:
        raise ModelError(
            "this model's attention cannot be watched, so methods that ask the question cannot be "
            "used with it; choose cacheblend, epic or reuse"
        )
    live = layout.fresh.to(token_ids.device)
    slots = live.nonzero().squeeze(1)
    asked = RowPass(decoder, buffer, token_ids, slots, num_logits=0, ready=ready)
    observer = Observer(selector, layout)
    asked.watch(observer)
    chosen = selector.choose(torch.stack(observer.scores), layout)
    first = int(chosen.nonzero()[0])
    is_valid = len(decoder.layers) - 1 in observer.layers
    every = (live | chosen).nonzero().squeeze(1)
    rows = every[every >= first] if is_valid else every
    run = RowPass(decoder, buffer, token_ids, rows, num_logits=1, ready=ready)
    run.cache.drift = Drift(layout.modules) if selector.transfers_drift else None
    assert asked.first_output is not None
    done = run.resume(live[rows], asked.first_output[:, torch.isin(slots, rows)])
    done.computed += asked.computed
    done.rows = every
    return done
