"""Decides by a request's head alone whether it is let in; then reads its body, within bounds.

Knows HTTP, keys and bounds; knows no path, but for those that need no key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cached_rag.errors import BusyError, CachedRAGError, ConfigError
from cached_rag.server.endings import STOPPING, response_to

# Paths that need no key and no body.
_OPEN_PATHS = ("/health",)
# Most bytes of the bodies of all requests that are being sent or answered, as a multiple of the
# largest body that one request may have.
MAX_BODIES = 16
# How long a refused client may go on sending; what it sends is thrown away. Were the connection
# closed at once, the client would see it break, and not the response.
_LINGER_SECONDS = 2.0
_TOO_LARGE = "the requests that are being sent or answered are too large; ask again later"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class Keys:
    """API keys, "KEY" or "TENANT:KEY" each; without any, everybody may ask."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """Read keys as the command line has them.

        Raises:
            ConfigError: no key or tenant where one should be, a colon or white space in one, or a
                key that two have.
        """
        self._tenants: list[tuple[bytes, str]] = []
        for entry in keys:
            *tenants, key = entry.split(":")
            if len(tenants) > 1 or "" in (*tenants, key) or any(map(str.isspace, entry)):
                raise ConfigError(
                    "an API key is given as KEY or TENANT:KEY, neither of them empty nor with a "
                    "colon or white space; of $TENANT:$KEY, see that both variables are set"
                )
            self._tenants.append((_digest(key), "".join(tenants)))
        if len(dict(self._tenants)) < len(set(self._tenants)):
            raise ConfigError("two tenants have the same API key; give each one of its own")

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant whose key an Authorization header has, None if it is no key of anybody.

        It takes the same time for every key, so that time tells nothing about the keys.
        """
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given, found = _digest(key.strip()), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, given):
                found = tenant
        return found if scheme.lower() == "bearer" else None


class Gate:
    """Middleware that lets in requests with a right host and key, once their bodies are read.

    The tenant whose key it was is in `request.state.tenant`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Collection[str] | None,
        max_body_bytes: int,
        max_requests: int,
    ) -> None:
        """Args as `create_app`."""
        self._app, self._keys = app, keys
        self._hosts = None if hosts is None else {host.lower().strip("[]") for host in hosts}
        self._max_bytes, self._max_requests = max_body_bytes, max_requests
        self._num_open = self._held_bytes = 0
        self._reading: dict[_Sent, asyncio.Task[object] | None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As any ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, sent = Headers(scope=scope), _Sent(receive)
        try:
            _check_framing(headers, scope["http_version"])
            self._check_host(headers)
            if scope["path"] in _OPEN_PATHS:
                await self._app(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = self._tenant(headers)
            if scope["app"].state.is_stopping:
                raise HTTPException(503, STOPPING)
            if await self._read(sent, receive, headers):
                with self._room():
                    await self._app(scope, sent.receive, send)
        except (HTTPException, CachedRAGError) as error:
            await _refuse(error, scope, receive, send)
        except asyncio.CancelledError:
            if not sent.is_evicted:
                raise
            await _refuse(BusyError(_TOO_LARGE), scope, receive, send)
        finally:
            self._free(sent)

    def _check_host(self, headers: Headers) -> None:
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            raise HTTPException(421, "this server has another name; see --allowed-host")

    def _tenant(self, headers: Headers) -> str:
        tenant = self._keys.tenant(headers.get("authorization"))
        if tenant is None:
            raise HTTPException(401, "wrong or missing API key", {"WWW-Authenticate": "Bearer"})
        return tenant

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Room for one more request to be answered; those that are still being sent take none."""
        if self._num_open >= self._max_requests:
            raise BusyError(f"{self._num_open} requests are being answered; ask again later")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def _read(self, sent: _Sent, receive: Receive, headers: Headers) -> bool:
        """Read the body; returns whether the client stayed until all of it had come.

        Raises:
            HTTPException: it is too large, by its Content-Length or by what has come.
            BusyError: together with the bodies of other requests it is too large.
        """
        declared = headers.get("content-length", "0")
        self._check_size(int(declared) if declared.isdecimal() else 0)
        self._reading[sent] = asyncio.current_task()
        try:
            more_comes = True
            while more_comes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                piece, more_comes = message.get("body", b""), message.get("more_body", False)
                sent.body += piece
                self._held_bytes += len(piece)
                self._check_size(len(sent.body))
                self._make_room(sent)
            return True
        finally:
            del self._reading[sent]

    def _make_room(self, sent: _Sent) -> None:
        """While there is too much, give up the body that has been coming for longest.

        So clients who send slowly cannot keep others out.
        """
        while self._held_bytes > MAX_BODIES * self._max_bytes:
            oldest = next(one for one in self._reading if not one.is_evicted)
            if oldest is sent:
                raise BusyError(_TOO_LARGE)
            oldest.is_evicted = True
            self._free(oldest)
            if task := self._reading[oldest]:
                task.cancel()

    def _free(self, sent: _Sent) -> None:
        self._held_bytes -= len(sent.body)
        sent.body = bytearray()

    def _check_size(self, count: int) -> None:
        if count > self._max_bytes:
            raise HTTPException(413, f"the request's body exceeds {self._max_bytes} bytes")


class _Sent:
    """A request's body: read piece by piece by the gate, then handed to the application whole.

    Attributes:
        body: what has come so far.
        is_evicted: whether the gate gave it up to make room.
    """

    def __init__(self, receive: Receive) -> None:
        self.body, self.is_evicted = bytearray(), False
        self._receive, self._is_handed_over = receive, False

    async def receive(self) -> Message:
        """ASGI's `receive` for the application: first the whole body, then what comes after it."""
        if self._is_handed_over:
            return await self._receive()
        self._is_handed_over = True
        return {"type": "http.request", "body": bytes(self.body), "more_body": False}


def _check_framing(headers: Headers, version: str) -> None:
    """Refuse a body whose end a proxy before this server may see elsewhere (request smuggling).

    All else that is unclear of it, h11 refuses.
    """
    lengths = {"content-length", "transfer-encoding"} & set(headers.keys())
    if len(lengths) > 1 or ("transfer-encoding" in lengths and version == "1.0"):
        raise HTTPException(
            400,
            "a request's body is sent with Content-Length, or with Transfer-Encoding in HTTP/1.1; "
            "not with both",
        )


async def _refuse(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    refusal = response_to(error)
    refusal.headers["Connection"] = "close"

    async def lingering(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_throw_away(receive), _LINGER_SECONDS)
            message = {"type": "http.response.body"}
        await send(message)

    await refusal(scope, receive, lingering)


async def _throw_away(receive: Receive) -> None:
    while (await receive()).get("more_body"):
        pass


def _name(host: str) -> str | None:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
