"""Experiments on a loaded model: cache shapes, which attention works, how keys depend on position.

Everything that the library assumes of a model is tried on a few tokens first, layer by layer and in
fp32, whatever the model's dtype. Each layer gets the model's own input, so an error belongs to one
layer, and depth, width and outlier channels do not increase it. Rounding errors are then a
thousand times smaller than the error of a wrong mask. Knows models; knows no prompt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from cached_rag.backends.transformers import attention
from cached_rag.backends.transformers.batch import keeps_what_it_reads
from cached_rag.backends.transformers.compose import StateComposer, composer
from cached_rag.backends.transformers.decoder import (
    REMEDY,
    Decoder,
    decoder_layers,
    forget_lengths,
    frequencies,
    switch,
    table_rounding,
)
from cached_rag.backends.transformers.lean import LeanModel
from cached_rag.backends.transformers.prefill import RowPass
from cached_rag.backends.transformers.recording import (
    Inputs,
    Recording,
    entering,
    in_float32,
    kv_shapes,
    leaving,
    naming,
    record,
)
from cached_rag.backends.transformers.states import CONVOLUTION, convolve_rows, read_by_token
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import KVShapes
from cached_rag.kv.positions import LayerRule, PositionRule, match_rule

_PROBE_TOKENS = 12
_PROBE_DELTA = 61
# Sliding windows are set to this while the model is examined, so that some tokens are outside.
_PROBE_WINDOW = 5
# Largest error allowed of a row, as a share of what the layer adds to it. In fp32, rounding causes
# about 1e-6, one key too many or too few at least 1e-2 (tests/backends/test_probe.py tests both).
TOLERANCE = 1e-3
# The same between two places, where rotation angles are rounded, too.
_PLACE_TOLERANCE = 1e-2
# The same for the logits, which are computed in the model's own dtype.
_HEAD_TOLERANCE = 2e-2
# An error up to this share of a row's size is rounding of the sum itself, and not counted.
_ROUNDING = 16 * torch.finfo(torch.float32).eps
_STATES = "some of its layers keep a state instead of keys and values (recurrent layers)"
# Attention that can be computed in fp32; flash attention cannot.
_IN_FP32 = ("sdpa", "eager", attention.IMPLEMENTATION)
_ADDED = "positions are added to the embeddings (learned positions)"


@dataclass(frozen=True)
class Examined:
    """What was found out about a model.

    Attributes:
        decoder: the fast or the dense way of partial prefill, verified against the model.
        shapes: sizes of its keys and values, read off a real cache.
        rule: how its keys depend on position, verified at two places.
        composer: what composes its layers' states; None if that cannot be done.
    """

    decoder: Decoder
    shapes: KVShapes
    rule: PositionRule
    composer: StateComposer | None


@torch.no_grad()
def examine(model: Any, lean: LeanModel | None = None) -> Examined:
    """Find out how a model's KV can be reused, and set the attention that was found to work.

    Args:
        lean: the model's lean form; it is used if it computes what the model does.

    Raises:
        ModelError: partial prefill does not reproduce the model's own prefill, or the model caches
            something other than keys and values, or has windows that cannot be tried.
    """
    if "local" in getattr(model.config, "attention_layers", ()):  # GPT-Neo
        raise ModelError(
            f"{type(model).__name__} masks what is outside its windows by tables for rows that "
            f"follow each other, so scattered tokens of a long prompt would be wrong. {REMEDY}"
        )
    if sparse := {one.kind for one in decoder_layers(model) if "_sparse" in one.kind}:
        raise ModelError(
            f"{type(model).__name__} has {', '.join(sorted(sparse))}: its layers choose the keys "
            f"that they see by an index of their own. {REMEDY}"
        )
    attention.register()
    is_capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    if is_capped or model.config._attn_implementation not in _IN_FP32:
        # Before transformers 5.21 it leaves out Gemma 2's bound of scores.
        model.set_attn_implementation("sdpa" if model._supports_sdpa and not is_capped else "eager")
    forget_lengths(model)
    convolve_rows(one.module for one in decoder_layers(model) if one.kind == CONVOLUTION)
    shapes, stateful = kv_shapes(model, _probe_ids(model)[:, :2])
    dense = Decoder(model, model, decoder_layers(model, shapes, stateful), is_fast=False)
    tolerance = max(TOLERANCE, 4 * table_rounding(model))
    with in_float32(dense), _narrow_windows(model):
        delta = _delta(dense)
        seen = _recorded(dense, delta)
        rule = find_rule(model, seen, delta, tolerance)
        if delta and rule.reason == _ADDED:
            _check_numbering(dense, seen)
        if not delta and _adds_positions(dense):
            rule = PositionRule(reason=_ADDED)
    try:
        decoder = _find_decoder(dense, lean, seen)
    except ModelError:
        if not stateful:
            raise
        read_by_token(one.module for one in dense.layers if one.is_stateful)
        decoder = _find_decoder(dense, lean, seen)
    composes = composer(decoder, rule)
    if stateful:
        rule = PositionRule(reason=_STATES)
    if decoder.is_fast:
        keeps = keeps_what_it_reads(decoder, shapes)
        decoder = replace(decoder, keeps_what_it_reads=keeps)
    return Examined(decoder, shapes, rule, composes)


def _find_decoder(dense: Decoder, lean: LeanModel | None, seen: Recording) -> Decoder:
    """The fast way if the model's attention can be replaced and the results are right; else dense.

    The dense way needs masks, which transformers may not build for its fast kernels; then the
    model's eager attention is used.
    """
    model, reasons = dense.model, []
    is_known = all(layer.is_known for layer in dense.layers)
    ways = [(dense, model.config._attn_implementation), (dense, "eager")]
    if getattr(model, "_supports_attention_backend", False) and is_known:
        fast = replace(dense, is_fast=True)
        networks = [model] if lean is None else [lean, model]
        ways[:0] = [(fast.computed_by(one), attention.IMPLEMENTATION) for one in networks]
    for decoder, implementation in dict.fromkeys(ways):
        model.set_attn_implementation(implementation)
        error, where = deviation(decoder, seen)
        if error <= TOLERANCE:
            return decoder
        reasons.append(where)
    raise ModelError(
        f"partial prefill does not reproduce {type(model).__name__}'s own prefill "
        f"({'; '.join(dict.fromkeys(reasons))}): it keeps state that is not keys and values per "
        "token (recurrent layers, shared caches), has tokens see later ones (as what makes "
        "embeddings does), or needs per-token inputs that are unknown here. "
        f"{REMEDY}"
    )


@torch.no_grad()
def deviation(decoder: Decoder, seen: Recording) -> tuple[float, str]:
    """How much scattered rows over the model's own KV differ from the model's own prefill.

    Returns:
        The largest error of a row (see `TOLERANCE`), infinite if the pass fails; and where it is.
    """
    worst, where = 0.0, ""
    layers = [
        replace(layer, window=type(layer.window)(_PROBE_WINDOW)) if layer.window else layer
        for layer in decoder.layers
    ]
    probe = _Probe(replace(decoder, layers=tuple(layers)), seen)
    with in_float32(decoder), _narrow_windows(decoder.model):
        try:
            found = probe.run()
        except torch.OutOfMemoryError:  # says nothing about the decoder
            raise
        except (ModelError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as e:
            return float("inf"), f"{type(e).__name__}: {e}"
    for layer, error in enumerate(found):
        if not error <= worst:
            place = f"layer {layer}" if layer < len(decoder.layers) else "the head"
            worst, where = error, f"{place} differs by {error:.1e}"
    return worst, where


class _Probe:
    """Computes every second row over the KV of the others, each layer given the model's input.

    Where layers keep a state, it goes on behind a beginning instead. The beginning comes first, but
    for our own attention: by the model's masks its tokens may see later ones, as in embedders.
    """

    def __init__(self, decoder: Decoder, seen: Recording) -> None:
        self.decoder, self.seen = decoder, seen
        middle = _PROBE_TOKENS // 2 + 1
        later = (middle, _PROBE_TOKENS) if decoder.keeps_states else (1, _PROBE_TOKENS, 2)
        spans = [later] if decoder.is_fast else [(0, middle), later]
        self.passes = [torch.arange(*span, device=seen.given.device) for span in spans]
        self.slots = torch.cat(self.passes)
        self.errors: list[float] = []

    def run(self) -> list[float]:
        """Each layer's error, then that of the logits, scaled so that `TOLERANCE` bounds it."""
        layers, buffer = self.decoder.modules, self._buffer()
        token_ids, before = _probe_ids(self.decoder.model), [0.0] * len(layers)
        for slots in self.passes:
            self.slots, self.errors = slots, []
            ids = token_ids[:, : int(slots[-1]) + 1]
            run = RowPass(self.decoder, buffer, ids, slots, num_logits=1)
            with entering(layers, self._enter), leaving(layers[-1:], self._leave):
                found = run.forward().logits[0].float()
            before = self.errors = list(map(max, self.errors, before))
        for layer in range(len(layers)):
            self.errors[layer] = max(self.errors[layer], self._kv_error(layer, buffer))
        own = self.seen.logits[0]
        head = _share(found - own, own, own) * TOLERANCE / _HEAD_TOLERANCE
        return [*self.errors, head]

    def _buffer(self) -> KVBuffer:
        """The model's own KV, with wrong values in the slots that are to be computed."""
        shapes = tuple(layer.shape for layer in self.decoder.layers)
        keeps = KVShapes(shapes, torch.float32, self.slots.device)
        buffer, every = KVBuffer.like(keeps, _PROBE_TOKENS), slice(None)
        for layer, (keys, values) in enumerate(zip(self.seen.keys, self.seen.values, strict=True)):
            if keys is not None and values is not None:
                buffer.write(layer, every, keys[:1], values[:1])
                for side in (buffer.keys, buffer.values):
                    side[layer][:, :, self.slots] = 7.0
        return buffer

    def _enter(self, layer: int, inputs: Inputs) -> Inputs:
        own, arriving = _at(self.seen.inputs[layer], 0), inputs["hidden_states"]
        rows = self.slots[-arriving.shape[-2] :]  # the last layers compute only the last row
        if arriving.shape[-2] != own.shape[-2]:
            own = own.index_select(-2, rows)
        if layer > 0:
            before = _at(self.seen.inputs[layer - 1], 0).index_select(-2, rows)
            self.errors.append(_share(arriving - own, own, own - before))
        return {"hidden_states": own.clone()}

    def _leave(self, _: int, hidden: torch.Tensor) -> None:
        rows = self.slots[-hidden.shape[-2] :]
        sides = (self.seen.inputs[-1], self.seen.outputs[-1])
        before, own = (_at(side, 0).index_select(-2, rows) for side in sides)
        self.errors.append(_share(hidden - own, own, own - before))

    def _kv_error(self, layer: int, buffer: KVBuffer) -> float:
        worst = 0.0
        for ours, theirs in ((buffer.keys, self.seen.keys), (buffer.values, self.seen.values)):
            own = theirs[layer]
            if own is not None:
                worst = max(worst, _share(ours[layer][0] - own[0], own[0], own[0]))
        return worst


