"""Decides what is encoded in the background after a request.

Chunks without KV are encoded, heads of prompts and texts that recur are learned, and KV that was
read from disk is brought into memory. Knows tokens and plans; knows no method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch

from cached_rag.backends.prompt_text import Tokens
from cached_rag.backends.thread import on_model_thread
from cached_rag.config import StoreConfig
from cached_rag.errors import StoreError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.catalog import ChunkRecord
from cached_rag.kv.fingerprint import digest, ids_digest
from cached_rag.library.background import Activity, WriteBack
from cached_rag.library.context import primer
from cached_rag.library.encoder import Encoder
from cached_rag.library.matching import EncodedAfter, Match
from cached_rag.library.plan import Plan, is_before
from cached_rag.library.recurring import Heads, Recurring

_log = logging.getLogger(__name__)


class Learning:
    """Offers work to the background queue of one library.

    Attributes:
        write_back: the queue; None if `StoreConfig.write_back` is off.
        heads: the heads of prompts that recur; None if they are not to be learned.
        recurring: the same for other texts.
    """

    def __init__(self, encoder: Encoder, settings: StoreConfig, activity: Activity) -> None:
        self.write_back = (
            WriteBack(activity, finish_seconds=settings.finish_seconds)
            if settings.write_back
            else None
        )
        self.library = library = encoder.library
        learns = settings.learn_prefixes and settings.write_back
        self.heads = Heads() if learns else None
        self.recurring = Recurring() if settings.learn == "recurring" else None
        self._last_removal = library.generation
        self._sink_ids = encoder.tokenization.sink_ids
        self._primer = primer(settings.primers).name
        self._first_exact = settings.first_exact
        self._encoder = encoder

    def close(self, finish_seconds: float | None = None) -> None:
        """Finish the work in the background; see `WriteBack.close`."""
        if self.write_back is not None:
            self.write_back.close(finish_seconds)

    def forgotten(self, plan: Plan) -> list[ChunkRecord]:
        """A prompt's chunks, with and without KV, that were removed since it was planned."""
        chunks = [match.chunk for match in plan.matches]
        return [one for one in chunks if self.library.table.by_digest(one.text_digest) is None]

    def notice(self, text: str, tokens: Tokens, matches: Sequence[Match]) -> bool:
        """Make texts known that a prompt has and an earlier one had elsewhere. On any thread.

        So the KV that the earlier prompt left serves already this one, where it is kept.

        Args:
            text: the prompt's, and `tokens` those of it.
            matches: the chunks in it that are known.

        Returns:
            Whether there are any.
        """
        if self.recurring is None:
            return False
        if self._last_removal != self.library.generation:
            self._last_removal = self.library.generation
            self.recurring.clear()  # another engine forgot texts, which may be among these
        generation, tokenization = self._generation, self._encoder.tokenization
        known = [(match.at, match.at + len(match.text)) for match in matches]
        known += tokenization.spelled_out(text)
        runs = self.recurring.find(text, tokens, set(tokenization.controls.values()), known)
        try:
            for run in runs:
                self._encoder.learn_text(run)
        except StoreError as error:
            _log.warning("texts that recur in prompts could not be made known: %s", error)
        if generation != self._generation:  # texts were forgotten meanwhile
            self.library.remove([digest(run) for run in runs])
        return bool(runs)

    def see_to(self, tokens: Tokens, plan: Plan) -> None:
        """Offer what follows from a prompt: encode its missed chunks, keep in memory what it read.

        Args:
            tokens: the prompt's.
            plan: with the chunks that the prompt contains and the KV it used.
        """
        if self.write_back is None:
            return
        self._offer_chunks(tokens, plan)
        for place in plan.placements:
            if place.source is not None and not isinstance(place.kv, ModuleKV):
                fetch = partial(self.library.shelf.fetch, *place.source)
                self.write_back.offer(place.source, fetch, lasts=False)

    def _offer_chunks(self, tokens: Tokens, plan: Plan) -> None:
        """Offer to encode chunks that had no KV, and the head if it recurs."""
        if not plan.matches:
            return
        first = plan.matches[0]
        length, name = 0 if first.is_part else first.first, first.chunk.text_digest
        rest = ids_digest(tokens.ids[plan.matches[-1].end :])
        best = self._best(tuple(tokens.ids[:length]), name, rest)
        if best not in self.library.encoded_after() and len(best.prefix_ids) > len(self._sink_ids):
            self._offer_encoding(best, partial(self._encoder.learn, best))
        for missed, behind in product((*plan.missed, *plan.harvested), self._beside(best)):
            task = (missed.chunk.text_digest, behind)
            recover = partial(self._encoder.recover, missed.chunk, missed.text, behind)
            self._offer_encoding(task, recover)

    @property
    def _generation(self) -> tuple[int, int]:
        """Changes when texts are forgotten, by this engine or another one."""
        own = 0 if self.recurring is None else self.recurring.generation
        return own, self.library.generation

    def _offer_encoding(self, name: object, task: Callable[[], object]) -> None:
        assert self.write_back is not None
        is_kept = self.library.shelf.disk is not None
        self.write_back.offer(name, partial(self._encode, task), lasts=is_kept)

    def _best(self, head: tuple[int, ...], chunk: str, rest: str) -> EncodedAfter:
        """What the missed chunks of a prompt are best encoded behind.

        That is the prompt's own head, if it recurs; else a known prefix that the head begins with;
        else what chunks encoded alone stand behind.

        Args:
            head: the prompt's tokens before its first chunk.
            chunk: the digest of that chunk.
            rest: the digest of the prompt's tokens behind its last chunk.
        """
        best = self._known(head)
        is_long = len(head) > len(self._sink_ids)
        is_new = not is_before(head, best.prefix_ids)
        if self.heads is not None and is_long and is_new and self.heads.learn(head, chunk, rest):
            return EncodedAfter(head, self._primer)
        return best

    def _known(self, head: tuple[int, ...]) -> EncodedAfter:
        """The longest known prefix that a head begins with, or what stands before lone chunks."""
        known = (b for b in self.library.encoded_after() if is_before(b.prefix_ids, head))
        return next(known, EncodedAfter(self._sink_ids, self._primer))

    def _beside(self, best: EncodedAfter) -> tuple[EncodedAfter, ...]:
        """That, and its head alone, where chunks are encoded so, too: it is exact for the first."""
        alone = EncodedAfter(best.prefix_ids)
        is_head = len(best.prefix_ids) > len(self._sink_ids)
        is_wanted = self._first_exact or alone in self.library.encoded_after()
        return (best, alone) if is_head and is_wanted and best.context else (best,)

    def _encode(self, task: Callable[[], object]) -> None:
        def encode() -> None:
            with self._encoder.model.lock, torch.inference_mode():
                task()

        on_model_thread(encode)
