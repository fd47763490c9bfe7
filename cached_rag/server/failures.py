"""How requests end: every one gets a response, errors in OpenAI's form, and is counted.

A client is told what it did wrong. Other errors go to the log, under an id that the client is
told, for their messages may have paths of this machine in them. Knows HTTP; knows no path.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cached_rag.errors import (
    BusyError,
    CachedRAGError,
    ConfigError,
    ContextOverflowError,
    MissingPackageError,
    RelocationError,
    StoreFullError,
)
from cached_rag.server.answers import Json, failure
from cached_rag.server.metrics import Metrics

_log = logging.getLogger(__name__)
_CODES = {401: "invalid_api_key", 403: "forbidden", 404: "not_found"}
_AGAIN = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
# Field names that clients make up are cut to so many characters in errors.
_NAME = 100
# What pydantic calls the branches of a union: types, validators and models.
_BRANCH = re.compile(r"str|int|float|bool|constrained-\w+|_?[A-Z]\w*|[\w-]+\[.*\]", re.DOTALL)
_OURS = "Value error, "  # pydantic puts it before messages of our validators
# What is said instead of pydantic's words, by its name of the error.
_SAYS = {
    "json_invalid": "the body is no JSON",
    "model_attributes_type": "the body is to be a JSON object, sent as application/json",
    "too_short": "is empty; at least one is needed",
    "string_too_short": "is empty",
    "too_long": "has too many entries",
}
STOPPING = "the server is stopping; ask again later, or another one"
_CUT_OFF = failure(STOPPING, "server_error", "stopping")


def described(error: BaseException) -> tuple[int, Json]:
    """Status and body of the response to an error; what the client did not cause is logged."""
    if isinstance(error, HTTPException):
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        return error.status_code, failure(str(error.detail), kind, _CODES.get(error.status_code))
    if isinstance(error, ContextOverflowError):
        return 400, failure(str(error), "invalid_request_error", "context_length_exceeded")
    if isinstance(error, ConfigError | RelocationError):
        return 400, failure(str(error), "invalid_request_error")
    if isinstance(error, BusyError):
        return 429, failure(str(error), "rate_limit_error", "busy")
    if isinstance(error, MissingPackageError):
        return 501, failure(str(error), "server_error", "not_installed")
    name = uuid.uuid4().hex[:12]
    _log.error("error %s", name, exc_info=error)
    if isinstance(error, StoreFullError):
        says = f"no room is left for KV; what was encoded before is kept (error {name} in the log)"
        return 507, failure(says, "server_error", "store_full")
    return 500, failure(f"the server failed (error {name} in its log)", "server_error")


def response_to(error: BaseException) -> JSONResponse:
    """The whole response to an error."""
    status, content = described(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return JSONResponse(content, status, _AGAIN.get(status, {}) | headers)


def handle_errors(app: FastAPI) -> None:
    """Have an application's paths answer their errors like this."""

    @app.exception_handler(HTTPException)
    @app.exception_handler(CachedRAGError)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return response_to(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [_said(one) for one in error.errors()[:3]]
        says = "; ".join(dict.fromkeys(found))
        return JSONResponse(failure(says, "invalid_request_error"), 400)


def _said(error: dict[str, Any]) -> str:
    """One of pydantic's errors, and where it is."""
    kind, place = error["type"], tuple(error["loc"])
    if kind == "json_invalid":
        return f"{_SAYS[kind]} (at character {place[-1]}: {error['ctx']['error']})"
    says: str = _SAYS.get(kind, error["msg"].removeprefix(_OURS))
    return _where(place, is_named=kind == "extra_forbidden") + says


def _where(place: tuple[Any, ...], *, is_named: bool) -> str:
    """Where in a body; `is_named` says that the last part is a name that the client made up."""
    made_up = place[-1:] if is_named else ()
    ours = place[: len(place) - len(made_up)]
    parts = [str(part) for part in ours if part != "body" and not _BRANCH.fullmatch(str(part))]
    parts += map(str, made_up)
    names = [part.encode(errors="backslashreplace").decode()[:_NAME] for part in parts]
    return f"{'.'.join(names)}: " if names else ""


class Endings:
    """Counts responses by path and status, and ends those that fail or are cut off."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As any ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_begun = is_over = False

        async def watched(message: Message) -> None:
            nonlocal is_begun, is_over
            if message["type"] == "http.response.start":
                is_begun = True
                path = getattr(scope.get("route"), "path", "unknown")
                self._metrics.responded(path, message["status"])
            is_over = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if is_begun:
                raise
            await response_to(error)(scope, receive, watched)
        except asyncio.CancelledError:  # the server is stopping, and has waited long enough
            if not is_begun:
                response = JSONResponse(_CUT_OFF, 503, {"Retry-After": "5", "Connection": "close"})
                await response(scope, receive, watched)
            elif not is_over:  # it is a stream: nothing else is begun before it is complete
                end = event(json.dumps(_CUT_OFF)).encode()
                await watched({"type": "http.response.body", "body": end, "more_body": False})


def event(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"