def _at(hidden: torch.Tensor, place: int) -> torch.Tensor:
    """Hidden states of one of the two places."""
    return hidden.narrow(-3, place, 1)


def _share(error: torch.Tensor, whole: torch.Tensor, part: torch.Tensor) -> float:
    """The largest error of a row, less the rounding of `whole`, as a share of `part`.

    Args:
        error, whole, part: (..., num_rows, dim), or one row of (dim,); fp32.

    Returns:
        The share; infinite if it is not a number.
    """
    size = (error.norm(dim=-1) - _ROUNDING * whole.norm(dim=-1)).clamp(min=0)
    found = float((size / part.norm(dim=-1).clamp(min=1e-30)).max())
    return found if found == found else float("inf")


def _recorded(decoder: Decoder, delta: int) -> Recording:
    """Record the model's own pass over the probe's tokens at positions from 0 and from `delta`.

    Raises:
        ModelError: its layers do not hand keys and values per token to a cache, or compute numbers
            that are not finite.
    """
    token_ids = _probe_ids(decoder.model).expand(2, -1)
    positions = torch.arange(_PROBE_TOKENS, device=token_ids.device).expand(2, -1)
    positions = positions + torch.tensor([[0], [delta]], device=token_ids.device)
    takes_positions = "position_ids" in decoder.parameters
    with naming(f"{type(decoder.model).__name__} could not be examined"):
        found = record(decoder, token_ids, positions if takes_positions else None)
        if len(found.outputs) != len(decoder.layers):
            raise ValueError("its layers are not run once each")
    places = [f"layer {layer}" for layer in range(len(found.outputs))]
    for place, outputs in zip([*places, "the head"], [*found.outputs, found.logits], strict=True):
        if not outputs.isfinite().all():
            raise ModelError(
                f"{place} of {type(decoder.model).__name__} computes numbers that are not "
                'finite: its weights are damaged, or too large for this dtype. Try dtype="float32" '
                "or download them again"
            )
    return found


