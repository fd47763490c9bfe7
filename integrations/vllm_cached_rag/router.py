"""The prefill node's server: OpenAI's protocol in, vLLM out. An application changes its base_url.

Chat completions and completions are prefilled here and decoded there. What vLLM answers, streams
among it, goes back as it comes; so do all other paths. Knows HTTP; knows no model.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_cached_rag.node import Handed, PrefillNode

_PREFILLED = ("/v1/chat/completions", "/v1/completions")
# What servers note of a request whose client has left; nobody gets it.
_LEFT = 499
# Headers that hold for one connection only, or that httpx writes itself.
_HOP = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}
_HOP |= {"keep-alive", "te", "trailer", "upgrade", "proxy-authorization", "content-encoding"}
# A long prompt takes minutes on a CPU, and more behind others. Who waits is for vLLM to say.
_TIMEOUT = httpx.Timeout(3600.0, connect=10.0)
_LIMITS = httpx.Limits(max_connections=None)


def create_app(
    node: PrefillNode,
    vllm: str,
    api_key: str | None = None,
    max_body_bytes: int = 16 << 20,
    transport: httpx.AsyncBaseTransport | None = None,
) -> FastAPI:
    """The server.

    Args:
        vllm: address of the vLLM server, without "/v1".
        api_key: that clients must have, as vLLM's `--api-key`; None to let anybody ask. It is
            passed on.
        max_body_bytes: most bytes of a request's body.
        transport: what asks vLLM; None for the network.
    """
    client = httpx.AsyncClient(base_url=vllm, timeout=_TIMEOUT, limits=_LIMITS, transport=transport)
    # Of its own: the others' threads may all wait for the model. And nobody waits for this one,
    # so that a request that is given up leaves no KV.
    cleaner = ThreadPoolExecutor(1, "forget")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.aclose()
        cleaner.shutdown()
        await asyncio.to_thread(node.close)

    app = FastAPI(title="Cached RAG for vLLM", lifespan=lifespan)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(request: Request) -> Response:
        """Whatever vLLM answers."""
        _check_key(request, api_key)
        body, told = await _read(request, max_body_bytes), ""
        with ExitStack() as over:
            if request.method == "POST" and request.url.path in _PREFILLED:
                fields = _fields(body)
                done = await asyncio.to_thread(node.prefill, fields)
                if isinstance(done, Handed):
                    over.callback(cleaner.submit, node.forget, done)
                    told = done.to_line()
                    body = json.dumps(fields | done.ticket.fields(done.token_ids)).encode()
                else:
                    told = f"prefilled by vLLM: {done}"
            return await _passed_on(client, request, body, told, over)

    return app


async def _passed_on(
    client: httpx.AsyncClient, request: Request, body: bytes, told: str, over: ExitStack
) -> Response:
    """What vLLM answers to a request, by which `over` is closed if there is an answer."""
    headers = {k: v for k, v in request.headers.items() if k not in _HOP}
    url = httpx.URL(path=request.url.path, query=request.url.query.encode() or None)
    try:
        sent = client.build_request(request.method, url, headers=headers, content=body)
        response = await _unless_left(request, client.send(sent, stream=True))
    except httpx.HTTPError as error:
        raise HTTPException(502, f"vLLM does not answer ({type(error).__name__})") from error
    if response is None:
        return Response(status_code=_LEFT)
    kept = {k: v for k, v in response.headers.items() if k not in _HOP}
    if told:  # a header is one line of Latin-1
        kept["x-cached-rag"] = " ".join(told.encode("ascii", "replace").decode().split())
    return _Relayed(response, kept, over.pop_all())


class _Relayed(StreamingResponse):
    """What vLLM answers, piece by piece; released even if the client leaves before the first."""

    def __init__(self, answer: httpx.Response, headers: dict[str, str], over: ExitStack) -> None:
        super().__init__(answer.aiter_bytes(), answer.status_code, headers)
        self._answer, self._over = answer, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over.close()
            await self._answer.aclose()


async def _unless_left(
    request: Request, sending: Coroutine[Any, Any, httpx.Response]
) -> httpx.Response | None:
    """What is sent for; None once the client has left, whose body was read before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, leaving = asyncio.create_task(sending), asyncio.create_task(left())
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()  # closes the connection, so that vLLM stops
        leaving.cancel()


def _check_key(request: Request, api_key: str | None) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
        raise HTTPException(401, "a wrong API key, or none")


async def _read(request: Request, most: int) -> bytes:
    """The body, as far as it is not too long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HTTPException(413, f"a request may have {most} bytes")
        parts.append(part)
    return b"".join(parts)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise HTTPException(400, "the body is no JSON object")
    return found
