"""How requests end: every one gets a response, errors in OpenAI's form, and is counted.

A client is told what it did wrong. Other errors go to the log, under an id that the client is
told, for their messages may have paths of this machine in them. Counts are Prometheus'; they know
reports, and no request's content. Knows HTTP; knows no path.
"""

import asyncio
import json
import logging
import math
import re
import uuid
from functools import partial
from itertools import groupby
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cached_rag import errors
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.server.forms import REFUSED, Json, failure

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
    "extra_forbidden": "there is no such field",
}
# The same of the framework's.
_MEANS = {
    "Not Found": "nothing is at this path; clients ask /v1/chat/completions, and /docs lists all "
    "paths",
    "Method Not Allowed": "this path takes another method; /docs lists all paths with theirs",
    "There was an error parsing the body": "the body cannot be read; send JSON in UTF-8, neither "
    "compressed nor deeply nested",
}
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STOPPING = "the server is stopping; ask again later, or another one"
_CUT_OFF = failure(STOPPING, "server_error", "stopping")


class NoSuchModelError(HTTPException):
    """A request names a model that is not here, or not for it."""

    def __init__(self, says: str) -> None:
        """Args: what the client is told."""
        super().__init__(404, says)


def described(error: BaseException) -> tuple[int, Json]:
    """Status and body of the response to an error; what the client did not cause is logged."""
    if isinstance(error, RequestValidationError | ValidationError):
        told = [_told(one) for one in error.errors()[:3]]
        says = "; ".join(dict.fromkeys(sentence for sentence, _ in told))
        return 400, failure(says, "invalid_request_error", param=told[0][1])
    if isinstance(error, NoSuchModelError):
        code = "model_not_found"
        return 404, failure(str(error.detail), "invalid_request_error", code, "model")
    if isinstance(error, HTTPException):
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        says = _MEANS.get(str(error.detail), str(error.detail))
        return error.status_code, failure(says, kind, _CODES.get(error.status_code))
    if isinstance(error, errors.ContextOverflowError):
        return 400, failure(str(error), "invalid_request_error", "context_length_exceeded")
    if isinstance(error, errors.ConfigError | errors.RelocationError):
        return 400, failure(str(error), "invalid_request_error")
    if isinstance(error, errors.BusyError):
        return 429, failure(str(error), "rate_limit_error", "busy")
    if isinstance(error, errors.MissingPackageError):
        return 501, failure(str(error), "server_error", "not_installed")
    name = uuid.uuid4().hex[:12]
    _log.error("error %s", name, exc_info=error)
    if isinstance(error, errors.StoreFullError):
        says = f"no room is left for KV; what was encoded before is kept (error {name} in the log)"
        return 507, failure(says, "server_error", "store_full")
    return 500, failure(f"the server failed (error {name} in its log)", "server_error")


def response_to(error: BaseException) -> JSONResponse:
    """The whole response to an error."""
    status, content = described(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, errors.BusyError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return JSONResponse(content, status, _AGAIN.get(status, {}) | headers)


async def failed(_: Request, error: Exception) -> JSONResponse:
    """The same, as a handler of an application's errors."""
    return response_to(error)


def _told(error: Any) -> tuple[str, str | None]:
    """What one of pydantic's errors says, and the field that it is about; None for the body."""
    kind, place = error["type"], list(error["loc"])
    if kind == "missing" and place == ["body"]:
        kind = "model_attributes_type"
    if kind == "json_invalid":
        return f"{_SAYS[kind]} (at character {place[-1]}: {error['ctx']['error']})", None
    made_up = [place.pop()] if kind == "extra_forbidden" else []  # by the client
    if kind == REFUSED:
        made_up = [error["ctx"]["field"]]
    ours = [part for part in place if part != "body" and not _BRANCH.fullmatch(str(part))]
    names = [str(part).encode(errors="backslashreplace") for part in (*ours, *made_up)]
    where = ".".join(name.decode()[:_NAME] for name in names)
    says: str = _SAYS.get(kind, error["msg"].removeprefix(_OURS))
    return f"{where}: {says}" if where else says, where or None


class Metrics:
    """What one server has done, and what it holds now."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        times = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._requests = counter("cached_rag_requests", "Requests answered.", ["path", "status"])
        self._tokens = counter(
            "cached_rag_tokens",
            "Tokens: of prompts, cached, recomputed; of answers, drafted, accepted.",
            ["kind"],
        )
        self._modules = counter("cached_rag_modules", "Known texts in prompts.", ["found"])
        self._first = times(
            "cached_rag_time_to_first_token_seconds",
            "From arrival to the first token, by method.",
            ["method"],
        )
        self._whole = times("cached_rag_answer_seconds", "From arrival to the end.")
        scheduler, library, kept = engine.scheduler, engine.library, engine.sequences
        for name, what, value in (
            ("running", "Answers being made.", lambda: scheduler.num_running),
            ("waiting", "Requests that wait.", lambda: scheduler.num_waiting),
            ("kv_bytes", "KV of running answers.", lambda: scheduler.nbytes),
            ("recent_bytes", "KV of finished ones.", lambda: kept.nbytes),
            ("store_memory_bytes", "KV of texts in memory.", library.shelf.memory_bytes),
            ("store_bytes", "KV of texts kept.", library.shelf.store_bytes),
        ):
            gauge(f"cached_rag_{name}", what).set_function(value)
        self._audits = engine.audits
        self._audit = gauge(
            "cached_rag_audit",
            "The last audits: number, mean divergence from full prefill (nats), agreement.",
            ["method", "figure"],
        )

    def responded(self, path: str, status: int) -> None:
        """Count a response, when it begins."""
        self._requests.labels(path, str(status)).inc()

    def answered(self, report: Report, *, is_whole: bool) -> None:
        """Count an answer, when it is complete or given up.

        Args:
            is_whole: it neither failed nor was given up, so that its time is that of an answer.
        """
        counts = {
            "prompt": report.prompt_tokens,
            "cached": report.cached_tokens,
            "recomputed": report.recomputed_tokens,
            "answer": report.output_tokens,
            "drafted": report.drafted_tokens,
            "accepted": report.accepted_tokens,
        }
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
        self._modules.labels("hit").inc(report.modules_hit)
        self._modules.labels("missed").inc(report.modules_missed)
        if report.output_tokens and report.ttft_ms:
            self._first.labels(_root(report.method)).observe(report.ttft_ms / 1000)
        if report.output_tokens and is_whole:
            self._whole.observe(report.total_ms / 1000)

    def text(self) -> bytes:
        """All counts in Prometheus' format."""
        found = sorted(self._audits.found().items(), key=lambda one: _root(one[0]))
        for root, alike in groupby(found, key=lambda one: _root(one[0])):
            audits = [audit for _, audit in alike]
            count = sum(audit.count for audit in audits)
            self._audit.labels(root, "count").set(count)
            for figure in ("kl", "agreement"):
                total = sum(audit.count * getattr(audit, figure) for audit in audits)
                self._audit.labels(root, figure).set(total / count)
        return generate_latest(self._registry)


def _root(method: str) -> str:
    """A method without the options that clients may give: each text would make another label."""
    return re.split(r"[:+(]", method)[0]


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
