"""Runs the server until it is told to stop; then finishes what runs, or says what it could not.

Knows uvicorn.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from cached_rag.errors import ConfigError

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Refuses new work from the first signal on, while what runs goes on."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object] = lambda: None) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn; whoever connects is heard when it returns.

        Raises:
            ConfigError: another program was bound to the address, too, and was first to listen.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            assert sockets
            host, port, *_ = sockets[0].getsockname()
            raise _refused(host, port, error) from error
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        app = self.config.app
        assert isinstance(app, FastAPI)
        app.state.is_stopping = True
        count = app.state.service.num_open
        if count:
            _log.warning("stopping; %d requests are finished first", count)
        super().handle_exit(sig, frame)


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, on which nobody is heard yet; port 0 takes any that is free.

    Raises:
        ConfigError: the address is in use, or none of this machine's.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":  # elsewhere it would share a port that is in use
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise _refused(host, port, error) from error
    return bound


def run(
    app: FastAPI, bound: socket.socket, drain_seconds: int, ready: Callable[[], object]
) -> None:
    """Serve until SIGINT or SIGTERM; what takes longer than `drain_seconds` then is cut off.

    Args:
        bound: from `bind`.
        ready: called when requests are taken.

    Raises:
        ConfigError: the address was taken since.
    """
    config = uvicorn.Config(app, timeout_graceful_shutdown=drain_seconds, log_level="warning")
    _Server(config, ready).run(sockets=[bound])


def _refused(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot listen at {host}, port {port}: {error}; stop what uses it, or choose another "
        "--port or --host (--port 0 takes any that is free)"
    )
