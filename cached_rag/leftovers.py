"""What a request leaves for those after it: its modules' KV, and work on what it missed.

Knows when a request is over; knows no prompt text and no method's meaning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import torch

from cached_rag.assemble import KVBuffer
from cached_rag.config import StoreConfig
from cached_rag.context import PRIMER
from cached_rag.encoder import Encoder
from cached_rag.heads import Heads
from cached_rag.kv import ModuleKV
from cached_rag.library import Behind, Library
from cached_rag.model_thread import on_model_thread
from cached_rag.plan import Found, Plan, is_before
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
        learns = settings.learn_prefixes and settings.write_back
        self.heads = Heads() if learns else None
        self._sink_ids = encoder.tokenization.sink_ids
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
        for found, behind in self._wanted(tokens, plan):
            name = (found.module.text_digest, behind)
            self.write_back.offer(name, partial(self._recover, found, behind))
        for place in plan.placements:
            if place.source is not None and not isinstance(place.kv, ModuleKV):
                self.write_back.offer(place.source, partial(self.library.fetch, *place.source))

    def _wanted(self, tokens: Tokens, plan: Plan) -> Iterator[tuple[Found, Behind]]:
        """Modules to encode, and behind what: those that have no KV, or a worse one."""
        if not plan.found:
            return
        first = plan.found[0]
        head = tuple(tokens.ids[: first.begin])
        is_long = len(head) > len(self._sink_ids)
        name = first.module.text_digest
        learned = self.heads is not None and is_long and self.heads.learn(head, name)
        best = self._best(head, learned)
        for found in plan.found:
            is_worse = found.behind is not None and not _reaches(found.behind, head)
            if found.behind is None or (learned and is_worse):
                yield found, best

    def _best(self, head: tuple[int, ...], learned: bool) -> Behind:
        """What a module in a prompt that begins with `head` is best encoded behind."""
        known = [b for b in self.library.behinds() if is_before(b.prefix_ids, head)]
        if learned and not any(_reaches(behind, head) for behind in known):
            return Behind(head, PRIMER.name)
        return known[0] if known else Behind(self._sink_ids, PRIMER.name)

    def _recover(self, found: Found, behind: Behind) -> None:
        def recover() -> None:
            with self._lock, torch.inference_mode():
                self._encoder.recover(found.module, found.text, behind)

        on_model_thread(recover)


def _reaches(behind: Behind, head: tuple[int, ...]) -> bool:
    """Whether a prefix is all of a prompt's head, but for tokens that merged."""
    return is_before(head, behind.prefix_ids)
