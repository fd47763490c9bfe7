"""Asking a server over HTTP, with errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from cached_rag.errors import ConfigError

_SECONDS = 3600  # a long prompt takes minutes on a CPU, and more behind others


@contextmanager
def asked(
    address: SplitResult, method: str, path: str, body: dict[str, Any] | None, who: str, remedy: str
) -> Iterator[HTTPResponse]:
    """The server's answer; errors in reading it are explained, too.

    Args:
        who: what answers there.
        remedy: what to do if nobody answers.

    Raises:
        ConfigError: nobody answers, or not what was expected.
    """
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection = kind(str(address.hostname), address.port, timeout=_SECONDS)
    url, sent = address.geturl(), None if body is None else json.dumps(body)
    try:
        where = address.path.rstrip("/") + path
        connection.request(method, where, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            said = response.read(500).decode(errors="replace")
            raise ConfigError(f"{url}{path} answers {response.status}: {said}")
        yield response
    except (OSError, HTTPException, json.JSONDecodeError, LookupError) as error:
        raise ConfigError(f"no {who} answers at {url} ({error}); {remedy}") from error
    finally:
        connection.close()


def address_of(url: str) -> SplitResult:
    """A URL in its parts.

    Raises:
        ConfigError: it is none of a server.
    """
    try:
        found = urlsplit(url)
        if found.scheme in ("http", "https") and found.hostname and found.port != 0:
            return found
    except ValueError:  # a port that is none
        pass
    raise ConfigError(f"{url!r} is no address of a server such as http://127.0.0.1:8000")


def events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    for line in response:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)
