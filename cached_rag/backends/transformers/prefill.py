"""Partial prefill: computes chosen rows (tokens) of a prompt over KV that holds the others.

CacheBlend, section 4.2, and the methods after it. Decides when which rows run; `row_pass.py` runs
them. Knows nothing of text or stores.

Two ways through the model give the same numbers. In the fast way only the chosen rows enter the
model, and it attends through `attention/scattered.py`. In the dense way all tokens enter, the model
builds its own masks and biases, and every per-row input is cut to the chosen rows before layer 0.
The dense way is slower. It serves model families whose attention cannot be replaced, and tests
compare the fast way with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cached_rag.backends.base import Chosen, Prefilled
from cached_rag.backends.transformers.decoder import Decoder
from cached_rag.backends.transformers.drift import Drift
from cached_rag.backends.transformers.row_cache import Observer
from cached_rag.backends.transformers.row_pass import RowPass
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
    """See `Backend.prefill`. With `num_logits` 0 the model's head is not computed."""
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
    ready: Callable[[int], object] | None = None,
) -> Prefilled:
    """See `Backend.repair`. At its check layers the method drops rows.

    Args:
        selector: the method.
    """
    if isinstance(selector, QuestionSelector) and selector.observed_layers(layout):
        return _prefill_asked(decoder, buffer, token_ids, layout, selector, ready)
    slots = selector.first_rows(layout).nonzero().squeeze(1)
    device = token_ids.device
    run = RowPass(decoder, buffer, token_ids, slots.to(device), 1, ready)
    run.layout, run.selector = layout, selector
    run.checks = frozenset(selector.check_layers(layout))
    run.cache.drift = Drift(layout.modules) if selector.transfers_drift else None
    with run.hooked():
        return run.forward()


@torch.inference_mode()
def choose_rows(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    layout: Layout,
    selector: Selector,
    ready: Callable[[int], object] | None = None,
) -> Chosen | None:
    """See `Backend.choose`."""
    if selector.check_layers(layout):
        return None
    if isinstance(selector, QuestionSelector) and selector.observed_layers(layout):
        return _ask(decoder, buffer, token_ids, layout, selector, ready)[0]
    slots = selector.first_rows(layout).nonzero().squeeze(1)
    return Chosen(slots, slots, 0)


def _prefill_asked(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    layout: Layout,
    selector: QuestionSelector,
    ready: Callable[[int], object] | None,
) -> Prefilled:
    """Watch what the question attends to over the reused KV, then compute the rows it points at.

    The second pass does not compute the output of layer 0 again for the rows that the first one
    had: it stays valid, since reused KV of layer 0 is exact.
    """
    chosen, asked = _ask(decoder, buffer, token_ids, layout, selector, ready)
    live, rows = layout.fresh.to(token_ids.device), chosen.left
    run = RowPass(decoder, buffer, token_ids, rows, num_logits=1, ready=ready)
    run.cache.drift = Drift(layout.modules) if selector.transfers_drift else None
    assert asked.first_output is not None
    done = run.resume(live[rows], asked.first_output[:, torch.isin(live.nonzero()[:, 0], rows)])
    done.computed += chosen.computed
    done.rows = chosen.rows
    return done


def _ask(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    layout: Layout,
    selector: QuestionSelector,
    ready: Callable[[int], object] | None,
) -> tuple[Chosen, RowPass]:
    """Compute the live rows, which have no KV, and watch what the question among them attends to.

    Live rows before the first row that the method chooses stay valid, if they were computed in
    every layer, since nothing that they see changes. All others are to be computed again.

    Returns:
        The choice, and the pass.
    """
    if not decoder.is_fast:
        raise ModelError(
            "this model's attention cannot be watched, so methods that ask the question cannot be "
            "used with it; choose cacheblend, epic or reuse"
        )
    live = layout.fresh.to(token_ids.device)
    slots = live.nonzero().squeeze(1)
    asked = RowPass(decoder, buffer, token_ids, slots, 0, ready)
    observer = Observer(selector, layout)
    asked.watch(observer)
    chosen = selector.choose(torch.stack(observer.scores), layout)
    first = int(chosen.nonzero()[0])
    is_valid = len(decoder.layers) - 1 in observer.layers
    every = (live | chosen).nonzero().squeeze(1)
    left = every[every >= first] if is_valid else every
    return Chosen(every, left, asked.computed), asked
