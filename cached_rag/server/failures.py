"""What errors become for clients: a status, and OpenAI's form.

Only what the client did is explained to it. All else is explained to the log, under an id that the
client is told: messages may have paths of this machine in them.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cached_rag.errors import (
    BusyError,
    CachedRAGError,
    ConfigError,
    ContextOverflowError,
    RelocationError,
    StoreFullError,
)
from cached_rag.server.answers import Json, failure

_log = logging.getLogger(__name__)
_CODES = {401: "invalid_api_key", 403: "forbidden", 404: "not_found"}
_AGAIN = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
# Names that clients write come back in errors, but no more of them.
_NAME = 100
STOPPING = "the server is stopping; ask again later, or another one"
CUT_OFF = failure(STOPPING, "server_error", "stopping")


def described(error: BaseException) -> tuple[int, Json]:
    """Status and body for an error; what is not the client's doing is logged."""
    if isinstance(error, HTTPException):
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        return error.status_code, failure(str(error.detail), kind, _CODES.get(error.status_code))
    if isinstance(error, ContextOverflowError):
        return 400, failure(str(error), "invalid_request_error", "context_length_exceeded")
    if isinstance(error, ConfigError | RelocationError):
        return 400, failure(str(error), "invalid_request_error")
    if isinstance(error, BusyError):
        return 429, failure(str(error), "rate_limit_error", "busy")
    name = uuid.uuid4().hex[:12]
    _log.error("error %s", name, exc_info=error)
    if isinstance(error, StoreFullError):
        says = f"no room is left for KV; what was encoded before is kept (error {name} in the log)"
        return 507, failure(says, "server_error", "store_full")
    return 500, failure(f"the server failed (error {name} in its log)", "server_error")


def response_to(error: BaseException) -> JSONResponse:
    """The whole response for an error."""
    status, content = described(error)
    headers = dict(getattr(error, "headers", None) or {})
    return JSONResponse(content, status, _AGAIN.get(status, {}) | headers)


def handle_errors(app: FastAPI) -> None:
    """Let all errors that come out of paths be described so."""

    @app.exception_handler(HTTPException)
    @app.exception_handler(CachedRAGError)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return response_to(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [f"{_where(e['loc'])}{e['msg']}" for e in error.errors()[:3]]
        return JSONResponse(failure("; ".join(found), "invalid_request_error"), 400)


def _where(place: tuple[Any, ...]) -> str:
    parts = [str(part) for part in place if part != "body"]
    names = [part.encode(errors="backslashreplace").decode()[:_NAME] for part in parts]
    return f"{'.'.join(names)}: " if names else ""
