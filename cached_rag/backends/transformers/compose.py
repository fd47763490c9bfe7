"""What a chunk's tokens do to the states of recurrent layers, whatever these are before it.

A gated delta net or Mamba 2 reads tokens into a state S by S <- M S + B, and M and B depend on the
tokens' inputs alone. So the same holds of a whole chunk: M is the product of its tokens' matrices.
Kept with the KV of the attention layers, it lets a chunk follow anything: the state behind it is a
product, and nothing is computed again. That is for recurrent layers what moved keys are for
attention, and approximate in the same way: the inputs are those that the chunk had where it was
encoded. Of a Mamba 2's head M is a number.

M is found by running the layer's own module from other states, so it is what the module does,
whatever that is made of; one that is not affine in its state is found out, too.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save
from transformers.cache_utils import Cache

from cached_rag.backends.transformers.decoder import Decoder
from cached_rag.backends.transformers.prefill import RowPass
from cached_rag.backends.transformers.recording import Inputs, entering
from cached_rag.backends.transformers.states import DECAY, LayerStates, copied_layer, reads_by_token
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer, States
from cached_rag.kv.positions import PositionRule

# Largest error of the states that an affine map gives, and by how much entries of M may differ that
# are one number but for rounding.
_TOLERANCE = 1e-3
_SAME = 1e-5
_MATRIX = "matrix"
Parts = dict[int, torch.Tensor]


@dataclass(frozen=True)
class StateComposer:
    """Composes the states of a model's layers; implements `backends.base.Composer`.

    Attributes:
        decoder: the model.
        rule: how the keys of its attention layers depend on position.
        keepers: the modules that keep states, by the numbers of their layers; see `_keeper`.
    """

    decoder: Decoder
    rule: PositionRule
    keepers: dict[int, Any] = field(compare=False)

    @torch.inference_mode()
    def compute(
        self, buffer: KVBuffer, token_ids: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """See `backends.base.Composer`."""
        calls: list[_Call] = []
        layers, name = list(self.keepers), self.decoder.cache_name

        def note(number: int, given: Inputs) -> Inputs:
            index = layers[number]
            before = copied_layer(given[name].layers[index])
            calls.append(_Call(index, self.keepers[index], given, name, before))
            return {}

        with entering(self.keepers.values(), note):
            RowPass(self.decoder, buffer, token_ids, slots, 0).forward()
        assert isinstance(buffer.states, LayerStates)
        offsets, matrices = buffer.states.copy(), dict[str, torch.Tensor]()
        for call in calls:
            found, layer = call.change(buffer.states.layers[call.index]), offsets.layers[call.index]
            for part, (matrix, offset) in found.items():
                layer.recurrent_states[part] = offset
                matrices[f"{call.index}.{_MATRIX}.{part}"] = matrix.cpu().contiguous()
        return torch.frombuffer(bytearray(save(offsets.tensors() | matrices)), dtype=torch.uint8)

    @torch.inference_mode()
    def behind(self, states: States, change: torch.Tensor, length: int) -> LayerStates:
        """See `backends.base.Composer`."""
        assert isinstance(states, LayerStates)
        held = load(change.numpy().tobytes())
        matrices = {key: held.pop(key) for key in [*held] if _MATRIX in key.split(".")}
        device = next(self.decoder.model.parameters()).device
        found = LayerStates.of(self.decoder.model.config, held, length, device)
        for key, matrix in matrices.items():
            layer, _, part = key.split(".")
            before = states.layers[int(layer)].recurrent_states[int(part)]
            offset = found.layers[int(layer)].recurrent_states[int(part)]
            offset += _times(matrix.to(device), before)
        return found


@dataclass(frozen=True)
class _Call:
    """How a layer's module was called, and its cache before."""

    index: int
    module: Any
    given: Inputs
    name: str
    before: Any

    def change(self, after: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """M and B of each part of the state.

        Args:
            after: the cache after the call.
        """
        own: Parts = {n: t for n, t in self.before.recurrent_states.items() if t is not None}
        offsets = self._from({n: torch.zeros_like(t) for n, t in own.items()})
        ones = self._from({n: torch.ones_like(t) for n, t in own.items()})
        found = {}
        for part, state in own.items():
            matrix = (ones[part] - offsets[part]).float()
            mean = matrix.mean(dim=(-2, -1), keepdim=True)
            rounding = _SAME * max(1.0, float(offsets[part].abs().max()))
            if float((matrix - mean).abs().max()) <= rounding:
                matrix = mean
            else:
                matrix = self._matrix(part, own, offsets[part])
            there = _times(matrix, state) + offsets[part]
            reached = after.recurrent_states[part]
            if not float((there - reached).abs().max()) <= _TOLERANCE * float(reached.abs().max()):
                raise ModelError(
                    f"chunks of this model cannot be composed: the state of layer {self.index} "
                    f'({type(self.module).__name__}) is no matrix times the one before; use "auto"'
                )
            found[part] = matrix, offsets[part]
        return found

    def _matrix(self, part: int, own: Parts, offset: torch.Tensor) -> torch.Tensor:
        """M, whose columns are what the module makes of states with a single 1."""
        *_, size, width = own[part].shape
        columns = []
        for first in range(0, size, width):
            count = min(width, size - first)
            start = torch.zeros_like(own[part])
            start[..., first : first + count, :count] = torch.eye(count, device=start.device)
            columns.append((self._from(own | {part: start})[part] - offset)[..., :count])
        return torch.cat(columns, dim=-1).float()

    def _from(self, states: Parts) -> Parts:
        """The states that the module comes to from these."""
        layer = copied_layer(self.before)
        layer.recurrent_states = {n: state.clone() for n, state in states.items()}
        cache = Cache(layers=[layer] * (self.index + 1))
        self.module.forward(**self.given | {self.name: cache})
        return {n: layer.recurrent_states[n] for n in states}


def _times(matrix: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """M S: of each head a number times its state, or a matrix times it."""
    moved = matrix * state if matrix.shape[-1] == 1 else matrix @ state.float()
    return moved.to(state.dtype)


def composer(decoder: Decoder, rule: PositionRule) -> StateComposer | None:
    """What composes a model's states; None if its keys cannot be moved, or its states are unknown.

    Args:
        rule: how keys of its attention layers depend on position.
    """
    stateful = {n: one.module for n, one in enumerate(decoder.layers) if one.is_stateful}
    keepers = {n: _keeper(decoder, layer) for n, layer in stateful.items()}
    is_by_token = any(reads_by_token(one) for layer in stateful.values() for one in layer.modules())
    is_known = bool(keepers) and None not in keepers.values() and not is_by_token
    return StateComposer(decoder, rule, keepers) if is_known and rule.is_movable else None


def _keeper(decoder: Decoder, layer: torch.nn.Module) -> Any:
    """The innermost module of a layer that has a decay and is given the cache; None for none."""
    found: Any = None
    for module in layer.modules():
        takes_cache = decoder.cache_name in inspect.signature(module.forward).parameters
        if takes_cache and any(hasattr(one, DECAY) for one in module.modules()):
            found = module
    return found
