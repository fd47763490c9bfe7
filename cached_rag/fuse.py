"""Partial prefill on an unmodified transformers model.

Computes chosen rows of a prompt over a KV that already holds the others (CacheBlend, section 4.2).
A Cache subclass scatters the rows' keys and values into full-length ones; hooks on the decoder
layers narrow the rows where a method says so, and are gone afterwards. Knows nothing of text or
stores.

Two ways through the model give the same numbers. In the fast one only the rows enter it, and
attention is ours (`attention.py`). In the dense one all tokens enter, the model builds its own
masks and biases, and every per-row input is narrowed before layer 0: slower, for families whose
attention cannot be replaced, and the twin against which the fast one is tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cached_rag.assemble import KVBuffer
from cached_rag.attention import Rows, attending
from cached_rag.errors import ModelError
from cached_rag.row_cache import Peeked, RowCache
from cached_rag.selectors.base import LayerCheck, Layout, Selector


@dataclass(frozen=True)
class Decoder:
    """What partial prefill must know of a model.

    Attributes:
        model: a transformers causal LM in eval mode.
        layers: its decoder layers, in order.
        windows: each layer's sliding window, None where it sees everything.
        is_fast: attention goes through `attention.py`; else the dense way is taken.
    """

    model: Any
    layers: tuple[torch.nn.Module, ...]
    windows: tuple[int | None, ...]
    is_fast: bool
    parameters: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        names = inspect.signature(self.model.forward).parameters
        object.__setattr__(self, "parameters", frozenset(names))


@dataclass
class Prefilled:
    """What a partial prefill gave.

    Attributes:
        logits: (batch, vocab_size) of the last row.
        computed: (token, layer) pairs that were computed, check layers in full.
        final_rows: rows computed in the last layer.
    """

    logits: torch.Tensor
    computed: int
    final_rows: int


@torch.inference_mode()
def prefill_rows(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    position_ids: torch.Tensor | None = None,
    wants_logits: bool = True,
) -> Prefilled:
    """Compute the rows at `slots` in every layer; the buffer must hold the others.

    Args:
        token_ids: (batch, seq_len) int64, the whole prompt.
        slots: (num_rows,) ascending; None for all.
        position_ids: (seq_len,) rotary positions, where they are not the slots.
        wants_logits: else the language-model head is skipped and `logits` is empty.

    Effects: writes the rows' slots of `buffer`.
    """
    slots = torch.arange(token_ids.shape[1]) if slots is None else slots
    run = _Pass(decoder, buffer, token_ids, slots.to(token_ids.device), position_ids, wants_logits)
    with run.hooked():
        return run.forward()


@torch.inference_mode()
def prefill_selected(
    decoder: Decoder,
    buffer: KVBuffer,
    token_ids: torch.Tensor,
    layout: Layout,
    selector: Selector,
) -> Prefilled:
    """Compute the rows a method chooses, narrowing them at its check layers.

    Args:
        token_ids: (1, seq_len) int64, the whole prompt.
        layout: which slots of `buffer` hold reusable KV.
        selector: the method.

    Effects: writes the chosen rows' slots of `buffer`.
    """
    slots = selector.first_rows(layout).nonzero().squeeze(1)
    run = _Pass(decoder, buffer, token_ids, slots.to(token_ids.device), None, True)
    run.layout, run.selector = layout, selector
    run.checks = frozenset(selector.check_layers(layout))
    with run.hooked():
        return run.forward()


class _Pass:
    """One forward pass. `kept` are the rows still computed, as indices of what entered."""

    layout: Layout
    selector: Selector
    checks: frozenset[int] = frozenset()

    def __init__(
        self,
        decoder: Decoder,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        slots: torch.Tensor,
        position_ids: torch.Tensor | None,
        wants_logits: bool,
    ) -> None:
        length = token_ids.shape[1]
        self.decoder, self.wants_logits = decoder, wants_logits
        positions = (
            torch.arange(length, device=slots.device) if position_ids is None else position_ids
        )
        rows = Rows(slots, length)
        # A model's own masks are right for the last rows of a prompt, so these alone may enter.
        is_tail = rows.is_contiguous and rows.last == length - 1
        if decoder.is_fast or is_tail:
            self.entering, self.kept = token_ids[:, slots], None
            self.positions = positions[slots]
        else:
            self.entering, self.positions, self.kept = token_ids, positions, slots
        self.num_entering = self.entering.shape[1]
        self.cache = RowCache(buffer, rows, self.num_entering, decoder.windows)
        self.computed = self.final_rows = 0

    def forward(self) -> Prefilled:
        """Run the model once."""
        wanted = {
            "input_ids": self.entering,
            "position_ids": self.positions[None].expand(self.entering.shape),
            "past_key_values": self.cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        model = self.decoder.model
        if not self.wants_logits:
            model = model.base_model
            del wanted["logits_to_keep"]
        known = self.decoder.parameters
        inputs = {k: v for k, v in wanted.items() if k in known or k == "past_key_values"}
        with attending(self.cache) if self.decoder.is_fast else ExitStack():
            output = model(**inputs)
        logits = output.logits[:, -1] if self.wants_logits else self.positions.new_empty(0)
        return Prefilled(logits, self.computed, self.final_rows)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks from the first layer that narrows to the last; none if no layer does."""
        layers, handles = self.decoder.layers, []
        first = self._first_narrowing()
        self.computed = first * len(self.cache.rows)
        self.final_rows = len(self.cache.rows)
        try:
            for index in range(first, len(layers)):
                hook = _pre_hook(self, index)
                handles.append(layers[index].register_forward_pre_hook(hook, with_kwargs=True))
            if handles:
                handles.append(layers[-1].register_forward_hook(self._widen))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _first_narrowing(self) -> int:
        count = len(self.decoder.layers)
        if self.kept is not None:
            return 0
        if self.checks:
            return min(self.checks)
        return count - 1 if self.wants_logits and len(self.cache.rows) > 1 else count

    def before_layer(
        self, index: int, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Narrow a layer's inputs to the rows kept; at a check layer, choose them first."""
        names = list(inspect.signature(layer.forward).parameters)
        named = dict(zip(names, args, strict=False)) | kwargs
        inputs = self._narrowed(named)
        if index in self.checks:
            self._peek(layer, inputs)
            inputs = self._narrowed(named | self._choose(index, inputs["hidden_states"]))
        self.computed += len(self.cache.rows)
        self.final_rows = len(self.cache.rows)
        if index == len(self.decoder.layers) - 1 and self.wants_logits and self.final_rows > 1:
            # Only the last token's logits are wanted, so of the last layer's rows only its own;
            # the others leave their keys and values.
            self._peek(layer, inputs)
            last = torch.tensor([self.final_rows - 1], device=self.cache.rows.slots.device)
            inputs = self._narrowed(named | self._keep(last, inputs["hidden_states"]))
        return (), inputs

    def _peek(self, layer: torch.nn.Module, inputs: dict[str, Any]) -> None:
        """Fresh keys and values of all current rows, for the price of norm and projections."""
        self.cache.is_peeking = True
        try:
            layer.forward(**inputs)
        except Peeked:
            pass
        finally:
            self.cache.is_peeking = False

    def _choose(self, index: int, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Ask the method which rows to go on with."""
        rows = self.cache.rows
        reused = self.layout.reused.to(rows.slots.device)[rows.slots]
        check = LayerCheck(index, rows.slots, reused, *self.cache.peeked)
        keep = self.selector.narrow(check, self.layout).nonzero().squeeze(1)
        self.computed += len(rows) - len(keep)  # peeked at, so charged in full
        return self._keep(keep, hidden)

    def _keep(self, keep: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Go on with some of the current rows; returns their hidden states."""
        rows = self.cache.rows
        self.kept = keep if self.kept is None else self.kept[keep]
        self.cache.rows = Rows(rows.slots[keep], rows.length)
        return {"hidden_states": hidden[:, keep]}

    def _narrowed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Per-row tensors cut to the rows kept; what already has that many rows stays."""
        if self.kept is None:
            return inputs
        if not self.decoder.is_fast and inputs.get("attention_mask") is None:
            raise ModelError(
                "the model gave its layers no mask, so scattered rows would see later tokens"
            )
        narrowed = dict(inputs)
        for name, dim in (("hidden_states", 1), ("position_ids", 1), ("attention_mask", 2)):
            narrowed[name] = self._cut(inputs.get(name), dim)
        rotary = inputs.get("position_embeddings")
        if isinstance(rotary, Sequence):
            narrowed["position_embeddings"] = tuple(self._cut(part, 1) for part in rotary)
        return {name: value for name, value in narrowed.items() if name in inputs}

    def _cut(self, tensor: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        if tensor is None or tensor.ndim <= dim or tensor.shape[dim] != self.num_entering:
            return tensor
        assert self.kept is not None
        return tensor.index_select(dim, self.kept)

    def _widen(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Give the rest of the model the number of rows it expects; only kept ones are defined."""
        hidden = output[0] if isinstance(output, tuple) else output
        if self.kept is None or hidden.shape[1] == self.num_entering:
            return output
        wide = hidden.new_zeros(hidden.shape[0], self.num_entering, hidden.shape[2])
        wide[:, self.kept] = hidden
        return (wide, *output[1:]) if isinstance(output, tuple) else wide


def _pre_hook(run: _Pass, index: int) -> Any:
    def hook(
        layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return run.before_layer(index, layer, args, kwargs)

    return hook
