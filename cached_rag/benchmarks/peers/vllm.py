"""A vLLM server as a peer, asked over HTTP. It runs in an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from cached_rag.benchmarks.peers.base import Question, Sample, Stopwatch
from cached_rag.errors import ConfigError

_SECONDS = 3600  # a long prompt takes minutes on a CPU, and more behind others


class Vllm:
    """The first model that the server has."""

    def __init__(self, url: str) -> None:
        """Ask the server what it is.

        Raises:
            ConfigError: the address is none, or no such server answers there.
        """
        self._url, self._address = url, _address(url)
        with self._response("GET", "/v1/models") as response:
            self._model = json.load(response)["data"][0]["id"]
        with self._response("GET", "/version") as response:
            version = json.load(response)["version"]
        self.about = f"vLLM {version}, model {self._model!r} at {url}"

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
        with self._response("POST", "/v1/completions", body) as response:
            for event in _events(response):
                for choice in event.get("choices", ()):
                    watch.add(*choice.get("token_ids", ()))
        sample = watch.sample()
        if len(sample.token_ids) != max_tokens and not (may_end and sample.token_ids):
            raise ConfigError(
                f"the server at {self._url} gave {len(sample.token_ids)} token ids instead of "
                f"{max_tokens}; it must be a vLLM that knows return_token_ids"
            )
        return sample

    def close(self) -> None:
        """Change nothing: the server is the user's."""

    @contextmanager
    def _response(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[HTTPResponse]:
        """The server's answer; errors in reading it are explained, too."""
        kind = HTTPSConnection if self._address.scheme == "https" else HTTPConnection
        connection = kind(str(self._address.hostname), self._address.port, timeout=_SECONDS)
        sent = None if body is None else json.dumps(body)
        try:
            where = self._address.path.rstrip("/") + path
            connection.request(method, where, sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(500).decode(errors="replace")
                raise ConfigError(f"{self._url}{path} answers {response.status}: {said}")
            yield response
        except (OSError, HTTPException, json.JSONDecodeError, LookupError) as error:
            raise ConfigError(
                f"no vLLM server answers at {self._url} ({error}); docs/speed.md says how to start "
                "one"
            ) from error
        finally:
            connection.close()


def _address(url: str) -> SplitResult:
    try:
        found = urlsplit(url)
        if found.scheme in ("http", "https") and found.hostname and found.port != 0:
            return found
    except ValueError:  # a port that is none
        pass
    raise ConfigError(f"{url!r} is no address of a server such as http://127.0.0.1:8000")


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    for line in response:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)