def _adds_positions(decoder: Decoder) -> bool:
    """Whether one token repeated enters the first layer differently at each place.

    So it is in models that take no positions and number the tokens themselves, as BART does.
    """
    token_ids = _probe_ids(decoder.model)[:, :1].expand(2, _PROBE_TOKENS)
    given = record(decoder, token_ids, None).given[0]
    return _share(given - given[:1], given, given) > TOLERANCE


def find_rule(model: Any, seen: Recording, delta: int, tolerance: float) -> PositionRule:
    """How each layer's keys depend on position, found out from the same tokens at two places.

    A model that takes no positions (ALiBi) has a `delta` of 0: its keys and values do not depend on
    position, and moving a row and its keys changes all the row's biases by one constant, which the
    softmax ignores.

    Args:
        seen: the model's own pass at both places.
        delta: how many positions lie between the places.
        tolerance: largest error allowed of a rotated key.
    """
    here, there = _at(seen.given, 0), _at(seen.given, 1)
    if _share(there - here, here, here) > TOLERANCE:
        return PositionRule(reason=_ADDED)
    candidates = frequencies(model)
    rules: dict[str, list[LayerRule]] = {"keys": [], "values": []}
    for layer, outputs in enumerate(seen.outputs):
        here, there = _at(outputs, 0), _at(outputs, 1)
        added = here - _at(seen.inputs[layer], 0)
        if _share(there - here, here, added) > max(_PLACE_TOLERANCE, tolerance):
            return PositionRule(reason=f"layer {layer} depends on absolute positions")
        for name, side in (("keys", seen.keys[layer]), ("values", seen.values[layer])):
            rule: LayerRule | None = LayerRule("none")
            if side is not None and side.shape[-1]:
                rule = match_rule(side[0], {delta: side[1]}, candidates, tolerance)
            if rule is None:
                return PositionRule(reason=f"no known rotation explains {name} of layer {layer}")
            rules[name].append(rule)
    turns = any(rule.style != "none" for rule in rules["values"])  # in latent attention
    return PositionRule(
        tuple(rules["keys"]),
        limit=switch(model.config),
        values=tuple(rules["values"]) if turns else (),
    )


