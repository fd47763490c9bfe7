"""What a GGUF says of itself, and what of it is tried with each model that is loaded.

What is tried is what the backend relies on: how states are laid out, how keys depend on position,
and whether KV that is put together gives what llama.cpp computes itself. With weights in few bits
llama.cpp rounds activations to 8 bits, so two equal computations may differ a little.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gguf
import numpy as np
import torch

from cached_rag.backends.llama_cpp.context import LlamaContext, Work
from cached_rag.backends.llama_cpp.prompts import Prompt
from cached_rag.backends.llama_cpp.state import StateFormat
from cached_rag.backends.untrusted import BoundedReader
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer, KVShapes
from cached_rag.kv.positions import LayerRule, PositionRule, match_rule

Frequencies = list[tuple[float, ...]]
# YaRN's turns within the original context (`_kept`), unless a file has others.
_FAST, _SLOW = 32.0, 1.0
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


@dataclass(frozen=True)
class Facts:
    """What a GGUF says of itself."""

    library: ctypes.CDLL
    handle: int

    def text(self, key: str) -> str | None:
        """A value of its metadata; `{arch}` stands for the architecture."""
        name = key.replace("{arch}", self.architecture) if "{arch}" in key else key
        value = ctypes.create_string_buffer(256)
        got = self.library.llama_model_meta_val_str(self.handle, name.encode(), value, len(value))
        return value.value.decode(errors="replace") if got >= 0 else None

    def number(self, key: str, otherwise: float) -> float:
        """A number of its metadata."""
        found = self.text(key)
        return otherwise if found is None else float(found)

    @property
    def architecture(self) -> str:
        """Such as "llama"."""
        return self.text("general.architecture") or ""


class FileOutline(BoundedReader):
    """A GGUF's fields and tensors, without what is in lists.

    Of a vocabulary of 150,000 tokens gguf's own reader makes objects that take 500 MB.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = int(self._get(orig_offs, np.uint32)[0])
        count = self._length(orig_offs)
        end = orig_offs + 12
        for _ in range(count):
            end += super()._get_field_parts(end, kind)[0]
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]


def check_kind(facts: Facts, reader: FileOutline, name: str) -> None:
    """See that a model's KV is one plain cache.

    Raises:
        ModelError: it is not.
    """
    library, tensors = facts.library, {tensor.name for tensor in reader.tensors}

    def has(key: str) -> bool:
        return f"{facts.architecture}.{key}" in reader.fields

    kinds = {
        "it has recurrent layers": library.llama_model_is_recurrent(facts.handle)
        or library.llama_model_is_hybrid(facts.handle),
        "its positions have several axes": has("rope.dimension_sections"),
        "it has sliding windows": facts.number("{arch}.attention.sliding_window", 0),
        "its scores depend on distance (ALiBi)": has("attention.max_alibi_bias"),
        "its rotation changes with the context's length": "rope_factors_long.weight" in tensors,
    }
    if wrong := [why for why, is_so in kinds.items() if is_so]:
        raise ModelError(
            f"the KV of {name} cannot be put together in llama.cpp: {' and '.join(wrong)}; use "
            'backend="transformers"'
        )


def shapes_of(facts: Facts) -> KVShapes:
    """The model's KV as llama.cpp keeps it."""
    c, model = facts.library, facts.handle
    dim = c.llama_model_n_embd(model) // max(1, c.llama_model_n_head(model))
    return KVShapes(
        num_layers=c.llama_model_n_layer(model),
        num_kv_heads=c.llama_model_n_head_kv(model),
        head_dim=int(facts.number("{arch}.attention.key_length", dim)),
        value_dim=int(facts.number("{arch}.attention.value_length", dim)),
        dtype=torch.float16,
        device=torch.device("cpu"),
    )


def frequencies_of(facts: Facts, reader: FileOutline) -> Frequencies:
    """Rotary frequencies that the file may mean: as they are, scaled, or with a factor each."""
    dim = int(facts.number("{arch}.rope.dimension_count", 0)) or shapes_of(facts).head_dim
    base = facts.number("{arch}.rope.freq_base", 10_000.0)
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaled = plain / (facts.number("{arch}.rope.scaling.factor", 1.0) or 1.0)
    found = [plain, scaled]
    fast = facts.number("{arch}.rope.scaling.yarn_beta_fast", _FAST)
    slow = facts.number("{arch}.rope.scaling.yarn_beta_slow", _SLOW)
    # llama.cpp reads these numbers for some architectures only.
    for turns in ((_FAST, _SLOW), (fast, slow)):
        kept = _kept(facts, dim, base, *turns)
        found.append(kept * plain + (1 - kept) * scaled)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            found.append(plain / torch.tensor(tensor.data, dtype=torch.float64).flatten())
    return list(dict.fromkeys(tuple(one.tolist()) for one in found if one.isfinite().all()))


def _kept(facts: Facts, dim: int, base: float, fast: float, slow: float) -> torch.Tensor:
    """YaRN: of each frequency, the share that is not scaled; (dim / 2,).

    It is 1 for those that turn more than `fast` times within the original context, 0 for those that
    turn less than `slow` times, and falls evenly between (arXiv 2309.00071, section 3.2).
    """
    trained = facts.number("{arch}.context_length", 0.0)
    length = facts.number("{arch}.rope.scaling.original_context_length", trained)
    turns = torch.tensor([fast, slow], dtype=torch.float64)
    bounds = dim * (length / (turns * 2 * torch.pi)).log() / (2 * math.log(max(base, 2.0)))
    first, last = bounds[0].floor().clamp(min=0), bounds[1].ceil().clamp(max=dim - 1)
    at = torch.arange(dim // 2, dtype=torch.float64)
    return 1 - ((at - first) / (last - first).clamp(min=0.001)).clamp(0, 1)


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
