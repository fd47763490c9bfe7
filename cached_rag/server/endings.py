"""Sees to it that every request has an end, and counts it. Knows HTTP; knows no path."""

from __future__ import annotations

import asyncio
import json

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cached_rag.server.failures import CUT_OFF, response_to
from cached_rag.server.metrics import Metrics


class Endings:
    """Counts responses by path and status; ends those that break, or are cut off."""

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
        except asyncio.CancelledError:  # the server stops, and has waited long enough
            if not is_begun:
                response = JSONResponse(CUT_OFF, 503, {"Retry-After": "5", "Connection": "close"})
                await response(scope, receive, watched)
            elif not is_over:  # only streams are begun before they are complete
                end = event(json.dumps(CUT_OFF)).encode()
                await watched({"type": "http.response.body", "body": end, "more_body": False})


def event(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"
