"""Loads cached KV into a prompt's buffer layer by layer, while earlier layers are computed.

CacheBlend, section 5.1: while layer i is computed, layer i + 1 is loaded. One thread reads, checks
and moves layer after layer; on CUDA its copies run on a stream of their own. Knows placements;
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
    """Cached KV, and where in the buffer it goes."""

    @property
    def begin(self) -> int:
        """Slot of its first token."""
        ...

    @property
    def kv(self) -> LayerSource:
        """Its keys and values."""
        ...


class LayerLoader:
    """Fills a buffer layer by layer; `wait` has to be called before a layer is used.

    Attributes:
        failed: the placement that could not be loaded; None if there is none.
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
            # Kernels of the request that had the buffer before may still read it.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def wait(self, layer: int) -> None:
        """Return when a layer is in the buffer; on CUDA, for the current stream.

        Raises:
            CorruptBlobError: a module's file is damaged.
            StoreError: a module's file cannot be read now.
        """
        self._ready[layer].wait()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._copied[layer])

    def finish(self) -> None:
        """Stop loading, complete or not; nothing writes into the buffer afterwards."""
        self._is_cancelled = True
        self._thread.join()

    def _run(self) -> None:
        try:
            for layer, ready in enumerate(self._ready):
                if self._is_cancelled:
                    return
                self._load(layer)
                ready.set()
        except BaseException as error:  # raised again by `wait`
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
