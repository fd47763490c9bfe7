"""Tries what the backend relies on, with each model that is loaded.

What is tried: how states are laid out, how keys depend on position, and whether KV that is put
together gives what llama.cpp computes itself. With weights in few bits llama.cpp rounds activations
to 8 bits, so two equal computations may differ a little.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch

from cached_rag.backends.llama_cpp.context import LlamaContext, Work
from cached_rag.backends.llama_cpp.facts import Frequencies
from cached_rag.backends.llama_cpp.prompt import Prompt
from cached_rag.backends.llama_cpp.state import StateFormat
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.positions import LayerRule, PositionRule, match_rule

_PROBE_TOKENS = 24
# How far keys are moved, in positions. Scaled frequencies differ little over a short distance, and
# by whole turns, perhaps, over a long one; so a rule has to hold over both.
_NEAR, _FAR = 300, 10_000
# Largest error of moved keys, as a share of a pair of dimensions' size. Rounding to 8 bits causes
# up to a fifth of that; a wrong rule gives about 1 (tests/backends/test_llama_backend.py has both).
_TOLERANCE = 0.25
# Most that logits over KV that was put in may differ, in nats, and as a share of what wrong KV
# does. Nothing is rounded on that way, but sums are taken in another order, and a last bit that
# differs may round an activation to another of 255 values: .002 to .005 were seen. A model whose
# answer hangs on one token alone shows neither; below the last number there is no difference.
_PARTS_TOLERANCE, _PARTS_SHARE, _NOTHING = 0.03, 0.1, 1e-6


def probe_ids(library: ctypes.CDLL, vocab: int, size: int) -> list[int]:
    """Some tokens, spread over the vocabulary, none of which ends a text."""
    step = max(1, size // (2 * _PROBE_TOKENS))
    found = (token for token in range(step, size) if not library.llama_vocab_is_eog(vocab, token))
    return [token for n, token in enumerate(found) if n % step == 0][:_PROBE_TOKENS]


def examined(
    context: LlamaContext, architecture: str, frequencies: Frequencies, ids: list[int]
) -> PositionRule:
    """Learn the states' format, and the rule by which keys are moved.

    Args:
        architecture: the model's, for messages.
        frequencies: the rotary ones that the file may mean.
        ids: some tokens (`probe_ids`).

    Raises:
        ModelError: KV that is put together does not give what llama.cpp computes.
    """
    context.resize(0)
    own, third = context.open(), len(ids) // 3
    cuts = [0, third, 2 * third, len(ids) - 1, len(ids)]
    for begin, end in pairwise(cuts):  # as `_check_parts` computes them: cuts change the rounding
        logits = context.compute([Work(own, ids[begin:end], begin)])[0]
    context.format = StateFormat.of(context.state(own), context.shapes, len(ids))
    here = _read(context, own, 0, len(ids))
    context.drop(own)
    _check_parts(context, ids, cuts, here, logits)
    return _rule(context, architecture, frequencies, ids, here)


def _read(context: LlamaContext, sequence: int, begin: int, tokens: int) -> KVBuffer:
    buffer = KVBuffer.like(context.shapes, tokens)
    context.read(sequence, begin, buffer.keys[:, 0], buffer.values[:, 0])
    return buffer


def _rule(
    context: LlamaContext,
    architecture: str,
    frequencies: Frequencies,
    ids: list[int],
    here: KVBuffer,
) -> PositionRule:
    """How keys depend on position, from the same tokens at three places."""
    there = {delta: _moved(context, ids, delta) for delta in (_NEAR, _FAR)}
    layers: list[LayerRule] = []
    for layer, before in enumerate(here.keys[:, 0]):
        after = {delta: keys[layer] for delta, keys in there.items()}
        found = match_rule(before, after, frequencies, _TOLERANCE)
        if found is None:
            return PositionRule(
                reason=f"no known rotation explains how llama.cpp's keys of {architecture} "
                f"models move (layer {len(layers)})"
            )
        layers.append(found)
    return PositionRule(tuple(layers))


def _moved(context: LlamaContext, ids: list[int], begin: int) -> torch.Tensor:
    """(num_layers, num_kv_heads, seq_len, head_dim) keys of tokens from position `begin` on."""
    with context.opened() as sequence:
        context.compute([Work(sequence, ids, begin, 0)])
        return _read(context, sequence, begin, len(ids)).keys[:, 0]


def _check_parts(
    context: LlamaContext, ids: list[int], cuts: list[int], here: KVBuffer, expected: torch.Tensor
) -> None:
    """See that tokens computed between KV that was put in give the logits of a plain prefill.

    KV of other tokens, put in their place, must be noticed.

    Args:
        cuts: where the plain prefill was cut; every other piece is put in.
        here: its KV.
        expected: its logits.
    """
    _, first, second, last, _ = cuts
    slots = [*range(first, second), *range(last, len(ids))]

    def logits(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        prompt = Prompt(KVBuffer(keys.clone(), values.clone()), 0, ids, slots)
        with context.opened() as own:
            return prompt.compose(context, own, 1)[0]

    error = _distance(logits(here.keys, here.values), expected)
    control = _distance(logits(here.keys.flip(3), here.values.flip(3)), expected)
    if not error <= max(_NOTHING, min(_PARTS_TOLERANCE, _PARTS_SHARE * control)):
        raise ModelError(
            f"KV that is put together does not give what llama.cpp computes (error {error:.1e}, "
            f'wrong KV {control:.1e}); use backend="transformers"'
        )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The Kullback-Leibler divergence between next-token distributions, in nats."""
    wanted = expected.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found.double().log_softmax(-1))).sum())
