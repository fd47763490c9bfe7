"""Runs the server until it is told to stop; then finishes what runs, or says what it could not.

Knows uvicorn.
"""

from __future__ import annotations

import logging
from types import FrameType

import uvicorn
from fastapi import FastAPI

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Refuses new work from the first signal on, while what runs goes on."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        app = self.config.app
        assert isinstance(app, FastAPI)
        app.state.is_stopping = True
        count = app.state.service.num_open
        if count:
            _log.warning("stopping; %d requests are finished first", count)
        super().handle_exit(sig, frame)


def run(app: FastAPI, host: str, port: int, drain_seconds: int) -> None:
    """Serve until SIGINT or SIGTERM; what takes longer than `drain_seconds` then is cut off."""
    config = uvicorn.Config(
        app, host, port, timeout_graceful_shutdown=drain_seconds, log_level="warning"
    )
    _Server(config).run()
