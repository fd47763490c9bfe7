"""Cached KV on its way into a prompt's buffer while the first layers are computed already.

CacheBlend, section 5.1: while layer i is fused, layer i + 1 is loaded. On a CPU one thread reads,
checks and moves layer after layer; on CUDA copies run on a stream of their own. Knows placements;
knows neither stores nor methods.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.module import LayerSource
from cached_rag.kv.positions import PositionRule


class Placed(Protocol):
    """A source and the position it goes to."""

    @property
    def begin(self) -> int:
        """Position of its first token."""
        ...

    @property
    def kv(self) -> LayerSource:
        """What goes there."""
        ...


class LayerLoader:
    """Fills a buffer layer by layer; `wait` is called before a layer's keys are used.

    Attributes:
        failed: the placement that could not be loaded.
    """

    def __init__(self, buffer: KVBuffer, placements: Sequence[Placed], rule: PositionRule) -> None:
        self._buffer, self._placements, self._rule = buffer, tuple(placements), rule
        self._ready = [threading.Event() for _ in range(len(buffer.keys))]
        self._copied: list[Any] = []
        self._error: BaseException | None = None
        self.failed: Placed | None = None
        self._is_cancelled = False
        device = buffer.keys.device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Whoever had the buffer before may still be reading it.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def wait(self, layer: int) -> None:
        """Return once a layer is complete.

        Raises:
            CorruptBlobError: a module's file is damaged.
        """
        self._ready[layer].wait()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._copied[layer])

    def finish(self) -> None:
        """Stop loading, if something went wrong in between; nothing writes the buffer after it."""
        self._is_cancelled = True
        self._thread.join()

    def _run(self) -> None:
        try:
            for layer, ready in enumerate(self._ready):
                if self._is_cancelled:
                    return
                self._load(layer)
                ready.set()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            for ready in self._ready:
                ready.set()

    @torch.inference_mode()
    def _load(self, layer: int) -> None:
        if self._stream is None:
            self._place(layer)
            return
        with torch.cuda.stream(self._stream):
            self._place(layer)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
            self._copied.append(copied)

    def _place(self, layer: int) -> None:
        for place in self._placements:
            self.failed = place
            self._buffer.place_layer(place.kv, place.begin, self._rule, layer)
        self.failed = None
