"""Loads a GGUF with llama.cpp, and tries what the backend assumes before anything relies on it.

What is tried: how states are laid out, how keys depend on position, whether KV that is put together
gives what llama.cpp computes itself, and whether both tokenizers agree. With weights in few bits
llama.cpp rounds activations to 8 bits, so two equal computations may differ a little.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import torch

from cached_rag.backends.llama_cpp import api
from cached_rag.backends.llama_cpp.context import Context, Work
from cached_rag.backends.llama_cpp.files import gguf_source, tokenizer_of, whole_file
from cached_rag.backends.llama_cpp.model import LlamaCppModel
from cached_rag.backends.llama_cpp.state import Cells, StateFormat
from cached_rag.backends.transformers.memory import OVERHEAD_BYTES, free_bytes
from cached_rag.errors import ModelError
from cached_rag.kv import fingerprint
from cached_rag.kv.buffer import KVShapes
from cached_rag.kv.positions import LayerRule, PositionRule, match_rule

# Part of the fingerprint: raised when the same tokens would get other KV than before.
_KV_VERSION = 1
_PROBE_TOKENS, _PROBE_DELTA = 24, 300
# Largest error of moved keys, as a share of a pair of dimensions' size. Rounding to 8 bits causes
# up to a fifth of that; a wrong rule gives about 1 (tests/test_llama_backend.py has both).
_TOLERANCE = 0.25
# Most that logits over KV that was put in may differ, in nats, and as a share of what wrong KV
# does. Nothing is rounded on that way, but sums are taken in another order, and a last bit that
# differs may round an activation to another of 255 values: .002 to .005 were seen. A model whose
# answer hangs on one token alone shows neither; below the last number there is no difference.
_PARTS_TOLERANCE, _PARTS_SHARE, _NOTHING = 0.03, 0.1, 1e-6
# Seen on two cores behind 4000 tokens: a step of one token 32 ms, of two 63, of four 102. On a GPU
# weights are read once for all of them.
_CPU_PRICE, _GPU_PRICE = 0.9, 0.1
# Texts that both tokenizers must cut alike.
_TEXTS = (
    "Hello, World! It's 3 o'clock.",
    "  two  spaces,\n\n\ttabs\nand 1234567.89 numbers",
    "naïve café — “quotes” … 東京で 🙂 Ωμέγα",
    "def f(x):\n    return {'a': [x ** 2, None]}  # 100%",
)


_Frequencies = list[tuple[float, ...]]


@dataclass(frozen=True)
class _Facts:
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


def load_llama_cpp(name: str, threads: int | None = None, *, on_gpu: bool = False) -> LlamaCppModel:
    """Load a GGUF with llama.cpp.

    Args:
        name: an alias that stands for a GGUF, or a .gguf file.
        threads: of prefill and decoding; None for torch's number.
        on_gpu: compute all layers on the GPU that the build of llama.cpp is made for.

    Raises:
        ConfigError: it is no GGUF.
        ModelNotFoundError: there is no such file, or it has no tokenizer that transformers knows.
        MissingPackageError: llama.cpp is not installed.
        ModelError: the file is damaged, does not fit in memory, or is of a kind whose KV cannot be
            put together (sliding windows, recurrent layers, several position axes); or a GPU is
            wanted and the build has none.
    """
    library, source = api.load(), gguf_source(name)
    if on_gpu and not library.llama_supports_gpu_offload():
        raise ModelError(
            "this build of llama.cpp computes on the CPU only; leave device out, or install a "
            "build for your GPU (docs/llama_cpp.md)"
        )
    path = whole_file(source)
    _check_memory(name, path)
    params = api.default_params(library, api.ModelParams)
    params.n_gpu_layers = -1 if on_gpu else 0
    handle = library.llama_model_load_from_file(os.fsencode(path), params)
    if not handle:
        raise ModelError(f"llama.cpp cannot load {path}; its messages in the log say why")
    context: Context | None = None
    try:
        facts, reader = _Facts(library, handle), gguf.GGUFReader(path)
        _check_kind(facts, reader, name)
        frequencies = _frequencies(facts, reader)
        del reader
        shapes, vocab = _shapes(facts), library.llama_model_get_vocab(handle)
        size = library.llama_vocab_n_tokens(vocab)
        context = Context(library, handle, shapes, size, threads or torch.get_num_threads())
        tokenizer = tokenizer_of(source, path)
        _check_tokenizer(library, vocab, tokenizer, name)
        ids = _probe_ids(library, vocab, size)
        rule = _examined(context, facts, frequencies, ids)
        kv_facts = {
            "version": _KV_VERSION,
            "weights": source.digest,
            "backend": f"{api.PACKAGE} {api.BUILD}",
            "tokenizer": fingerprint.digest(tokenizer.backend_tokenizer.to_str()),
            "dtype": str(shapes.dtype),
        }
        model = LlamaCppModel(
            name=name,
            context=context,
            tokenizer=tokenizer,
            shapes=shapes,
            rule=rule,
            fingerprint=fingerprint.model_fingerprint(kv_facts),
            vocab_size=size,
            context_length=library.llama_model_n_ctx_train(handle),
            eos_ids=frozenset(t for t in range(size) if library.llama_vocab_is_eog(vocab, t)),
            weights_bytes=library.llama_model_size(handle),
            about=f"llama.cpp ({api.PACKAGE} {api.BUILD})",
            token_price=_GPU_PRICE if on_gpu else _CPU_PRICE,
        )
    except BaseException:
        _release(library, context, handle)
        raise
    # Not at the interpreter's end, when the model's thread may still compute.
    weakref.finalize(model, _release, library, context, handle).atexit = False
    return model


def _release(library: ctypes.CDLL, context: Context | None, handle: int) -> None:
    if context is not None:
        context.free()
    library.llama_model_free(handle)


def _check_memory(name: str, path: Path) -> None:
    needed, free = path.stat().st_size + OVERHEAD_BYTES, free_bytes("cpu")
    if needed > free:
        raise ModelError(
            f"{name} does not fit: its file and the first prompts take {needed / 2**30:.1f} GiB, "
            f"and {max(free, 0) / 2**30:.1f} GiB of memory are free. Free some, or use a smaller "
            "model or quantisation"
        )


def _check_kind(facts: _Facts, reader: Any, name: str) -> None:
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


def _shapes(facts: _Facts) -> KVShapes:
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


def _check_tokenizer(library: ctypes.CDLL, vocab: int, tokenizer: Any, name: str) -> None:
    """See that transformers' tokenizer, which finds chunks, cuts texts as llama.cpp's does."""
    for text in _TEXTS:
        data, room = text.encode(), 4 * len(text) + 8
        ids = (ctypes.c_int32 * room)()
        count = library.llama_tokenize(vocab, data, len(data), ids, room, False, False)
        wanted = tokenizer.encode(text, add_special_tokens=False)
        if list(ids[: max(0, count)]) != wanted:
            raise ModelError(
                f"llama.cpp cuts {text!r} into other tokens than transformers does with the "
                f'tokenizer in {name}, so chunks could not be found; use backend="transformers"'
            )


def _probe_ids(library: ctypes.CDLL, vocab: int, size: int) -> list[int]:
    """Some tokens, spread over the vocabulary, none of which ends a text."""
    step = max(1, size // (2 * _PROBE_TOKENS))
    found = (token for token in range(step, size) if not library.llama_vocab_is_eog(vocab, token))
    return [token for n, token in enumerate(found) if n % step == 0][:_PROBE_TOKENS]


def _examined(
    context: Context, facts: _Facts, frequencies: _Frequencies, ids: list[int]
) -> PositionRule:
    """Learn the states' format, and the rule by which keys are moved.

    Raises:
        ModelError: KV that is put together does not give what llama.cpp computes.
    """
    context.resize(0)
    own, third = context.open(), len(ids) // 3
    cuts = [0, third, 2 * third, len(ids) - 1, len(ids)]
    for begin, end in pairwise(cuts):  # as `_check_parts` computes them: cuts change the rounding
        logits = context.compute([Work(own, ids[begin:end], begin)])[0]
    context.format = StateFormat.of(context.state(own), context.shapes, len(ids))
    here = context.read(own, [(0, len(ids))])
    rule = _rule(context, facts, frequencies, ids, here)
    _check_parts(context, ids, cuts, here, logits)
    context.drop(own)
    return rule


def _rule(
    context: Context, facts: _Facts, frequencies: _Frequencies, ids: list[int], here: Cells
) -> PositionRule:
    """How keys depend on position, from the same tokens at two places."""
    far = context.open()
    context.compute([Work(far, ids, _PROBE_DELTA, 0)])
    there = context.read(far, [(_PROBE_DELTA, _PROBE_DELTA + len(ids))])
    context.drop(far)
    layers: list[LayerRule] = []
    for before, after in zip(here.part[0], there.part[0], strict=True):
        found = match_rule(before, after, _PROBE_DELTA, frequencies, _TOLERANCE)
        if found is None:
            return PositionRule(
                reason=f"no known rotation explains how llama.cpp's keys of {facts.architecture} "
                f"models move (layer {len(layers)})"
            )
        layers.append(found)
    return PositionRule(tuple(layers))


def _frequencies(facts: _Facts, reader: Any) -> _Frequencies:
    """Rotary frequencies that the file may mean: as they are, scaled, or with a factor each."""
    dim = int(facts.number("{arch}.rope.dimension_count", 0)) or _shapes(facts).head_dim
    base = facts.number("{arch}.rope.freq_base", 10_000.0)
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    found = [plain, plain / facts.number("{arch}.rope.scaling.factor", 1.0)]
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            found.append(plain / torch.tensor(tensor.data, dtype=torch.float64).flatten())
    return list(dict.fromkeys(tuple(one.tolist()) for one in found))


def _check_parts(
    context: Context, ids: list[int], cuts: list[int], here: Cells, expected: torch.Tensor
) -> None:
    """See that tokens computed between KV that was put in give the logits of a plain prefill.

    KV of other tokens, put in their place, must be noticed.

    Args:
        cuts: where the plain prefill was cut; every other piece is put in.
        here: its KV.
        expected: its logits.
    """
    _, first, second, last, _ = cuts
    keys, values = here.part
    known = [*range(first), *range(second, last)]

    def logits(source: list[int]) -> torch.Tensor:
        stored, own = context.open(), context.open()
        context.put(stored, known, [(keys[:, :, source], values[:, :, source])])
        context.take(stored, own, 0, first)
        context.compute([Work(own, ids[first:second], first, 0)])
        context.take(stored, own, second, last)
        found = context.compute([Work(own, ids[last:], last)])[0]
        context.drop(stored)
        context.drop(own)
        return found

    error, control = _distance(logits(known), expected), _distance(logits(known[::-1]), expected)
    if not error <= max(_NOTHING, min(_PARTS_TOLERANCE, _PARTS_SHARE * control)):
        raise ModelError(
            f"KV that is put together does not give what llama.cpp computes (error {error:.1e}, "
            f'wrong KV {control:.1e}); use backend="transformers"'
        )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The Kullback-Leibler divergence between next-token distributions, in nats."""
    wanted = expected.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found.double().log_softmax(-1))).sum())
