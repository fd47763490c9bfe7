"""Records what a model itself computes for a few tokens, layer by layer, at two places.

`probe.py` compares this library's computations with these records. A batch of two has the same
tokens at two places, that is, at different positions. Every layer gets the same input for both, so
a difference between its outputs comes from this layer alone, and rounding does not accumulate.

While a model is examined, it computes in fp32 whatever its dtype: in bf16, two correct computations
of the same thing may differ by more than a wrong one does. Only the layer that is running has fp32
copies of its weights, in memory that all layers share, so no more memory is needed than for the
largest layer. Knows transformers and `decoder.py`, nothing else of this library.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from transformers import DynamicCache

from cached_rag.backends.transformers.decoder import REMEDY, Decoder, cache_argument
from cached_rag.errors import ModelError
from cached_rag.kv.layers import KVShapes, LayerShape

_HALF = (torch.bfloat16, torch.float16)
Inputs = dict[str, Any]


class _Loan:
    """Lends a module fp32 copies of its tensors, and takes them back.

    Args:
        scratch: copies made for earlier modules, by name; one of the right shape is reused.
        exempt: `id`s of tensors that stay in their dtype.
    """

    def __init__(self, scratch: dict[str, torch.Tensor], exempt: frozenset[int]) -> None:
        self._scratch, self._exempt = scratch, exempt
        self._owed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lend(self, module: torch.nn.Module) -> None:
        """Replace the data of a module's half-precision tensors by fp32 copies."""
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if tensor.dtype in _HALF and id(tensor) not in self._exempt:
                self._owed.append((tensor, tensor.data))
                tensor.data = self._copy(name, tensor.data)

    def settle(self) -> None:
        """Give all tensors their own data back."""
        while self._owed:
            tensor, data = self._owed.pop()
            tensor.data = data

    def _copy(self, name: str, data: torch.Tensor) -> torch.Tensor:
        kept = self._scratch.get(name)
        if kept is None or kept.shape != data.shape or kept.device != data.device:
            kept = self._scratch[name] = torch.empty_like(data, dtype=torch.float32)
        return kept.copy_(data)


@contextmanager
def in_float32(decoder: Decoder) -> Iterator[None]:
    """Inside this context, all that a network has between embeddings and head computes in fp32.

    Afterwards its weights are as before.
    """
    embeddings, head = decoder.model.get_input_embeddings(), decoder.model.get_output_embeddings()
    tables = [module for module in (embeddings, head) if module is not None]
    later = chain.from_iterable(
        chain(m.parameters(), m.buffers()) for m in (*tables, *decoder.modules)
    )
    rest, one = _Loan({}, frozenset(map(id, later))), _Loan({}, frozenset())
    with ExitStack() as stack:
        stack.callback(rest.settle)
        stack.callback(one.settle)
        hold = stack.enter_context
        hold(embeddings.register_forward_hook(lambda _, __, output: output.float()))
        if head is not None:
            hold(head.register_forward_pre_hook(_narrow))
        for layer in decoder.modules:
            hold(layer.register_forward_pre_hook(lambda layer, _: one.lend(layer)))
            hold(layer.register_forward_hook(lambda *_: one.settle(), always_call=True))
        rest.lend(decoder.network)
        yield


