"""From texts to modules in the library: what is missing is prefilled, the rest costs nothing.

Knows prefixes and contexts; knows no request. Not locked: the engine sees to it that the model
does one thing at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cached_rag.backends.base import Backend
from cached_rag.backends.tokenizer import Rendered, Tokenization
from cached_rag.errors import ContextOverflowError
from cached_rag.kv.module import ModuleKV
from cached_rag.kv.store import ChunkRecord
from cached_rag.library.context import PRIMER, Context
from cached_rag.library.encode import (
    EncodeSummary,
    Progress,
    check_fits,
    encode_modules,
    encode_prefix,
    join,
)
from cached_rag.library.library import Library
from cached_rag.library.matching import ANCHOR, EncodedAfter, record_of

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """Texts that are to be encoded, and behind what.

    Attributes:
        records: each text's record, with the text.
        skipped: (text, reason) of those that cannot be modules.
    """

    behind: EncodedAfter
    records: tuple[tuple[ChunkRecord, str], ...]
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Encoder:
    """Encodes texts with one model into one library.

    Attributes:
        contexts: by name, those that can be had again: the primer, and what `encode` was given.
    """

    model: Backend
    library: Library
    tokenization: Tokenization
    contexts: dict[str, Context] = field(default_factory=lambda: {PRIMER.name: PRIMER})
    _last: dict[tuple[EncodedAfter, tuple[Ids, ...]], tuple[ModuleKV | None]] = field(
        default_factory=dict
    )

    def read(self, texts: Sequence[str], prefix: Rendered | None, context: Context | None) -> Order:
        """Tokenise what is to be encoded. On any thread, for it needs no model.

        Raises:
            ContextOverflowError, StoreError: see `Engine.encode`.
        """
        if texts:
            self.library.check_kept()
        if context is not None:
            self.contexts[context.name] = context
        for text in texts:
            self._check_length(text.strip())
        records, skipped = self._records(texts)
        following = next((t for t in map(str.strip, texts) if t), "")
        behind = EncodedAfter(self.prefix_ids(prefix, following), context.name if context else "")
        return Order(behind, tuple(records), tuple(skipped))

    def encode(self, order: Order, progress: Progress) -> EncodeSummary:
        """See `Engine.encode`."""
        started = time.perf_counter()
        behind = order.behind
        wanted, num_present = self._sorted_out(behind, order.records)
        longest = max(map(len, wanted), default=0)
        check_fits(self.model, len(behind.prefix_ids), longest)
        self.library.add_chunks([record for record, _ in order.records])
        if wanted or behind not in self.library.encoded_after():
            self._encode_wanted(behind, wanted, progress)
        return EncodeSummary(
            encoded=len(wanted),
            present=num_present,
            skipped=order.skipped,
            tokens=sum(map(len, wanted)),
            seconds=time.perf_counter() - started,
        )

    def register(self, texts: Sequence[str]) -> int:
        """See `Engine.register`."""
        records, _ = self._records(texts)
        known = self.library.table
        new = [record for record, text in records if known.get(text) is None]
        if new:
            self.library.register(new)
        return sum(len(record.token_ids) for record, _ in records)

    def let_go(self) -> None:
        """Drop what is kept of texts for the next batch; any thread may do that."""
        self._last.clear()

    def learn(self, behind: EncodedAfter) -> None:
        """Reuse a prefix from now on, and let what is missing be encoded behind it."""
        self.library.add_encoded_after(behind)
        self._ensure_prefix(behind)

    def recover(self, module: ChunkRecord, text: str, behind: EncodedAfter) -> None:
        """Encode one module that has no KV; no-op if it has by now, or was forgotten meanwhile.

        Behind a context that this process does not know it is encoded without one.
        """
        self.library.refresh()
        if self.library.table.get(text) is None:
            return
        if behind.context and behind.context not in self.contexts:
            behind = EncodedAfter(behind.prefix_ids)
        if not self.library.holds(behind, module.token_ids):
            self._encode_wanted(behind, {module.token_ids: (module, text)}, lambda *_: None)

    def _encode_wanted(
        self,
        behind: EncodedAfter,
        wanted: dict[Ids, tuple[ChunkRecord, str]],
        progress: Progress,
    ) -> None:
        self.library.add_encoded_after(behind)  # first, for KV of what nobody knows is pruned
        head = self._ensure_prefix(behind)
        context = self.contexts[behind.context] if behind.context else None
        for kv in self._encoded(behind, head, context, wanted, progress):
            self.library.put(behind, kv, wanted[kv.token_ids][0].text_digest)

    def prefix_ids(self, prefix: Rendered | None, following: str) -> Ids:
        """The prefix's tokens where a module follows: its last characters may merge differently."""
        if prefix is None:
            return self.tokenization.sink_ids
        whole = Rendered(prefix.text + following[:ANCHOR], prefix.literal, prefix.is_chat)
        tokens = self.tokenization.tokenize(whole)
        count = sum(end <= len(prefix.text) for end in tokens.ends)
        return tuple(tokens.ids[:count])

    def _records(
        self, texts: Sequence[str]
    ) -> tuple[list[tuple[ChunkRecord, str]], list[tuple[str, str]]]:
        """Each text's record, with the text; and (text, reason) of those that cannot be modules."""
        records: dict[str, tuple[ChunkRecord, str]] = {}
        skipped = []
        for text in (text.strip() for text in texts):
            if len(text) < ANCHOR:
                skipped.append((text, f"shorter than {ANCHOR} characters, cheaper to prefill"))
                continue
            known = self.library.table.get(text)
            record = known or record_of(text, self.tokenization.literal(text))
            records[record.text_digest] = (record, text)
        return list(records.values()), skipped

    def _check_length(self, text: str) -> None:
        """Refuse what cannot fit before it is tokenised, which takes as long as it is long."""
        room = self.model.context_length
        if (least := self.tokenization.least_tokens(text, room)) is not None:
            raise ContextOverflowError(
                f"a module of {len(text)} characters has {least} tokens at least and exceeds the "
                f"model's context of {room}; split it into smaller chunks"
            )

    def _sorted_out(
        self, behind: EncodedAfter, records: Sequence[tuple[ChunkRecord, str]]
    ) -> tuple[dict[Ids, tuple[ChunkRecord, str]], int]:
        """What has no KV behind that, by token ids; and how many have."""
        holds = {r.token_ids: self.library.holds(behind, r.token_ids) for r, _ in records}
        wanted = {r.token_ids: (r, text) for r, text in records if not holds[r.token_ids]}
        return wanted, sum(holds[r.token_ids] for r, _ in records)

    def _ensure_prefix(self, behind: EncodedAfter) -> ModuleKV | None:
        """The prefix's own KV, computed if need be."""
        if not behind.prefix_ids:
            return None
        kv = self.library.fetch(EncodedAfter(()), behind.prefix_ids)
        if kv is None:
            kv = encode_prefix(self.model, behind.prefix_ids)
            self.library.put(EncodedAfter(()), kv)
        return kv

    def _encoded(
        self,
        behind: EncodedAfter,
        head: ModuleKV | None,
        context: Context | None,
        wanted: dict[Ids, tuple[ChunkRecord, str]],
        progress: Progress,
    ) -> Iterator[ModuleKV]:
        """KV of what is wanted, those with the same texts before them together."""
        groups: dict[tuple[Ids, ...], list[Ids]] = {}
        for ids, (_, text) in wanted.items():
            before = context.before(text) if context else ()
            texts = [tuple(self.tokenization.literal(p).ids) for p in before if p != text]
            room = self._room - len(behind.prefix_ids) - len(ids)
            groups.setdefault(_fitting(texts, room), []).append(ids)
        for passages, modules in groups.items():
            base = self._standing_before(behind, head, passages)
            yield from encode_modules(self.model, base, modules, progress)

    @property
    def _room(self) -> int:
        """Tokens that a module and all before it may have."""
        limit = self.model.rule.limit
        return min(self.model.context_length, self.model.context_length if limit is None else limit)

    def _standing_before(
        self, behind: EncodedAfter, head: ModuleKV | None, passages: tuple[Ids, ...]
    ) -> ModuleKV | None:
        """Prefix and passages as one KV; a passage known as a module is moved, not computed.

        The last one is kept: batch after batch of an index stands behind the same.
        """
        if last := self._last.get((behind, passages)):
            return last[0]
        base = head
        for ids in passages:
            kv = self.library.fetch(EncodedAfter(behind.prefix_ids), ids)
            if kv is None:
                (kv,) = encode_modules(self.model, base, [ids])
            base = join(self.model, base, kv)
        self._last.clear()
        self._last[behind, passages] = (base,)
        return base


def _fitting(passages: Sequence[Ids], room: int) -> tuple[Ids, ...]:
    """The last passages that have room together."""
    fitting: list[Ids] = []
    for ids in reversed(passages):
        room -= len(ids)
        if room < 0:
            break
        fitting.insert(0, ids)
    return tuple(fitting)
