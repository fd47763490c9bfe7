"""Partial prefill: computes chosen rows (tokens) of a prompt over KV that holds the others.

CacheBlend, section 4.2, and the methods after it. A `RowPass` is one forward pass of an unmodified
transformers model over chosen rows: a subclass of transformers' `Cache` writes their keys and
values to their slots in a buffer that holds the whole prompt, and hooks on the decoder layers,
removed after the pass, drop rows where a method decides so. `repair_rows` says which rows run when.

Two ways through the model give the same numbers. In the fast way only the chosen rows enter the
model, and it attends through `attention.py`. In the dense way all tokens enter, the model builds
its own masks and biases, and every per-row input is cut to the chosen rows before layer 0. The
dense way is slower. It serves model families whose attention cannot be replaced, and tests compare
the fast way with it.

MPT, BLOOM and Falcon add a bias to the scores that is linear in the key's index (ALiBi). Where
positions have gaps, a key's index is not its position: the bias is then computed from the position,
with the same slope (Prompt Cache, section 4.2). Knows nothing of text or stores.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from cached_rag.backends.base import Chosen, Prefilled, RepairInput
from cached_rag.backends.transformers.attention import Rows, attending
from cached_rag.backends.transformers.decoder import Decoder
from cached_rag.backends.transformers.recording import Inputs, entering
from cached_rag.backends.transformers.row_cache import Drift, Observed, Observer, Peeked, RowCache
from cached_rag.backends.transformers.states import LayerStates
from cached_rag.errors import ConfigError, ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods.base import LayerCheck, Layout, QuestionSelector, Selector

# Inputs of layers that have an entry for each row, and the dimension of the rows. (Hidden states of
# Gemma 3n have one more dimension, before the batch.)
_BY_ROW = {
    **{"hidden_states": -2, "position_ids": -1, "attention_mask": -2, "per_layer_input": -2},
    "attention_scaling": -2,  # Beam
}
_BIASES = ("alibi", "position_bias")


def with_gaps(inputs: Inputs, positions: torch.Tensor) -> Inputs:
    """A layer's inputs, its ALiBi biases (if any) computed from positions instead of indices.

    Args:
        positions: (num_keys,) int64, ascending, the position of each key.
    """
    biases = [name for name in _BIASES if inputs.get(name) is not None]
    mask = inputs.get("attention_mask")
    if biases and mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        biases.append("attention_mask")  # Falcon adds its bias to the mask, head by head
    return inputs | {name: stretched(inputs[name], positions) for name in biases}


def stretched(bias: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn a (..., rows, keys) bias that is linear in the key's index into one linear in position.

    The bias's last row must see all keys. If the bias has more keys than there are positions, only
    its last keys are used.
    """
    count = len(positions)
    bias = bias[..., -count:]
    if count < 2:
        return bias
    slope = bias[..., -1:, 1:2] - bias[..., -1:, :1]
    shift = (positions - torch.arange(count)).to(bias.device, bias.dtype)
    return bias + slope * shift


