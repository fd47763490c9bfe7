"""What a request leaves for those after it: its modules' KV, and work on what it missed.

Knows when a request is over; knows no prompt text and no method's meaning.
"""

from __future__ import annotations

import threading
from functools import partial

import torch

from cached_rag.assemble import KVBuffer
from cached_rag.config import StoreConfig
from cached_rag.encoder import Encoder
from cached_rag.kv import ModuleKV
from cached_rag.library import Library
from cached_rag.plan import Missed, Plan
from cached_rag.prompt import Tokens
from cached_rag.sequences import EXACT, SequenceTree
from cached_rag.write_back import Activity, WriteBack


class Leftovers:
    """Keeps sequences, and encodes and promotes in the background."""

    def __init__(
        self, library: Library, encoder: Encoder, settings: StoreConfig, lock: threading.Lock
    ) -> None:
        self.sequences = SequenceTree(settings.sequence_bytes)
        self.activity = Activity()
        self.write_back = WriteBack(self.activity) if settings.write_back else None
        self.library = library
        self._encoder = encoder
        self._lock = lock

    def close(self) -> None:
        """Finish what runs in the background, drop what waits."""
        if self.write_back is not None:
            self.write_back.close()

    def seen(self, kind: str, tokens: Tokens, plan: Plan) -> list[ModuleKV]:
        """KV of the longest beginning that an earlier prompt shared."""
        ends = [end for _, end in plan.modules]
        found = [self.sequences.find(name, tokens.ids, ends) for name in (EXACT, kind)]
        return max(found, key=len)

    def remember(self, kind: str, tokens: Tokens, plan: Plan, buffer: KVBuffer) -> None:
        """When an answer is complete: keep its modules' KV, and see to those it missed."""
        names, ends = [name for name, _ in plan.modules], [end for _, end in plan.modules]
        with self._lock:
            self.sequences.add(kind, tokens.ids, ends, names, buffer)
        if self.write_back is None:
            return
        for missed in plan.missed:
            name = (missed.module.text_digest, missed.behind)
            self.write_back.offer(name, partial(self._recover, missed))
        for place in plan.placements:
            if place.source is not None and not isinstance(place.kv, ModuleKV):
                self.write_back.offer(place.source, partial(self.library.fetch, *place.source))

    def _recover(self, missed: Missed) -> None:
        with self._lock, torch.inference_mode():
            self._encoder.recover(missed.module, missed.text, missed.behind)
