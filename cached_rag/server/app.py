"""The server's HTTP: paths, keys, limits, errors as OpenAI has them. Knows no model."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cached_rag import __version__
from cached_rag.errors import BusyError, CachedRAGError, ConfigError, ContextOverflowError
from cached_rag.server.answers import failure
from cached_rag.server.metrics import Metrics
from cached_rag.server.protocol import ChatRequest, CompletionRequest, DocumentsRequest
from cached_rag.server.service import Asked, Service
from cached_rag.server.tenants import Keys

# How often a client that waits for a whole response is looked for.
_LOOK_SECONDS = 0.25
_OPEN_PATHS = ("/health",)
_log = logging.getLogger(__name__)
_BROKEN = failure("the server failed; its log says more", "server_error")
_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class BodyLimit:
    """Refuses requests whose body exceeds a bound, whatever they say of its length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max = app, max_bytes
        self._says = f"the request's body exceeds {max_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As any ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise HTTPException(413, self._says)
            return message

        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max:
            response = JSONResponse(failure(self._says, "invalid_request_error"), 413)
            await response(scope, receive, send)
            return
        await self._app(scope, counting, send)


class Counting:
    """Counts responses by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As any ASGI application."""
        is_begun = False

        async def counting(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                path = getattr(scope.get("route"), "path", "unknown")
                self._metrics.responded(path, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:
            if scope["type"] != "http" or is_begun:
                raise
            _log.exception("a request failed")
            await JSONResponse(_BROKEN, 500)(scope, receive, counting)


def create_app(
    service: Service,
    keys: Keys | None = None,
    max_body_bytes: int = 16 << 20,
    at_end: Callable[[], object] = lambda: None,
) -> FastAPI:
    """The server for one service; `app.state.is_stopping` makes it refuse new work.

    Args:
        at_end: called when it has stopped; signals may end the process right after.
    """
    known = keys or Keys()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()
        at_end()

    app = FastAPI(
        title="Cached RAG", version=__version__, lifespan=lifespan, dependencies=[Depends(_allow)]
    )
    app.state.service, app.state.keys, app.state.is_stopping = service, known, False
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(Counting, metrics=service.metrics)
    _handle_errors(app)
    _add_answers(app, service)
    _add_documents(app, service)
    _add_status(app, service)
    return app


async def _allow(request: Request) -> str:
    """The tenant that asks.

    Raises:
        HTTPException: nobody's key, or the server is stopping.
    """
    state = request.app.state
    if request.url.path in _OPEN_PATHS:
        return ""
    tenant: str | None = state.keys.tenant(request.headers.get("authorization"))
    if tenant is None:
        raise HTTPException(401, "wrong or missing API key", {"WWW-Authenticate": "Bearer"})
    if state.is_stopping:
        raise HTTPException(503, "the server is stopping", {"Retry-After": "5"})
    return tenant


Tenant = Annotated[str, Depends(_allow)]


def _add_answers(app: FastAPI, service: Service) -> None:
    async def answer(
        request: Request, asked_for: ChatRequest | CompletionRequest, tenant: str
    ) -> Response:
        _check_model(service, asked_for.model)
        asked = await asyncio.to_thread(service.ask, asked_for, tenant)
        if asked_for.stream:
            return await _streamed(request, service, asked)
        return JSONResponse(await _while_waited_for(request, service.answer(asked)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest, tenant: Tenant) -> Response:
        """OpenAI's chat completions."""
        return await answer(request, body, tenant)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest, tenant: Tenant) -> Response:
        """OpenAI's completions."""
        return await answer(request, body, tenant)


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        raise HTTPException(404, f"no model {name!r} here; it is {service.name!r}")


async def _streamed(request: Request, service: Service, asked: Asked) -> Response:
    """Server-sent events. The first is waited for, so that what fails at once has its status."""
    chunks = service.chunks(asked)

    async def begin() -> dict[str, Any]:
        return await anext(chunks)

    try:
        first = await _while_waited_for(request, begin())
    except BaseException:
        service.finish(asked)
        raise

    async def events() -> AsyncIterator[str]:
        try:
            yield _event(json.dumps(first))
            async for chunk in chunks:
                yield _event(json.dumps(chunk))
            yield _event("[DONE]")
        except CachedRAGError as error:
            yield _event(json.dumps(_described(error)[1]))
        except Exception:
            _log.exception("an answer failed")
            yield _event(json.dumps(_BROKEN))
        finally:
            service.finish(asked)

    return StreamingResponse(events(), media_type="text/event-stream", headers=_UNBUFFERED)


def _event(data: str) -> str:
    return f"data: {data}\n\n"


async def _while_waited_for(request: Request, answer: Awaitable[Any]) -> Any:
    """The answer, unless the client leaves before."""
    task = asyncio.ensure_future(answer)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_SECONDS)
            if not task.done() and await request.is_disconnected():
                raise HTTPException(499, "the client has left")
        return task.result()
    finally:
        task.cancel()


def _add_documents(app: FastAPI, service: Service) -> None:
    @app.post("/v1/documents")
    async def encode(body: DocumentsRequest, tenant: Tenant) -> dict[str, Any]:
        """Prefill texts as they will stand in prompts."""
        return await service.encode(body, tenant)

    @app.delete("/v1/documents")
    async def forget(body: DocumentsRequest, tenant: Tenant) -> dict[str, Any]:
        """Drop texts and their KV."""
        return await asyncio.to_thread(service.forget, body, tenant)


def _add_status(app: FastAPI, service: Service) -> None:
    only = {"id": service.name, "object": "model", "created": 0, "owned_by": "cached-rag"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [only]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The one model, by name."""
        _check_model(service, name)
        return only

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Whether it takes requests."""
        stopping = request.app.state.is_stopping
        scheduler = service.engine.scheduler
        found = {
            "status": "stopping" if stopping else "ok",
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
        }
        return JSONResponse(found, 503 if stopping else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counts for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        codes = {401: "invalid_api_key", 404: "not_found"}
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        content = failure(str(error.detail), kind, codes.get(error.status_code))
        return JSONResponse(content, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [f"{_where(e['loc'])}{e['msg']}" for e in error.errors()[:3]]
        return JSONResponse(failure("; ".join(found), "invalid_request_error"), 400)

    @app.exception_handler(CachedRAGError)
    async def failed(_: Request, error: CachedRAGError) -> JSONResponse:
        status, content = _described(error)
        return JSONResponse(content, status, {"Retry-After": "1"} if status == 429 else None)


def _described(error: CachedRAGError) -> tuple[int, dict[str, Any]]:
    """Status and body for an error of this library."""
    if isinstance(error, ContextOverflowError):
        code = "context_length_exceeded"
        return 400, failure(str(error), "invalid_request_error", code)
    if isinstance(error, ConfigError):
        return 400, failure(str(error), "invalid_request_error")
    if isinstance(error, BusyError):
        return 429, failure(str(error), "rate_limit_error", "busy")
    return 500, failure(str(error), "server_error")


def _where(place: tuple[Any, ...]) -> str:
    names = [str(part) for part in place if part != "body"]
    return f"{'.'.join(names)}: " if names else ""
