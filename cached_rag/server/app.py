"""The server's paths. `gate` decides who may ask, `endings` answers errors. Knows no model."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from cached_rag import __version__
from cached_rag.errors import CachedRAGError
from cached_rag.server import ServerConfig
from cached_rag.server.endings import Endings, NoSuchModelError, described, event, failed
from cached_rag.server.forms import Json
from cached_rag.server.gate import LOCAL_HOSTS, Gate, Keys
from cached_rag.server.index import ServedIndex
from cached_rag.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DocumentsRequest,
    EmbeddingsRequest,
)
from cached_rag.server.responses import Reply, ResponsesRequest
from cached_rag.server.service import Asked, Service
from cached_rag.server.tenants import Documents

# How often to look whether a client that waits for a whole response is still there.
_LOOK_SECONDS = 0.25
_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def create_app(
    service: Service,
    config: ServerConfig = ServerConfig(),  # noqa: B008
    at_end: Callable[[], object] = lambda: None,
    max_requests: int = 750,
) -> FastAPI:
    """The server for one service; while `app.state.is_stopping`, it refuses new requests.

    Args:
        at_end: called when it has stopped; signals may end the process right after.
        max_requests: most requests that are being answered.

    Raises:
        ConfigError: the settings' keys are none.
    """
    keys, named = Keys(config.api_key), config.allowed_host
    # Without this, a web page could reach a server on its reader's machine by a name of its own.
    hosts = (*LOCAL_HOSTS, config.host, *named) if config.is_local or named else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()
        if app.state.is_hurried:
            service.engine.close(finish_seconds=0)
        at_end()

    app = FastAPI(title="Cached RAG", version=__version__, lifespan=lifespan)
    app.state.service, app.state.is_stopping = service, False
    app.state.is_hurried = False  # by a second signal: what waits to be encoded is dropped
    app.add_middleware(
        Gate,
        keys=keys,
        hosts=hosts,
        max_body_bytes=config.max_body_bytes,
        max_requests=max_requests,
    )
    app.add_middleware(Endings, metrics=service.metrics)  # outside of the gate
    if config.cors_origin:  # outermost: a browser asks without a key whether it may ask
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,  # a browser asks so before a public page reaches into it
        )
    for kind in (HTTPException, RequestValidationError, ValidationError, CachedRAGError):
        app.add_exception_handler(kind, failed)
    _add_answers(app, service)
    _add_documents(app, Documents(service.tenants))
    _add_embeddings(app, service.index)
    _add_status(app, service)
    return app


async def _asking(request: Request) -> str:
    """The tenant that asks, which the gate has found by the key."""
    return str(request.state.tenant)


Tenant = Annotated[str, Depends(_asking)]


async def _without_tenant(tenant: Tenant) -> None:
    """Refuses tenants: nothing is theirs of the index, and counts are of all of them."""
    if tenant:
        raise HTTPException(403, "this is for keys of no tenant; ask with one of these")


# Makes events of an answer's chunks.
Told = Callable[[AsyncIterator[Json]], AsyncIterator[str]]


def _add_answers(app: FastAPI, service: Service) -> None:
    async def answer(
        request: Request,
        body: ChatRequest | CompletionRequest,
        tenant: str,
        told: Told = _chunks,
        whole: Callable[[Json], Json] = lambda found: found,
    ) -> Response:
        names = [service.name]
        if isinstance(body, ChatRequest):  # an index completes no text
            known = _models(service, tenant).items()
            names = [name for name, facts in known if "max_model_len" in facts]
        _check_model(body.model, names)
        asked = await asyncio.to_thread(service.ask, body, tenant)
        if body.stream:
            return await _streamed(request, service, asked, told)
        return JSONResponse(whole(await _while_waited_for(request, service.answer(asked))))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest, tenant: Tenant) -> Response:
        """OpenAI's chat completions."""
        return await answer(request, body, tenant)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest, tenant: Tenant) -> Response:
        """OpenAI's completions."""
        return await answer(request, body, tenant)

    @app.post("/v1/responses")
    async def respond(request: Request, body: ResponsesRequest, tenant: Tenant) -> Response:
        """OpenAI's responses; none is kept."""
        reply = Reply(body)
        return await answer(request, body.chat(), tenant, reply.events, reply.whole)


