"""A vLLM server as a peer, asked over HTTP. It runs in an environment of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from cached_rag.errors import ConfigError
from docs.experiments.answers import Peer, Question, Sample, Stopwatch
from docs.experiments.peers.http import address_of, asked, events

# Its worker waits for the next step on a processor that it keeps busy, for a second.
PAUSE_S = 1.5


class Vllm(Peer):
    """The first model that the server has."""

    def __init__(
        self, url: str, prepare: Callable[[Question], Mapping[str, Any]] = lambda _: {}
    ) -> None:
        """Ask the server what it is.

        Args:
            prepare: gives further fields of the request for a question. Its time counts.

        Raises:
            ConfigError: the address is none, or no such server answers there.
        """
        self._url, self._address, self._prepare = url, address_of(url), prepare
        with self._response("GET", "/v1/models") as response:
            self._model = json.load(response)["data"][0]["id"]
        with self._response("GET", "/version") as response:
            version = json.load(response)["version"]
        served = Path(self._model).name  # without the folder, which is this machine's
        self.about = f"vLLM {version}, model {served!r} at {url}"

    def answer(self, question: Question, max_tokens: int, *, may_end: bool = False) -> Sample:
        """See `Peer`.

        Args:
            may_end: the answer ends where the model ends it.

        Raises:
            ConfigError: the server refuses the prompt, or does not say which tokens it makes.
        """
        body = {
            "model": self._model,
            "prompt": list(question.ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "repetition_penalty": 1.0,
            "ignore_eos": not may_end,
            "stream": True,
            "return_token_ids": True,
        }
        watch = Stopwatch()
        body |= self._prepare(question)
        with self._response("POST", "/v1/completions", body) as response:
            for event in events(response):
                for choice in event.get("choices", ()):
                    watch.add(*choice.get("token_ids", ()))
        sample = watch.sample()
        if len(sample.token_ids) != max_tokens and not (may_end and sample.token_ids):
            raise ConfigError(
                f"the server at {self._url} gave {len(sample.token_ids)} token ids instead of "
                f"{max_tokens}; it must be a vLLM that knows return_token_ids"
            )
        return sample

    def settle(self) -> None:
        """Wait until the server rests, if it is on this machine."""
        time.sleep(PAUSE_S)

    def close(self) -> None:
        """Change nothing: the server is the user's."""

    def _response(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AbstractContextManager[HTTPResponse]:
        remedy = "docs/speed.md says how to start one"
        return asked(self._address, method, path, body, "vLLM server", remedy)
