"""Kept prompts that outlive the process: written while nobody asks, and brought back by tokens.

What finished prompts left is described here as in `Sequences`, and lies on disk as `kv/kept.py`
says. Writing fails quietly but for a word in the log, as only caching fails. Knows tokens and KV.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from cached_rag.backends.base import Backend
from cached_rag.errors import StoreError
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.kept import KeptPrompt, KeptPrompts
from cached_rag.kv.layers import Layered, each
from cached_rag.kv.rows import Run
from cached_rag.library.learning import WriteBack
from cached_rag.library.sequences import Ids, PromptKV

_log = logging.getLogger(__name__)
# A kept prompt's name, and where it is cut: the same prompt may be written anew with other cuts.
_Cut = tuple[str, tuple[int, ...], tuple[int, ...]]


def _cut(prompt: KeptPrompt) -> _Cut:
    return prompt.name, prompt.ends, prompt.stated


class PromptArchive:
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
        self._waiting: list[PromptKV] = []
        self._known: dict[_Cut, PromptKV] = {}
        self._lock = threading.RLock()  # as in `WriteBack`

    def close(self, finish_seconds: float) -> None:
        """Write what waits, as far as the time allows, and release files."""
        self._writing.close(finish_seconds)
        self._kept.close()

    def prompts(self, namespace: str) -> list[PromptKV]:
        """A tenant's kept prompts, without their KV; that which was used longest ago first."""
        return [described for _, described in self._mine(namespace)]

    def _mine(self, namespace: str) -> list[tuple[KeptPrompt, PromptKV]]:
        try:
            found = self._kept.all()
        except StoreError as error:
            _log.warning("what earlier prompts left is not used: %s", error)
            return []
        known = self._known
        if known.keys() != {_cut(one) for one in found}:
            known = {_cut(one): known.get(_cut(one)) or _described(one) for one in found}
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
        if not mine or max(lengths) <= least:
            return None
        length = max(lengths)
        best, _ = mine[lengths.index(length)]
        try:
            found = self._loaded(best, length)
        except StoreError as error:
            _log.warning("%s What it stands for is computed anew.", error)
            self._drop(best)
            return None
        if found is None or len(found.ids) < length:  # a piece is missing
            self._drop(best)
            return found
        self._writing.offer(("used", best.name), partial(self._touch, best))
        return found

    def _touch(self, prompt: KeptPrompt) -> None:
        with suppress(StoreError):  # the folder may be read-only
            self._kept.touch(prompt)

    def _drop(self, prompt: KeptPrompt) -> None:
        try:
            self._kept.remove([prompt])
        except StoreError as error:
            _log.warning("%s", error)

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
        whole = _described(prompt, runs, stops)
        return whole.until(sum(map(len, runs))) if runs and (stops or not prompt.stated) else None

    def _of_one(self, side: Layered) -> Layered:
        """Keys or values as a buffer of one prompt has them."""
        return each(side, lambda stack: stack[:, None].to(self._device))

    def offer(self, prompt: PromptKV, supersedes: Callable[[PromptKV], bool]) -> None:
        """Write a kept prompt when nobody asks anything.

        Args:
            supersedes: whether it can serve all prompts that another one can, which then goes.
        """
        with self._lock:
            self._waiting.append(prompt)
        self._writing.offer(("kept", id(prompt)), partial(self._write, prompt, supersedes))

    def _write(self, prompt: PromptKV, supersedes: Callable[[PromptKV], bool]) -> None:
        new, mine = self._to_keep(prompt), self._mine(prompt.namespace)
        if any(one.name == new.name and len(one.stated) >= len(new.stated) for one, _ in mine):
            self._touch(new)  # that one can serve as many prompts
            self._no_longer_waits(prompt)
            return

        def piece(begin: int, end: int) -> ModuleKV:
            found = prompt.piece(begin, end)
            assert found is not None
            return found

        def state(end: int) -> torch.Tensor:
            run = next(run for run in prompt.runs if run.slot + len(run) == end)
            assert run.buffer.states is not None
            with self._model.lock:  # the state may still be where the model computes
                return run.buffer.states.packed()

        try:
            with self._lock:
                if not any(one is prompt for one in self._waiting):
                    return  # a text in it was forgotten
                self._kept.tell(new)
            self._kept.fill(new, piece, state)
            others = [pair for pair in self._mine(prompt.namespace) if pair[0].name != new.name]
            self._kept.remove([one for one, described in others if supersedes(described)])
        except StoreError as error:
            _log.warning("what a prompt left is not kept on disk: %s", error)
        finally:
            self._no_longer_waits(prompt)

    def _no_longer_waits(self, prompt: PromptKV) -> None:
        with self._lock:
            self._waiting = [one for one in self._waiting if one is not prompt]

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

    def forget(self, namespace: str, text_digest: str, token_ids: Ids) -> None:
        """Delete all prompts with a text, written or not; see `Sequences.forget`.

        Raises:
            StoreError: they cannot be deleted.
        """
        with self._lock:
            self._waiting = [
                one
                for one in self._waiting
                if one.namespace != namespace or one.find(text_digest, token_ids) is None
            ]
            self._kept.forget(namespace, text_digest, token_ids.tolist())


def _described(
    kept: KeptPrompt, runs: Sequence[Run] = (), stops: tuple[int, ...] | None = None
) -> PromptKV:
    return PromptKV(
        kept.namespace,
        np.asarray(kept.ids, dtype=np.int64),
        tuple(runs),
        kept.exact_length,
        kept.repair,
        kept.chunks,
        kept.least,
        kept.stated if stops is None else stops,
    )