def _models(service: Service, tenant: str) -> dict[str, Json]:
    """The models by name, in OpenAI's form; to a tenant, nothing is the index's.

    Those that answer have their context's length, as vLLM's servers tell it.
    """
    answering = {"max_model_len": service.engine.model.context_length}
    known: dict[str, Json] = {service.name: answering}
    if service.index is not None and not tenant:
        known |= {service.index.name: answering, service.index.embedding: {}}
    facts = {"object": "model", "created": 0, "owned_by": "cached-rag"}
    return {name: {"id": name, **facts, **more} for name, more in known.items()}


def _check_model(name: str, names: Collection[str]) -> None:
    if name not in names:
        known = " or ".join(map(repr, names))
        raise NoSuchModelError(f"no model {name!r} does this here; it is {known}")


async def _chunks(chunks: AsyncIterator[Json]) -> AsyncIterator[str]:
    async for chunk in chunks:
        yield event(json.dumps(chunk))
    yield event("[DONE]")


async def _streamed(request: Request, service: Service, asked: Asked, told: Told) -> Response:
    """Server-sent events. Begins with the first one, so that an error before it has its status."""
    events = told(service.chunks(asked))
    try:
        first = await _while_waited_for(request, anext(events))
    except BaseException:
        service.finish(asked)
        raise

    async def every() -> AsyncIterator[str]:
        try:
            yield first
            async for line in events:
                yield line
        except Exception as error:
            yield event(json.dumps(described(error)[1]))
        finally:
            service.finish(asked)

    return StreamingResponse(every(), media_type="text/event-stream", headers=_UNBUFFERED)


async def _while_waited_for(request: Request, answer: Awaitable[Any]) -> Any:
    """The answer; if the client leaves before it is there, it is given up."""
    task = asyncio.ensure_future(answer)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_SECONDS)
            if not task.done() and await request.is_disconnected():
                raise HTTPException(499, "the client has left")
        return task.result()
    finally:
        task.cancel()


def _add_documents(app: FastAPI, documents: Documents) -> None:
    @app.post("/v1/documents")
    async def encode(request: Request, body: DocumentsRequest, tenant: Tenant) -> Response:
        """Prefill texts as they will stand in prompts."""
        return JSONResponse(await _while_waited_for(request, documents.encode(body, tenant)))

    @app.delete("/v1/documents")
    async def forget(body: DocumentsRequest, tenant: Tenant) -> dict[str, Any]:
        """Drop texts and their KV."""
        return await documents.forget(body, tenant)  # to its end, whether the client waits or not


def _add_embeddings(app: FastAPI, index: ServedIndex | None) -> None:
    @app.post("/v1/embeddings", dependencies=[Depends(_without_tenant)])
    async def embed(request: Request, body: EmbeddingsRequest) -> Response:
        """OpenAI's embeddings, by the index's embedding model."""
        if index is None:
            raise HTTPException(404, "no embeddings here; start the server with serve --index")
        _check_model(body.model, (index.embedding, index.name))
        return JSONResponse(await _while_waited_for(request, index.embed(body)))


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models(tenant: Tenant) -> dict[str, Any]:
        """The model; if there is an index, this under its own name, and its embedding model."""
        return {"object": "list", "data": [*_models(service, tenant).values()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, tenant: Tenant) -> dict[str, Any]:
        """A model by name."""
        known = _models(service, tenant)
        _check_model(name, known)
        return known[name]

    @app.head("/health", include_in_schema=False)  # as `wget --spider` asks
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

    @app.get("/metrics", dependencies=[Depends(_without_tenant)])
    async def metrics() -> Response:
        """Counts for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