def _narrow(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    held = chain(head.parameters(), head.buffers())
    dtype = next((tensor.dtype for tensor in held if tensor.is_floating_point()), None)
    return tuple(tensor.to(dtype) for tensor in inputs)  # weights in fp16 are no tensors


@dataclass
class Recording:
    """What each layer computed, one entry per layer. The two rows of a batch are the two places.

    Attributes:
        inputs, outputs: (2, seq_len, hidden_size), with one more dimension before (Gemma 3n).
        keys, values: (2, num_kv_heads, seq_len, dim), keys rotated; None of a layer that keeps
            nothing of its own.
        given: (2, seq_len, hidden_size), layer 0's own input. It is the same at both places unless
            the model adds positions to embeddings.
        logits: (2, vocab_size) of the last token.
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor | None] = field(default_factory=list)
    values: list[torch.Tensor | None] = field(default_factory=list)
    given: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class _Listening(DynamicCache):  # type: ignore[misc]
    """Keeps all that is given to it; a plain cache drops what is old of sliding layers.

    Attributes:
        heard: keys and values, (batch, heads, seq_len, dim), by layer.
        convolved: the same of inputs of convolutions.
        stateful: layers that keep a state, which has no length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.convolved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.stateful: set[int] = set()

    @property
    def kept(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """What layers keep of each token: a convolution before a state belongs to the state."""
        alone = {i: held for i, held in self.convolved.items() if i not in self.stateful}
        return alone | self.heard

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.heard[layer_idx] = (keys, values)
        return keys, values

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Say that nothing came before."""

    get_recurrent_state = get_linear_cache = get_conv_state

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        inputs = conv_states.transpose(1, 2)[:, None]
        self.convolved[layer_idx] = (inputs[..., :0], inputs)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        self.stateful.add(layer_idx)
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, _: torch.Tensor) -> None:
        self.stateful.add(layer_idx)


@contextmanager
def naming(failed: str) -> Iterator[None]:
    """Inside this context, whatever a model cannot do is a ModelError; a lack of memory is not."""
    try:
        yield
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except (LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{failed} ({type(error).__name__}: {error}). {REMEDY}") from error


def kv_shapes(model: Any, token_ids: torch.Tensor) -> tuple[KVShapes, frozenset[int]]:
    """What the model's layers keep of a token, as they hand it to a cache; which keep a state.

    Args:
        token_ids: (1, num_tokens) int64, of any tokens.

    Raises:
        ModelError: they keep something else than keys and values, or inputs of convolutions.
    """
    cache, name = _Listening(), type(model).__name__
    with naming(f"{name} could not compute two tokens with a cache"):
        model(input_ids=token_ids, use_cache=False, **{cache_argument(model): cache})
    if not cache.kept:
        raise ModelError(f"{name} hands no keys and values to a cache. {REMEDY}")
    found: list[LayerShape | None] = []
    for layer in range(model.config.get_text_config().num_hidden_layers):
        keys, values = cache.kept.get(layer, (None, None))
        if keys is None or values is None:
            found.append(None)
            continue
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ModelError(f"{name} caches more than keys and values per token. {REMEDY}")
        found.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    _, values = next(iter(cache.kept.values()))
    shapes = KVShapes(tuple(found), values.dtype, values.device)
    return shapes, frozenset(cache.stateful)


def record(decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor | None) -> Recording:
    """Run the unmodified model once and record every layer.

    Args:
        token_ids: (2, seq_len) int64, the same tokens twice.
        positions: (2, seq_len) int64; None if the model takes no positions.
    """
    found, cache, layers = Recording(), _Listening(), decoder.modules

    def enter(index: int, inputs: Inputs) -> Inputs:
        hidden = inputs["hidden_states"]
        if index == 0:
            found.given = hidden
        hidden = hidden.narrow(-3, 0, 1).expand_as(hidden).contiguous()
        found.inputs.append(hidden.clone())
        return {"hidden_states": hidden}

    options: Inputs = {decoder.cache_name: cache}
    if positions is not None:
        options["position_ids"] = positions
    with entering(layers, enter), leaving(layers, lambda _, hidden: found.outputs.append(hidden)):
        output = decoder.model(input_ids=token_ids, use_cache=False, **options)
    found.logits = output.logits[:, -1].float()
    for index in range(len(layers)):
        keys, values = cache.kept.get(index, (None, None))
        found.keys.append(keys)
        found.values.append(values)
    return found


@contextmanager
def entering(
    layers: Iterable[torch.nn.Module], change: Callable[[int, Inputs], Inputs], first: int = 0
) -> Iterator[None]:
    """Inside this context, `change` gets each layer's index and named inputs, returns new ones.

    Args:
        layers: of a model, or other modules.
        first: the index of the first of them.
    """

    def before(index: int, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> Any:
        named = dict(zip(_input_names(type(layer).forward), args, strict=False)) | kwargs
        return (), named | change(index, named)

    with ExitStack() as hooks:
        for index, layer in enumerate(layers, first):
            hook = layer.register_forward_pre_hook(partial(before, index), with_kwargs=True)
            hooks.enter_context(hook)
        yield


@cache
def _input_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's inputs; kept, as it takes .4 ms to find those of 28 layers."""
    return tuple(inspect.signature(forward).parameters)[1:]


@contextmanager
def leaving(
    layers: Sequence[torch.nn.Module], see: Callable[[int, torch.Tensor], object]
) -> Iterator[None]:
    """Inside this context, `see` gets each layer's index and (batch, num_rows, hidden) output."""

    def after(index: int, _: torch.nn.Module, __: Any, output: Any) -> None:
        see(index, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_hook(partial(after, index)))
        yield