def _check_numbering(decoder: Decoder, seen: Recording) -> None:
    """Raise a ModelError if a model does not number its tokens from 0 (Kosmos 2.5)."""
    own = _at(record(decoder, _probe_ids(decoder.model).expand(2, -1), None).given, 0)
    given = _at(seen.given, 0)
    if _share(own - given, own, own) > TOLERANCE:
        raise ModelError(
            f"{type(decoder.model).__name__} numbers its tokens in a way of its own, which is "
            f"unknown here. {REMEDY}"
        )


def _delta(decoder: Decoder) -> int:
    """How many positions apart the two places are; 0 for a model that takes no positions."""
    if "position_ids" not in decoder.parameters:
        return 0
    limit = switch(decoder.model.config)
    return min(_PROBE_DELTA, limit - _PROBE_TOKENS) if limit else _PROBE_DELTA


@contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    """Inside this context, sliding windows are shorter than the probe's tokens.

    So is what comes before queries are scaled by their positions (Llama 4).
    """
    text = model.config.get_text_config()
    places = [(text, name) for name in ("sliding_window", "attention_chunk_size")]
    places += [(module, "floor_scale") for module in model.modules()]
    sizes = [(*place, getattr(*place, None)) for place in places]
    wide = [one for one in sizes if isinstance(one[2], int | float) and one[2] > _PROBE_WINDOW]
    for owner, name, _ in wide:
        setattr(owner, name, _PROBE_WINDOW)
    try:
        yield
    finally:
        for owner, name, size in wide:
            setattr(owner, name, size)


def _probe_ids(model: Any) -> torch.Tensor:
    """(1, _PROBE_TOKENS) token ids that exist in every vocabulary, and differ if it is large."""
    size = model.config.get_text_config().vocab_size
    ids = [(37 * i + 11) % size for i in range(_PROBE_TOKENS)]
    return torch.tensor([ids], device=next(model.parameters()).device)
