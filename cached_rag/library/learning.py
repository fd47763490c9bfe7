"""Work that a request leaves for the background: what it missed is encoded, what recurs is learned.

Knows tokens and plans; knows no prompt text and no method.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.tokenizer import Tokens
from cached_rag.config import StoreConfig
from cached_rag.kv.module import ModuleKV
from cached_rag.library.background import Activity, WriteBack
from cached_rag.library.context import PRIMER
from cached_rag.library.encoder import Encoder
from cached_rag.library.library import Library
from cached_rag.library.matching import EncodedAfter
from cached_rag.library.plan import Plan, is_before
from cached_rag.library.prompt_heads import Heads


class Learning:
    """Encodes what requests missed, and brings what they read from disk into memory."""

    def __init__(
        self,
        library: Library,
        encoder: Encoder,
        settings: StoreConfig,
        lock: threading.Lock,
        activity: Activity,
    ) -> None:
        self.write_back = (
            WriteBack(activity, finish_seconds=settings.finish_seconds)
            if settings.write_back
            else None
        )
        self.library = library
        learns = settings.learn_prefixes and settings.write_back
        self.heads = Heads() if learns else None
        self._sink_ids = encoder.tokenization.sink_ids
        self._encoder = encoder
        self._lock = lock

    def close(self, finish_seconds: float | None = None) -> None:
        """Finish what runs in the background, and what waits; see `StoreConfig.finish_seconds`."""
        if self.write_back is not None:
            self.write_back.close(finish_seconds)

    def forgotten(self, plan: Plan) -> list[str]:
        """Modules of a prompt that are none any more."""
        names = [name for name, _ in plan.chunks]
        return [name for name in names if self.library.table.by_digest(name) is None]

    def see_to(self, tokens: Tokens, plan: Plan) -> None:
        """Encode in the background what a prompt missed, and bring what it read into memory."""
        if self.write_back is None:
            return
        self._offer_modules(tokens, plan)
        for place in plan.placements:
            if place.source is not None and not isinstance(place.kv, ModuleKV):
                fetch = partial(self.library.fetch, *place.source)
                self.write_back.offer(place.source, fetch, lasts=False)

    def _offer_modules(self, tokens: Tokens, plan: Plan) -> None:
        """Encode what had no KV, and the prompt's head if it has recurred."""
        if not plan.matches:
            return
        first = plan.matches[0]
        head = tuple(tokens.ids[: first.first])
        best = self._best(head, first.chunk.text_digest)
        if best not in self.library.encoded_after() and len(best.prefix_ids) > len(self._sink_ids):
            self._offer_encoding(best, partial(self._encoder.learn, best))
        for missed in plan.missed:
            name = (missed.chunk.text_digest, best)
            recover = partial(self._encoder.recover, missed.chunk, missed.text, best)
            self._offer_encoding(name, recover)

    def _offer_encoding(self, name: object, task: Callable[[], object]) -> None:
        assert self.write_back is not None
        is_kept = self.library.disk is not None
        self.write_back.offer(name, partial(self._encode, task), lasts=is_kept)

    def _best(self, head: tuple[int, ...], module: str) -> EncodedAfter:
        """What a module that stood behind `head` is encoded behind: the head, if that recurs."""
        known = [b for b in self.library.encoded_after() if is_before(b.prefix_ids, head)]
        is_long = len(head) > len(self._sink_ids)
        is_new = not any(is_before(head, behind.prefix_ids) for behind in known)
        if self.heads is not None and is_long and is_new and self.heads.learn(head, module):
            return EncodedAfter(head, PRIMER.name)
        return known[0] if known else EncodedAfter(self._sink_ids, PRIMER.name)

    def _encode(self, task: Callable[[], object]) -> None:
        def encode() -> None:
            with self._lock, torch.inference_mode():
                task()

        on_model_thread(encode)
