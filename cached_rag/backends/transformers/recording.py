"""Records what a model itself computes for a few tokens, layer by layer, at two places.

`probe.py` compares this library's computations with these records. A batch of two has the same
tokens at two places, that is, at different positions. Every layer gets the same input for both, so
a difference between its outputs comes from this layer alone, and rounding does not accumulate.
Knows transformers and `inspection.py`, nothing else of this library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from cached_rag.backends.transformers.inspection import cache_argument

Inputs = dict[str, Any]


@dataclass
class Recording:
    """What each layer computed, one entry per layer. The two rows of a batch are the two places.

    Attributes:
        inputs, outputs: (2, seq_len, hidden_size).
        keys, values: (2, num_kv_heads, seq_len, dim), keys rotated.
        given: (2, seq_len, hidden_size), layer 0's own input. It is the same at both places unless
            the model adds positions to embeddings.
        logits: (2, vocab_size) of the last token.
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    given: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class _Listening(DynamicCache):  # type: ignore[misc]
    """Keeps all keys and values given to it; a plain cache drops old ones of sliding layers."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.heard[layer_idx] = (keys, values)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def record(
    model: Any,
    layers: Sequence[torch.nn.Module],
    token_ids: torch.Tensor,
    positions: torch.Tensor | None,
) -> Recording:
    """Run the unmodified model once and record every layer.

    Args:
        token_ids: (2, seq_len) int64, the same tokens twice.
        positions: (2, seq_len) int64; None if the model takes no positions.
    """
    found, cache = Recording(), _Listening()

    def enter(index: int, inputs: Inputs) -> Inputs:
        hidden = inputs["hidden_states"]
        if index == 0:
            found.given = hidden
        hidden = hidden[:1].expand_as(hidden).contiguous()
        found.inputs.append(hidden.clone())
        return {"hidden_states": hidden}

    options: Inputs = {cache_argument(model): cache}
    if positions is not None:
        options["position_ids"] = positions
    with entering(layers, enter), leaving(layers, lambda _, hidden: found.outputs.append(hidden)):
        output = model(input_ids=token_ids, use_cache=True, **options)
    found.logits = output.logits[:, -1].float()
    for index in range(len(layers)):
        keys, values = cache.heard[index]
        found.keys.append(keys)
        found.values.append(values)
    return found


@contextmanager
def entering(
    layers: Sequence[torch.nn.Module], change: Callable[[int, Inputs], Inputs]
) -> Iterator[None]:
    """Inside this context, `change` gets each layer's index and named inputs, returns new ones."""

    def hook(index: int) -> Any:
        def before(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> Any:
            names = inspect.signature(layer.forward).parameters
            named = dict(zip(names, args, strict=False)) | kwargs
            return (), named | change(index, named)

        return before

    handles = [
        layer.register_forward_pre_hook(hook(index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def leaving(
    layers: Sequence[torch.nn.Module], see: Callable[[int, torch.Tensor], object]
) -> Iterator[None]:
    """Inside this context, `see` gets each layer's index and (batch, num_rows, hidden) output."""

    def hook(index: int) -> Any:
        def after(_: torch.nn.Module, __: Any, output: Any) -> None:
            see(index, output[0] if isinstance(output, tuple) else output)

        return after

    handles = [layer.register_forward_hook(hook(index)) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
