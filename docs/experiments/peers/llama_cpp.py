"""llama.cpp as a peer: what llama-server does with one prompt at a time and its prompt cache on."""

from __future__ import annotations

import os
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
    create_string_buffer,
)
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from cached_rag.backends.llama_cpp import api
from cached_rag.backends.llama_cpp.loading import gguf_source, whole_file
from cached_rag.backends.thread import on_model_thread
from cached_rag.errors import ConfigError, ContextOverflowError, ModelError
from docs.experiments.answers import Peer, Question, Sample, Stopwatch

# Result and arguments of functions that the library itself does not call.
_FUNCTIONS = {
    "llama_model_desc": (c_int32, (c_void_p, c_char_p, c_size_t)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_batch_get_one": (api.BatchStruct, (POINTER(c_int32), c_int32)),
}


class LlamaCpp(Peer):
    """A GGUF file on the CPU, with llama.cpp's default settings.

    The KV of the last prompt and its answer stays. The next prompt keeps that of the tokens that
    both begin with, and computes the others.
    """

    def __init__(self, gguf: Path, context: int, threads: int) -> None:
        """Load the model.

        Args:
            context: most tokens of a prompt and its answer.
            threads: of prefill and of decoding.

        Raises:
            ConfigError: there is no token, or no thread.
            MissingPackageError, ModelError: llama.cpp is not there, or cannot load the file.
        """
        if min(context, threads) < 1:
            raise ConfigError(f"llama.cpp needs a token and a thread, not {context} and {threads}")
        self._c = api.load()
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        params = api.default_params(self._c, api.ModelParams)
        params.n_gpu_layers = 0
        self._model = self._c.llama_model_load_from_file(os.fsencode(gguf), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {gguf}; its messages above say why")
        sizes = api.default_params(self._c, api.ContextParams)
        sizes.n_ctx, sizes.n_threads, sizes.n_threads_batch = context, threads, threads
        self._context = self._c.llama_init_from_model(self._model, sizes)
        if not self._context:
            self._c.llama_model_free(self._model)
            raise ModelError(f"llama.cpp has no memory for {context} tokens of {gguf}")
        self._vocab_size = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        self._batch = self._c.llama_n_batch(self._context)
        self._held: tuple[int, ...] = ()
        self.about = (
            f"{api.PACKAGE} {api.BUILD}, {gguf.name} ({self._description()}), {threads} threads"
        )

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`.

        Raises:
            ContextOverflowError: prompt and answer do not fit.
            ModelError: llama.cpp refuses the tokens.
        """
        # In the thread where torch computes: where llama.cpp uses the same OpenMP library, it then
        # has the same team of workers. A second team would slow both down (`backends/thread.py`).
        return on_model_thread(partial(self._answer, question.ids, max_tokens))

    def _answer(self, ids: tuple[int, ...], max_tokens: int) -> Sample:
        room = self._c.llama_n_ctx(self._context)
        if len(ids) + max_tokens > room:
            raise ContextOverflowError(f"{len(ids)} + {max_tokens} tokens, context of {room}")
        watch = Stopwatch()
        kept = self._keep(ids[:-1])  # the last token is computed: its logits are needed
        for start in range(kept, len(ids), self._batch):
            self._decode(ids[start : start + self._batch])
        answer = [self._best()]
        watch.add(answer[-1])
        for _ in range(max_tokens - 1):
            self._decode(answer[-1:])
            answer.append(self._best())
            watch.add(answer[-1])
        self._held = (*ids, *answer[:-1])
        return watch.sample()

    def _keep(self, ids: tuple[int, ...]) -> int:
        """Drop all KV but that of the tokens that these begin with; returns their number."""
        both = zip(self._held, ids, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        self._held = ()  # until the answer is complete: it may fail halfway
        memory = self._c.llama_get_memory(self._context)
        if not self._c.llama_memory_seq_rm(memory, 0, kept, -1):
            self._c.llama_memory_clear(memory, True)
            return 0
        return kept

    def _decode(self, ids: tuple[int, ...] | list[int]) -> None:
        """Append tokens to the sequence."""
        if not all(0 <= token < self._vocab_size for token in ids):
            raise ModelError(f"the GGUF file has only {self._vocab_size} tokens: another model's?")
        tokens = (c_int32 * len(ids))(*ids)
        code = self._c.llama_decode(self._context, self._c.llama_batch_get_one(tokens, len(ids)))
        if code:
            raise ModelError(f"llama.cpp cannot compute {len(ids)} tokens (code {code})")

    def _best(self) -> int:
        """The likeliest next token."""
        logits = self._c.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _description(self) -> str:
        text = create_string_buffer(128)
        self._c.llama_model_desc(self._model, text, len(text))
        return text.value.decode(errors="replace")

    def close(self) -> None:
        """See `Peer`."""
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)


def gguf_file(model: str) -> Path:
    """The GGUF file behind a model's name.

    Raises:
        ConfigError: the model is no GGUF file; `--gguf` names one.
        ModelError: its pieces are damaged.
    """
    try:
        return whole_file(gguf_source(model))
    except ConfigError as error:
        raise ConfigError(f"{error}: --gguf FILE") from error
