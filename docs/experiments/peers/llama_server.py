"""llama.cpp's own server as a peer, with its prompt cache and `--cache-reuse`."""

from __future__ import annotations

from pathlib import Path

from cached_rag.backends.llama_cpp import api
from cached_rag.errors import ConfigError, MissingPackageError, ModelError
from docs.experiments.answers import Peer, Question, Sample, Stopwatch
from docs.experiments.peers.http import address_of, asked, events

# Fewest tokens in a row that the server moves to another place: its documentation's example.
_REUSE = 256


class LlamaServer(Peer):
    """The server that xllamacpp's wheel has, in this process, asked over HTTP.

    One prompt at a time. It keeps the KV of the last prompt. What the next one begins with is not
    computed again, and runs of at least 256 tokens that stand elsewhere in it are moved there
    without any repair (`--cache-reuse 256`).
    """

    def __init__(self, gguf: Path, context: int, threads: int) -> None:
        """Start the server.

        Args:
            context: most tokens of a prompt and its answer.
            threads: of prefill and of decoding.

        Raises:
            MissingPackageError: xllamacpp is not installed.
            ModelError: the server does not start.
        """
        api.load()  # the checked build, or an error
        try:
            import xllamacpp
        except ImportError as error:
            raise MissingPackageError("llama.cpp's server", "llama-cpp", error) from error
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx, params.n_parallel, params.n_cache_reuse = context, 1, _REUSE
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise ModelError(f"llama.cpp's server does not start: {error}") from error
        self._address = address_of(self._server.listening_address)
        self.about = (
            f"llama.cpp's server of {api.PACKAGE} {api.BUILD}, {gguf.name}, {threads} threads, "
            f"prompt cache, cache-reuse {_REUSE}"
        )

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`.

        Raises:
            ConfigError: the server refuses the prompt.
        """
        body = {
            "prompt": list(question.ids),
            "n_predict": max_tokens,
            "temperature": 0,
            "repeat_penalty": 1.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        watch = Stopwatch()
        remedy = "it may have stopped; see the log"
        server = "llama.cpp server"
        with asked(self._address, "POST", "/completion", body, server, remedy) as response:
            for event in events(response):
                watch.add(*event.get("tokens", ()))
        sample = watch.sample()
        if len(sample.token_ids) != max_tokens:
            raise ConfigError(
                f"llama.cpp's server gave {len(sample.token_ids)} tokens instead of {max_tokens}"
            )
        return sample

    def close(self) -> None:
        """Stop the server."""
        del self._server
