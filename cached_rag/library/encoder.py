"""Encodes texts into the library. Only texts without KV are prefilled.

Knows prefixes and contexts; knows no request. The model's lock is held for a batch, and free
between two, so that answers go on.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from cached_rag.backends.base import Backend, exclusively
from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.config import MOST_PRIMERS
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.catalog import ChunkRecord
from cached_rag.library.encode import (
    BATCH_TOKENS,
    SHORTEST_COMPOSED,
    Context,
    EncodeSummary,
    Ids,
    Window,
    batches,
    check_fits,
    check_known,
    encode_chunks,
    encode_composed,
    join,
    last_fitting,
    named,
    primer,
    windows,
)
from cached_rag.library.ledger import HALF_PAIR
from cached_rag.library.library import Library
from cached_rag.library.matching import ANCHOR, EncodedAfter, record_of

_log = logging.getLogger(__name__)
# What stands between chunks in the prompts of `CachedRAG`, and of the frameworks' own templates.
_BETWEEN = "\n\n"
_PRIMERS = tuple(primer(count + 1) for count in range(MOST_PRIMERS))
Passages = tuple[Ids, ...]
Item = tuple[ChunkRecord, str]


@dataclass(frozen=True)
class Order:
    """Texts that are to be encoded.

    Attributes:
        behinds: what will stand before each of them, one pass for each.
        documents: (record, text) of each text that can be a chunk, those of a document together, in
            its order. A text by itself is a document of one.
        skipped: (text, reason) of each text that cannot.
    """

    behinds: tuple[EncodedAfter, ...]
    documents: tuple[tuple[Item, ...], ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def records(self) -> list[Item]:
        """All texts, each once."""
        return [*{item[0].text_digest: item for one in self.documents for item in one}.values()]


@dataclass(frozen=True)
class Encoder:
    """Encodes texts with one model into one library.

    Attributes:
        contexts: the known contexts, by name: the primers, and those that `encode` was given.
        composes: see `StoreConfig.composes`.
    """

    model: Backend
    library: Library
    tokenization: Tokenization
    contexts: dict[str, Context] = field(default_factory=lambda: {c.name: c for c in _PRIMERS})
    composes: bool = False
    _last: dict[object, list[ModuleKV | None]] = field(default_factory=dict)
    # Tokens of a fixed context's passages in so much room: every chunk of a prompt asks.
    _lengths: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def read(
        self,
        texts: Iterable[str | Sequence[str]],
        prefix: Rendered | None,
        contexts: Sequence[Context | None],
    ) -> Order:
        """Tokenise texts that are to be encoded. On any thread: it needs no model.

        Args:
            prefix, contexts: see `Engine.encode`.

        Raises:
            ContextOverflowError, StoreError: see `Engine.encode`.
        """
        documents = _documents(texts)
        if documents:
            self.library.check_kept()
        self.contexts.update({one.name: one for one in contexts if one is not None})
        flat = [text.strip() for one in documents for text in one]
        for text in flat:
            self._check_length(text)
        found, skipped = zip(*map(self._records, documents), strict=True) if documents else ((), ())
        ids = self.prefix_ids(prefix, next(filter(None, flat), ""))
        behinds = tuple(EncodedAfter(ids, one.name if one else "") for one in contexts)
        return Order(behinds, tuple(map(tuple, found)), tuple(chain.from_iterable(skipped)))

    def encode(
        self,
        order: Order,
        progress: Callable[[int, int], object],
        total: Callable[[int], object],
    ) -> EncodeSummary:
        """Prefill the texts of an order that have no KV; see `Engine.encode`.

        Args:
            progress: called after each batch with the numbers of its chunks and of tokens computed.
            total: called before the first batch with the number of tokens to compute.
        """
        started = time.perf_counter()
        if self.model.keeps_states and not self.composes:
            # No chunk has KV of its own; but prompts may part behind one.
            order = replace(order, behinds=())
        passes = {behind: self._wanted(behind, order.records) for behind in order.behinds}
        for behind, wanted in passes.items():
            if not wanted:  # else it is told when they are encoded
                self.library.shelf.tell(behind)
            longest = max(wanted, key=len, default=())
            text = wanted[longest][1] if longest else ""
            check_fits(self.model, len(behind.prefix_ids), len(longest), text)
            for ids, (_, told) in wanted.items():
                check_known(self.model, ids, f"a chunk{named(told)}")
        self.library.add_chunks([record for record, _ in order.records])
        tokens = sum(sum(map(len, w)) * len(self._ways(behind)) for behind, w in passes.items())
        if tokens:
            total(tokens)
        texts = {ids: item for wanted in passes.values() for ids, item in wanted.items()}
        for records, window in list(self._batches(order, texts)) or [([], None)]:
            for behind in passes:  # of what ends early, or is dropped again, texts have all KV
                # Answers go on meanwhile, and progress is told there, so that it may ask, too.
                encode = partial(self._encode, behind, records, window)
                chunks, count = exclusively(self.model, encode)
                if chunks:
                    progress(chunks, count)
        self._warn_of_lost(order)
        seconds = time.perf_counter() - started
        sources = [(EncodedAfter(()), behind.prefix_ids) for behind in passes]
        sources += [(behind, record.token_ids) for behind in passes for record, _ in order.records]
        return EncodeSummary(
            encoded=len(texts),
            present=len(order.records) - len(texts) if passes else 0,
            skipped=order.skipped,
            tokens=tokens,
            seconds=seconds,
            unsent=self.library.unsent(sources),
        )

    def _batches(
        self, order: Order, wanted: dict[Ids, Item]
    ) -> Iterator[tuple[list[Item], Window | None]]:
        """The wanted texts in batches: parts of documents, and others, which stand alone.

        Behind a fixed context, chunks of a document stand behind each other, too.
        """
        alone = dict(wanted)
        fixed = [one for one in order.behinds if self.start(one) is not None]
        rooms = (self._left(behind) - max(self._before(behind)) for behind in fixed)
        most = min([BATCH_TOKENS, *rooms])
        for items in order.documents if fixed else ():
            if len(items) < 2:
                continue
            chunks = [record.token_ids for record, _ in items]
            for part in windows(chunks, alone.__contains__, self._between, most):
                yield [alone.pop(ids) for ids in part.chunks if ids in alone], part
        for batch in batches([*alone]):
            yield [alone[ids] for ids in batch], None

    def _warn_of_lost(self, order: Order) -> None:
        """Say if memory, where nothing is on disk, could not keep all that was asked for."""
        if self.library.shelf.disk is not None or not order.behinds:
            return
        if lost := self._wanted(order.behinds[0], order.records):
            _log.warning(
                "memory_bytes is too small for the KV of %d of %d texts, which were dropped again "
                "and will be computed when they are asked for; raise it, or give the store a path",
                len(lost),
                len(order.records),
            )

    def _encode(
        self, behind: EncodedAfter, records: Sequence[Item], window: Window | None
    ) -> tuple[int, int]:
        """Prefill those of a batch's texts that have no KV by now; says how many, of what length.

        Without texts the head alone is encoded, if it is new. A window is for fixed contexts only.
        """
        wanted = self._wanted(behind, records)
        if not wanted and behind in self.library.encoded_after():
            return 0, 0
        return len(wanted), self._encode_wanted(behind, wanted, window)

    def start(self, behind: EncodedAfter) -> int | None:
        """Where chunks that stand alone behind a fixed context begin; None behind another."""
        context = self.contexts.get(behind.context)
        if context is None or not context.is_fixed:
            return None
        return len(behind.prefix_ids) + self._before(behind)[0]

    def _before(self, behind: EncodedAfter) -> list[int]:
        """The number of tokens that a fixed context's passages take before a chunk, each way."""
        room = self._left(behind)
        if (lengths := self._lengths.get((behind.context, room))) is None:
            ways = (self._passages(way, "", room) for way in self._ways(behind))
            lengths = [sum(len(ids) + len(self._between) for ids in way) for way in ways]
            self._lengths[behind.context, room] = lengths
        return lengths

    def register(self, texts: Iterable[str]) -> int:
        """See `Engine.register`."""
        records = [record for record, _ in self._records(texts)[0]]
        self.library.register(records)
        return sum(record.num_tokens for record in records)

    def records_of(self, texts: Iterable[str]) -> list[ChunkRecord]:
        """The records of texts, known or not; texts that cannot be chunks have none."""
        whole = [text for text in several(texts) if not HALF_PAIR.search(text)]
        return [record for record, _ in self._records(whole)[0]]

    def let_go(self) -> None:
        """Drop the KV that is kept between batches, as a removed text may be in it.

        On any thread.
        """
        self._last.clear()

    def learn(self, behind: EncodedAfter) -> None:
        """Encode a prefix and make it known, so that prompts reuse it."""
        exclusively(self.model, partial(self._encode, behind, (), None))

    def learn_text(self, text: str) -> None:
        """Make a text known that prompts repeat."""
        for record, stripped in self._records([text])[0]:
            if self.library.table.get(stripped) is None:
                self.library.learn(record)

    def recover(self, chunk: ChunkRecord, text: str, behind: EncodedAfter) -> None:
        """Encode one chunk that a request missed.

        Does nothing if the chunk has KV by now, or was removed meanwhile. If this process does
        not know the context that `behind` names, the chunk is encoded without a context.
        """
        self.library.refresh()
        if self.library.table.get(text) is None:
            return
        if behind.context and behind.context not in self.contexts:
            behind = EncodedAfter(behind.prefix_ids)
        if not self.library.shelf.holds(behind, chunk.token_ids):
            wanted = {chunk.token_ids: (chunk, text)}
            exclusively(self.model, partial(self._encode_wanted, behind, wanted, None))

    def _encode_wanted(
        self, behind: EncodedAfter, wanted: dict[Ids, Item], window: Window | None
    ) -> int:
        """Prefill chunks, and keep their KV; returns the number of tokens computed.

        Those with the same passages before them are one group, in a window if there is one.
        """
        # First of all: KV that stands behind something unknown may be pruned.
        self.library.add_encoded_after(behind)
        head = None if self.model.keeps_states else self._ensure_prefix(behind)
        groups: dict[tuple[Passages, ...], list[Ids]] = {}
        for ids, (_, text) in wanted.items():
            room = self._left(behind) - len(ids)
            ways = tuple(self._passages(way, text, room) for way in self._ways(behind))
            groups.setdefault(ways, []).append(ids)
        for ways, chunks in groups.items():
            if self.model.keeps_states:
                spaced = chain.from_iterable((*ids, *self._between) for ids in ways[0])
                found = encode_composed(self.model, (*behind.prefix_ids, *spaced), chunks)
            elif window is None or len(groups) > 1 or self.start(behind) is None:
                found = encode_chunks(self.model, self._bases(behind, head, ways), chunks)
            else:
                found = window.encode(self.model, self._bases(behind, head, ways))
            for kv in found:
                if kv.token_ids in wanted:
                    self.library.put(behind, kv, wanted[kv.token_ids][0].text_digest)
        return sum(len(ways) * sum(map(len, chunks)) for ways, chunks in groups.items())

    def prefix_ids(self, prefix: Rendered | None, following: str) -> Ids:
        """The prefix's tokens as they are when a text follows.

        Its last characters may merge with the text into one token; such a token is left out.

        Args:
            prefix: None for what chunks encoded alone stand behind.
            following: a text that may stand behind the prefix.
        """
        if prefix is None:
            return self.tokenization.sink_ids
        whole = Rendered(prefix.text + following[:ANCHOR], prefix.literal, prefix.is_chat)
        tokens = self.tokenization.tokenize(whole)
        count = sum(end <= len(prefix.text) for end in tokens.ends)
        return tuple(tokens.ids[:count])

    def _records(self, texts: Iterable[str]) -> tuple[list[Item], list[tuple[str, str]]]:
        """(record, text) of each text that can be a chunk, and (text, reason) of the others."""
        records: dict[str, Item] = {}
        skipped = []
        for text in (text.strip() for text in several(texts)):
            if len(text) < ANCHOR:
                skipped.append((text, f"shorter than {ANCHOR} characters, cheaper to prefill"))
                continue
            known = self.library.table.get(text)
            record = known or record_of(text, self.tokenization.literal(text))
            if not record.token_ids:
                skipped.append((text, "the model's tokenizer knows none of its characters"))
                continue
            records[record.text_digest] = (record, text)
        return list(records.values()), skipped

    def _check_length(self, text: str) -> None:
        """Refuse a text that is much too long before all of it is tokenised, which takes long.

        Raises:
            ContextOverflowError: it has too many characters for the model's context.
        """
        room = self.model.context_length
        if (least := self.tokenization.least_tokens(text, room)) is not None:
            raise ContextOverflowError(
                f"a chunk of {len(text)} characters{named(text)} has {least} tokens at least and "
                f"exceeds the model's context of {room}; split it into smaller chunks"
            )

    def _wanted(self, behind: EncodedAfter, records: Sequence[Item]) -> dict[Ids, Item]:
        """The records that have no KV behind `behind`, by token ids."""
        if self.model.keeps_states:  # of the shortest all would be computed again
            records = [one for one in records if len(one[0].token_ids) > SHORTEST_COMPOSED]
        held = self.library.present(behind, [record for record, _ in records])
        return {r.token_ids: (r, text) for r, text in records if r.token_ids not in held}

    def _ensure_prefix(self, behind: EncodedAfter) -> ModuleKV | None:
        """The prefix's own KV, from the library or computed now; None if there is no prefix."""
        if not behind.prefix_ids:
            return None
        kv = self.library.shelf.fetch(EncodedAfter(()), behind.prefix_ids)
        if kv is None:
            (kv,) = encode_chunks(self.model, [None], [behind.prefix_ids])
            self.library.put(EncodedAfter(()), kv)
        return kv

    def _ways(self, behind: EncodedAfter) -> tuple[Context | None, ...]:
        """The contexts whose mean is wanted: one, where keys cannot be moved to one place."""
        ways = self.contexts[behind.context].ways if behind.context else (None,)
        return ways if self.model.rule.is_movable else ways[:1]

    def _passages(self, context: Context | None, text: str, room: int) -> Passages:
        if context is None:
            return ()
        texts = [tuple(self.tokenization.literal(p).ids) for p in context.before(text) if p != text]
        return last_fitting(texts, room, len(self._between))

    def _left(self, behind: EncodedAfter) -> int:
        """Most tokens that a chunk and its passages may have together behind a head."""
        most, limit = self.model.context_length, self.model.rule.limit
        return (most if limit is None else min(most, limit)) - len(behind.prefix_ids)

    def _bases(
        self, behind: EncodedAfter, head: ModuleKV | None, ways: tuple[Passages, ...]
    ) -> list[ModuleKV | None]:
        """The KV of prefix and passages together, for each way.

        The last result is kept, because all batches of an index have the same before them.
        """
        if not any(ways):  # the last result stays: a batch is encoded behind a head alone, too
            return [head] * len(ways)
        if (last := self._last.get((behind, ways))) is not None:
            return last
        bases = [self._joined(behind, head, passages) for passages in ways]
        self._last.clear()
        self._last[behind, ways] = bases
        return bases

    def _joined(
        self, behind: EncodedAfter, base: ModuleKV | None, passages: Passages
    ) -> ModuleKV | None:
        """Passages behind a prefix, an empty line after each, as prompts have chunks.

        A passage that is a chunk with KV is only moved.
        """
        for ids in passages:
            kv = self.library.shelf.fetch(EncodedAfter(behind.prefix_ids), ids)
            at = base.seq_len if base is not None else 0
            if kv is None or not (self.model.rule.is_movable or kv.start == at):
                base = self._with(base, ids)
            else:
                base = join(self.model, base, kv)
            base = self._with(base, self._between)
        return base

    def _with(self, base: ModuleKV | None, ids: Ids) -> ModuleKV | None:
        for kv in encode_chunks(self.model, [base], [ids] if ids else []):
            base = join(self.model, base, kv)
        return base

    @cached_property
    def _between(self) -> Ids:
        return tuple(self.tokenization.following(_BETWEEN).ids)


def _documents(texts: Iterable[str | Sequence[str]]) -> list[list[str]]:
    """The texts of each document; a text by itself is a document of one. Errors as below."""
    if isinstance(texts, str):
        several(texts)  # which refuses it
    parts: Iterable[Any] = (one if isinstance(one, list | tuple) else [one] for one in texts)
    return [several(one) for one in parts]


def several(texts: Iterable[str]) -> list[str]:
    """The texts, but not the letters of a string, which is a sequence of texts, too.

    Raises:
        ConfigError: it is one, or something in it is no text.
    """
    if isinstance(texts, str):
        raise ConfigError("texts are several; give a single one as a list, [text]")
    found = list(texts)
    if bad := [text for text in found if not isinstance(text, str)]:
        raise ConfigError(f"texts are strings, not {bad[0]!r}")
    return found
