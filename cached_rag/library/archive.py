"""Kept prompts that outlive the process: written while nobody asks, and brought back by tokens.

What finished prompts left is described here as in `Sequences`, and lies on disk as `kv/kept.py`
says. Writing fails quietly but for a word in the log, as only caching fails. Knows tokens and KV.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from cached_rag.backends.base import Backend
from cached_rag.errors import CorruptBlobError, StoreError
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.kept import KeptPrompt, KeptPrompts
from cached_rag.kv.layers import Layered, each
from cached_rag.kv.rows import Run
from cached_rag.library.learning import WriteBack
from cached_rag.library.sequences import Disk, Ids, PromptKV

_log = logging.getLogger(__name__)
_UNWRITTEN = "what a prompt left is not kept on disk"


def _cut(prompt: KeptPrompt) -> object:
    """Its name, and where it is cut: the same prompt may be written anew with other cuts."""
    return prompt.name, prompt.ends, prompt.stated


class PromptArchive(Disk):
    """The kept prompts of one model, on disk. Safe for several threads."""

    def __init__(
        self, kept: KeptPrompts, model: Backend, device: torch.device, writing: WriteBack
    ) -> None:
        """Read nothing yet.

        Args:
            device: where prompts are computed.
            writing: does the writing in the background.
        """
        self._kept, self._model, self._device, self._writing = kept, model, device, writing
        # In order those that `Sequences` keeps, so they take no memory beyond its bound.
        self._waiting: WeakKeyDictionary[PromptKV, None] = WeakKeyDictionary()
        self._known: dict[object, PromptKV] = {}
        self._lock = threading.RLock()  # as in `Activity`

    def close(self) -> None:
        """Write nothing more, and release files; see `finish`."""
        self._writing.close(0)
        self._kept.close()

    def prompts(self, namespace: str) -> list[PromptKV]:
        """A tenant's kept prompts, without their KV; that which was used longest ago first."""
        return [described for _, described in self._mine(namespace)]

    def _mine(self, namespace: str) -> list[tuple[KeptPrompt, PromptKV]]:
        found: list[KeptPrompt] = []
        with _logged("what earlier prompts left is not used"):
            found = self._kept.all()
        known = {_cut(one): self._known.get(_cut(one)) or _described(one) for one in found}
        self._known = known
        whose = self._model.fingerprint, namespace, self._kept.signer
        mine = (one for one in found if (one.model, one.namespace, one.signer) == whose)
        return [(one, known[_cut(one)]) for one in mine]

    def bring(
        self, namespace: str, usable: Callable[[PromptKV], int], least: int
    ) -> PromptKV | None:
        """Read the kept prompt of which a new one can use most; None if that is not worth it.

        Args:
            usable: how many tokens of a kept prompt the new one can use.
            least: it has to be more than so many.
        """
        mine = self._mine(namespace)
        lengths = [usable(described) for _, described in mine]
        if (length := max(lengths, default=0)) <= least:
            return None
        best, _ = mine[lengths.index(length)]
        found = None
        with _logged("what a prompt left is computed anew"):
            try:
                found = self._loaded(best, length)
            except CorruptBlobError:
                self._drop(best)
                raise
            if found is None or len(found.ids) < length:  # a piece is missing
                self._drop(best)
            else:
                self._writing.offer(("used", best.name), partial(self._touch, best))
        return found

    def _touch(self, prompt: KeptPrompt) -> None:
        with suppress(StoreError):  # the folder may be read-only
            self._kept.touch(prompt)

    def _drop(self, *prompts: KeptPrompt) -> None:
        with _logged("what a prompt left stays on disk"):
            self._kept.remove(prompts)

    def _loaded(self, prompt: KeptPrompt, length: int) -> PromptKV | None:
        """The first `length` tokens' KV, or as much as there is of it."""
        runs: list[Run] = []
        stops: tuple[int, ...] = ()
        states = {end: key for key, (_, end) in prompt.states.items()}
        for key, (begin, end) in prompt.pieces.items():
            kv = self._kept.piece(prompt, key) if begin < length else None
            if kv is None:
                break
            buffer = KVBuffer(self._of_one(kv.keys), self._of_one(kv.values))
            if end in states and end == length:
                data = self._kept.state(prompt, states[end])
                if data is None:
                    break
                buffer.states, stops = self._model.unpacked(data, end), (end,)
            runs.append(Run(buffer, 0, end - begin, begin))
        whole = replace(_described(prompt), runs=tuple(runs), stops=stops)
        return whole.until(sum(map(len, runs))) if runs and (stops or not prompt.stated) else None

    def _of_one(self, side: Layered) -> Layered:
        """Keys or values as a buffer of one prompt has them."""
        return each(side, lambda stack: stack[:, None].to(self._device))

    def offer(self, prompt: PromptKV) -> None:
        """Write a prompt when nobody asks anything, if it is still kept in memory then.

        Those that it supersedes go.
        """
        with self._lock:
            self._waiting[prompt] = None
        self._writing.offer(object(), self._write_one)  # as often as there is something to write

    def _write_one(self) -> None:
        with self._lock:
            waiting = next(iter(self._waiting), None)
        if waiting is not None and self._tell(waiting):
            self._fill(waiting)

    def finish(self, prompts: Sequence[PromptKV], deadline: float) -> None:
        """Write prompts now, the last one first, and nothing else later.

        Args:
            deadline: none is begun later, by `time.monotonic`; those that are left are logged.
        """
        self._writing.close(0)
        if time.monotonic() >= deadline:
            return
        self._waiting.update(dict.fromkeys(prompts))
        told = [one for one in prompts if self._tell(one)]  # in the order in which they may go
        try:
            while told and time.monotonic() < deadline:
                self._fill(told.pop())
        finally:
            if told:
                self._drop(*map(self._to_keep, told))
                _log.warning(
                    "%d of the prompts that were kept are not on disk, because there was no time "
                    "left (see StoreConfig.finish_seconds); they are computed anew",
                    len(told),
                )

    def _tell(self, prompt: PromptKV) -> bool:
        """Write down that a prompt is kept; says whether its KV has to follow."""
        new = self._to_keep(prompt)
        with self._lock, _logged(_UNWRITTEN):
            if prompt not in self._waiting:
                return False  # a text in it was forgotten
            del self._waiting[prompt]
            mine = [one for one, _ in self._mine(prompt.namespace) if one.name == new.name]
            if any(len(one.stated) >= len(new.stated) for one in mine):
                self._touch(new)  # that one can serve as many prompts
                return False
            self._kept.tell(new)
            return True
        return False

    def _fill(self, prompt: PromptKV) -> None:
        def piece(begin: int, end: int) -> ModuleKV:
            found = prompt.piece(begin, end)
            assert found is not None
            return found

        def state(end: int) -> torch.Tensor:
            run = next(run for run in prompt.runs if run.slot + len(run) == end)
            assert run.buffer.states is not None
            with self._model.lock:  # the state may still be where the model computes
                return run.buffer.states.packed()

        new = self._to_keep(prompt)
        with _logged(_UNWRITTEN):
            if self._kept.fill(new, piece, state):
                others = [pair for pair in self._mine(prompt.namespace) if pair[0].name != new.name]
                self._kept.remove([one for one, other in others if prompt.supersedes(other)])

    def _to_keep(self, prompt: PromptKV) -> KeptPrompt:
        ends = tuple(run.slot + len(run) for run in prompt.runs)
        return KeptPrompt(
            self._model.fingerprint,
            prompt.namespace,
            self._kept.signer,
            tuple(prompt.ids.tolist()),
            ends,
            prompt.stops,
            prompt.exact_length,
            prompt.repair,
            prompt.chunks,
            prompt.least,
        )

    def withdraw(self, namespace: str, text_digest: str, token_ids: Ids) -> None:
        """Write none of those that wait and have a text; see `Sequences.forget`."""
        with self._lock:
            for one in list(self._waiting):
                if one.namespace == namespace and one.find(text_digest, token_ids) is not None:
                    self._waiting.pop(one, None)


@contextmanager
def _logged(outcome: str) -> Iterator[None]:
    """Log a `StoreError`, and what comes of it, as only caching fails."""
    try:
        yield
    except StoreError as error:
        _log.warning("%s: %s", outcome, error)


def _described(kept: KeptPrompt) -> PromptKV:
    return PromptKV(
        kept.namespace,
        np.asarray(kept.ids, dtype=np.int64),
        (),
        kept.exact_length,
        kept.repair,
        kept.chunks,
        kept.least,
        kept.stated,
    )