class RowPass:
    """One forward pass.

    Attributes:
        entering: (batch, num_entering) token ids that enter the model.
        kept: indices among these of the rows that are still computed; None for all.
        checks: layers before which `selector` chooses rows.
        final_slots: slots of the rows that are computed in every layer.
        computed: (token, layer) pairs computed so far.
        index: the layer that runs.
    """

    index: int
    layout: Layout
    selector: Selector
    checks: frozenset[int] = frozenset()

    def __init__(
        self,
        decoder: Decoder,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        slots: torch.Tensor,
        num_logits: int,
        ready: Callable[[int], object] | None = None,
    ) -> None:
        length, device = token_ids.shape[1], buffer.keys.device
        token_ids, slots = token_ids.to(device), slots.to(device)
        self.decoder, self.num_logits, self.ready = decoder, num_logits, ready
        self.gaps = None if buffer.positions is None else buffer.positions[:length]
        positions = torch.arange(length) if self.gaps is None else self.gaps
        positions = positions.to(device)
        rows = Rows(slots, length)
        # Without our attention, only the last rows of a prompt may enter by themselves: the model's
        # own masks are right for them.
        is_tail = rows.is_contiguous and rows.last == length - 1
        if decoder.is_fast or is_tail:
            self.entering, self.kept = token_ids[:, slots], None
            self.positions = positions[slots]
        else:
            self.entering, self.positions, self.kept = token_ids, positions, slots
        self.num_entering = self.entering.shape[1]
        self.buffer, self.end = buffer, rows.last + 1
        if decoder.keeps_states:
            self._go_on(rows, is_tail=is_tail)
        self.cache = RowCache(buffer, rows, self.num_entering, decoder.windows)
        self.computed = 0

    def _go_on(self, rows: Rows, *, is_tail: bool) -> None:
        """See that the states are those before the first row.

        Raises:
            ModelError: they are not, or the rows are scattered.
        """
        if not is_tail:
            raise ModelError("layers that keep states compute no scattered tokens of a prompt")
        if rows.first == 0:
            self.buffer.states = LayerStates.new(self.decoder.model.config)
        states = self.buffer.states
        if states is None or states.length != rows.first:
            where = "nowhere" if states is None else f"behind token {states.length}"
            raise ModelError(f"the states before token {rows.first} are not there, but {where}")

    def forward(self) -> Prefilled:
        """Run the model once over the rows."""
        states, self.buffer.states = self.buffer.states, None  # what fails leaves none behind
        with self._hooked():
            found = self._forward()
        if isinstance(states, LayerStates):
            states.length = self.end
            self.buffer.states = states
        return found

    def _forward(self) -> Prefilled:
        network = self.decoder.network if self.num_logits else self.decoder.network.base_model
        positions = self.positions[None].expand(self.entering.shape).contiguous()
        keeps = self._kept_logits() if self.num_logits else None
        inputs = self.decoder.inputs(self.entering, positions, self.cache, keeps)
        with attending(self.cache) if self.decoder.is_fast else ExitStack():
            output = network(**inputs)
        if not self.num_logits:
            tail = torch.empty(len(self.entering), 0, 0)
        else:
            tail = output.logits[:, -self.num_logits :]
        return Prefilled(tail, self.computed, self.final_slots)

    def _kept_logits(self) -> int | torch.Tensor:
        """As models take it. Where layers keep nothing, a number would have Gemma 4 cut rows."""
        if self.decoder.num_keeping == len(self.decoder.layers):
            return self.num_logits
        return torch.arange(-self.num_logits, 0, device=self.entering.device)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Inside this context, hooks are on all layers from the first that may drop rows."""
        layers, first = self.decoder.modules, self._first_narrowing()
        self.computed = first * len(self.cache.rows)
        self.final_slots = self.cache.rows.slots
        widened = layers[-1].register_forward_hook(self._widen)
        with widened, entering(layers[first:], self.before_layer, first):
            yield

    def _first_narrowing(self) -> int:
        count = len(self.decoder.layers)
        if self.kept is not None or self.cache.observer is not None:
            return 0
        if self.ready is not None or (self.gaps is not None and not self.decoder.is_fast):
            return 0
        if self.checks:
            return min(self.checks)
        is_cut = 0 < self.num_logits < len(self.cache.rows)
        return self._last_whole if is_cut else count

    @property
    def _last_whole(self) -> int:
        """The layer from which on only the rows whose logits are wanted are computed.

        It computes keys and values of all. A layer with a state has to read them all.
        """
        last = self.decoder.num_keeping - 1
        return last + self.decoder.layers[last].is_stateful

    def before_layer(self, index: int, named: Inputs) -> Inputs:
        """Cut a layer's inputs to the rows kept; at a check layer, let the method choose them."""
        self.index = index
        if self.ready is not None:
            self.ready(index)
        if self.gaps is not None:
            named = with_gaps(named, self.gaps)
        inputs = self._narrowed(named)
        if index in self.checks:
            self._peek(inputs)
            inputs = self._narrowed(named | self._choose(index, inputs["hidden_states"]))
        count = len(self.cache.rows)
        if index < self.decoder.num_keeping:  # the layers behind compute less in every pass
            self.final_slots = self.cache.rows.slots
        self.computed += len(self.final_slots)
        if index == self._last_whole and 0 < self.num_logits < count:
            # The last layer, and those before it that keep nothing, compute only rows whose logits
            # are wanted. Of the others keys and values are computed, which later tokens need.
            if index < self.decoder.num_keeping:
                self._peek(inputs)
            last = torch.arange(count, device=self.cache.rows.slots.device)
            last = last[-self.num_logits :]
            inputs = self._narrowed(named | self._keep(last, inputs["hidden_states"]))
        return inputs

    def _peek(self, inputs: Inputs) -> None:
        """Compute only keys and values of the current rows, not the rest of the layer."""
        self.cache.is_peeking = True
        try:
            self.decoder.modules[self.index].forward(**inputs)
        except Peeked:
            pass
        finally:
            self.cache.is_peeking = False

    def _choose(self, index: int, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Let the method choose which rows to go on with; returns their hidden states."""
        rows = self.cache.rows
        reused = self.layout.reused.to(rows.slots.device)[rows.slots]
        check = LayerCheck(index, rows.slots, reused, *self.cache.peeked)
        keep = self.selector.narrow(check, self.layout).nonzero().squeeze(1)
        self.computed += len(rows) - len(keep)  # dropped rows count as computed in this layer
        return self._keep(keep, hidden)

    def _keep(self, keep: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Go on with the current rows at indices `keep`; returns their hidden states."""
        rows = self.cache.rows
        self.kept = keep if self.kept is None else self.kept[keep]
        self.cache.rows = rows.narrowed(keep)
        return {"hidden_states": hidden.index_select(-2, keep)}

    def _narrowed(self, inputs: Inputs) -> Inputs:
        """The inputs with per-row tensors cut to the rows kept, where they are not yet."""
        if self.kept is None:
            return inputs
        layer = self.decoder.layers[self.index]
        attends = layer.attends or layer.shape is not None
        if attends and not self.decoder.is_fast and inputs.get("attention_mask") is None:
            raise ModelError(
                "the model gave its layers no mask, so scattered rows would see later tokens"
            )
        narrowed: Inputs = {
            name: self._cut(inputs[name], dim) for name, dim in _BY_ROW.items() if name in inputs
        }
        rotary = inputs.get("position_embeddings")
        if isinstance(rotary, torch.Tensor):  # one of complex numbers
            narrowed["position_embeddings"] = self._cut(rotary, 1)
        elif isinstance(rotary, Sequence):
            narrowed["position_embeddings"] = tuple(self._cut(part, 1) for part in rotary)
        return inputs | narrowed

    def _cut(self, tensor: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        if tensor is None or tensor.ndim < 2 or tensor.shape[dim] != self.num_entering:
            return tensor
        assert self.kept is not None
        return tensor.index_select(dim, self.kept)

    def _widen(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Give the model's head as many rows as entered; those that were dropped are zero."""
        hidden = output[0] if isinstance(output, tuple) else output
        if self.kept is None or hidden.shape[-2] == self.num_entering:
            return output
        wide = hidden.new_zeros(*hidden.shape[:-2], self.num_entering, hidden.shape[-1])
        wide[..., self.kept, :] = hidden
        return (wide, *output[1:]) if isinstance(output, tuple) else wide


@torch.inference_mode()
def repair_rows(decoder: Decoder, prompt: RepairInput) -> Prefilled:
    """See `Backend.repair`. At its check layers the method drops rows."""
    chosen, layout, method = _chosen(decoder, prompt), prompt.layout, prompt.method
    run = _pass(decoder, prompt, chosen.left, prompt.num_logits)
    run.layout, run.selector = layout, method
    run.checks = frozenset(method.check_layers(layout))
    run.cache.drift = Drift(layout.modules) if method.transfers_drift else None
    done = run.forward()
    if chosen.computed:
        done.computed += chosen.computed
        done.rows = chosen.rows
    return done


@torch.inference_mode()
def choose_rows(decoder: Decoder, prompt: RepairInput) -> Chosen | None:
    """See `Backend.choose`."""
    return None if prompt.method.check_layers(prompt.layout) else _chosen(decoder, prompt)


def _chosen(decoder: Decoder, prompt: RepairInput) -> Chosen:
    """The rows that the method begins with; it may look at what the question attends to."""
    method, layout = prompt.method, prompt.layout
    if isinstance(method, QuestionSelector) and method.observed_layers(layout):
        return _ask(decoder, prompt, method)
    slots = method.first_rows(layout).nonzero().squeeze(1)
    return Chosen(slots, slots, 0)


def _pass(decoder: Decoder, prompt: RepairInput, slots: torch.Tensor, num_logits: int) -> RowPass:
    return RowPass(decoder, prompt.buffer, prompt.token_ids, slots, num_logits, prompt.ready)


def _ask(decoder: Decoder, prompt: RepairInput, method: QuestionSelector) -> Chosen:
    """Compute the live rows, which have no KV; watch what the question among them attends to.

    Live rows before the first row that the method chooses stay valid, if they were computed in
    every layer, since nothing that they see changes. All others are to be computed again.
    """
    if not decoder.is_fast:
        raise ConfigError(
            "this model's attention cannot be watched, so methods that ask the question cannot "
            "be used with it; choose cacheblend, epic or reuse"
        )
    live = prompt.layout.fresh.to(prompt.buffer.keys.device)
    asked = _pass(decoder, prompt, live.nonzero().squeeze(1), 0)
    observer = Observer(method, prompt.layout, decoder.attending)
    asked.cache.observer = observer
    with suppress(Observed):  # once it has seen all its layers
        asked.forward()
    chosen = method.choose(torch.stack(observer.scores), prompt.layout)
    first = int(chosen.nonzero()[0])
    is_valid = len(decoder.layers) - 1 in observer.layers
    every = (live | chosen).nonzero().squeeze(1)
    left = every[every >= first] if is_valid else every
    return Chosen(every, left, asked.computed)
