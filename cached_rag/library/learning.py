"""What is encoded in the background after a request, while no request is under way.

Chunks without KV are encoded, heads of prompts and texts that recur are learned, and KV that was
read from disk is brought into memory. One queue, which is bounded, has all this work. One chunk is
encoded at a time, and only begun while no request is under way, so a request waits for one chunk at
most. Tasks that still wait when the engine is closed, or when the interpreter ends, are done then,
for a bounded time. Knows tokens and plans; knows no method.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from weakref import WeakSet

from cached_rag.backends.prompt_text import Tokens
from cached_rag.backends.thread import before_end, join
from cached_rag.config import StoreConfig
from cached_rag.errors import StoreError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.catalog import inner_ids
from cached_rag.kv.fingerprint import digest, ids_digest
from cached_rag.kv.rows import RowKV
from cached_rag.library.encode import primer
from cached_rag.library.encoder import Encoder
from cached_rag.library.matching import EncodedAfter, Heads, Match, Recurring
from cached_rag.library.plan import Placement, Plan, is_before
from cached_rag.library.sequences import PromptKV, Sequences

_log = logging.getLogger(__name__)
_CAPACITY = 256
# The thread ends after so long without work: as long as it lives, so does the engine's model.
_IDLE_SECONDS = 1.0


class Learning:
    """Offers work to the background queue of one library.

    Attributes:
        write_back: the queue; None if `StoreConfig.write_back` is off.
        heads: the heads of prompts that recur; None if they are not to be learned.
        recurring: the same for other texts.
    """

    def __init__(self, encoder: Encoder, settings: StoreConfig, activity: Activity) -> None:
        self.write_back: WriteBack | None = None
        if settings.write_back:
            self.write_back = WriteBack(activity, finish_seconds=settings.finish_seconds)
        self.library = library = encoder.library
        self.heads = Heads() if settings.learn_prefixes and settings.write_back else None
        self.recurring = Recurring() if settings.learn == "recurring" else None
        self._generation = library.generation
        self._sink_ids = encoder.tokenization.sink_ids
        self._primer = primer(settings.primers).name
        self._first_exact = settings.first_exact
        self._encoder = encoder

    def close(self, deadline: float) -> None:
        """Finish the work in the background; see `WriteBack.close`."""
        if self.write_back is not None:
            self.write_back.close(deadline)

    def keep(self, sequences: Sequences, prompt: PromptKV, kv: RowKV, plan: Plan) -> None:
        """Keep a prompt's KV, but for chunks that were removed since it was planned."""
        sequences.add(prompt, kv)
        for chunk in (match.chunk for match in plan.matches):
            if self.library.table.by_digest(chunk.text_digest) is None:
                sequences.forget(prompt.namespace, chunk.text_digest, inner_ids(chunk.token_ids))

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
        generation, tokenization = self.library.generation, self._encoder.tokenization
        if generation != self._generation:
            self.recurring.clear()  # texts were forgotten, which may be among these
            self._generation = generation
        known = [match.span for match in matches]
        known += tokenization.spelled_out(text)
        runs = self.recurring.find(text, tokens, set(tokenization.controls.values()), known)
        try:
            for run in runs:
                self._encoder.learn_text(run)
        except StoreError as error:
            _log.warning("texts that recur in prompts could not be made known: %s", error)
        if generation != self.library.generation:  # texts were forgotten meanwhile
            with self.library.shelf.spared():  # what cannot go now goes with the next deletion
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
        if plan.matches:
            self._offer_chunks(self.write_back, tokens, plan)
        for place in plan.placements:
            if place.source is not None and not self._is_near(place, *place.source):
                fetch = partial(self.library.shelf.fetch, *place.source)
                self.write_back.offer(place.source, fetch, lasts=False)

    def _is_near(self, place: Placement, behind: EncodedAfter, token_ids: Sequence[int]) -> bool:
        """Whether KV that was used is where it is fastest to have, as far as there is room."""
        shelf = self.library.shelf
        if not isinstance(place.kv, ModuleKV):
            return False
        is_first = place.origin.tier != "memory" or len(shelf.memory) < 2
        return is_first or shelf.key(behind, token_ids) in shelf.memory[0]

    def _offer_chunks(self, write_back: WriteBack, tokens: Tokens, plan: Plan) -> None:
        """Offer to encode chunks that had no KV, and the head if it recurs."""
        first, lasts = plan.matches[0], self.library.shelf.disk is not None
        length, name = 0 if first.is_part else first.first, first.chunk.text_digest
        rest = ids_digest(tokens.ids[plan.matches[-1].end :])
        best = self._best(tuple(tokens.ids[:length]), name, rest)
        if best not in self.library.encoded_after() and len(best.prefix_ids) > len(self._sink_ids):
            write_back.offer(best, partial(self._encoder.learn, best), lasts=lasts)
        for missed, behind in product((*plan.missed, *plan.harvested), self._beside(best)):
            task = (missed.chunk.text_digest, behind)
            recover = partial(self._encoder.recover, missed.chunk, missed.text, behind)
            write_back.offer(task, recover, lasts=lasts)

    def _best(self, head: tuple[int, ...], chunk: str, rest: str) -> EncodedAfter:
        """What the missed chunks of a prompt are best encoded behind.

        That is the prompt's own head, if it recurs; else a known prefix that the head begins with;
        else what chunks encoded alone stand behind.

        Args:
            head: the prompt's tokens before its first chunk.
            chunk: the digest of that chunk.
            rest: the digest of the prompt's tokens behind its last chunk.
        """
        known = (b for b in self.library.encoded_after() if is_before(b.prefix_ids, head))
        best = next(known, EncodedAfter(self._sink_ids, self._primer))
        is_long = len(head) > len(self._sink_ids)
        is_new = not is_before(head, best.prefix_ids)
        if self.heads is not None and is_long and is_new and self.heads.learn(head, chunk, rest):
            return EncodedAfter(head, self._primer)
        return best

    def _beside(self, best: EncodedAfter) -> tuple[EncodedAfter, ...]:
        """That, and its head alone, where chunks are encoded so, too: it is exact for the first."""
        alone = EncodedAfter(best.prefix_ids)
        is_head = len(best.prefix_ids) > len(self._sink_ids)
        is_wanted = self._first_exact or alone in self.library.encoded_after()
        return (best, alone) if is_head and is_wanted and best.context else (best,)


class Activity:
    """The requests that are under way. Safe for several threads.

    Attributes:
        changed: notified when a request is over; held to ask `is_idle`.
    """

    def __init__(self) -> None:
        self._under_way: WeakSet[object] = WeakSet()  # a request that is dropped is over, too
        # Reentrant: the garbage collector may end a request, and so come back, at any point.
        self.changed = threading.Condition(threading.RLock())

    def begin(self, request: object) -> None:
        """Note that a request has begun. Doing it again changes nothing."""
        with self.changed:
            self._under_way.add(request)

    def end(self, request: object) -> None:
        """Note that a request is over. Doing it again changes nothing."""
        with self.changed:
            self._under_way.discard(request)
            self.changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._under_way


class WriteBack:
    """A bounded queue of tasks, and one thread that does them. Safe for several threads.

    Attributes:
        finish_seconds: how long `close` may go on with tasks that wait; 0 drops them.
    """

    def __init__(
        self, activity: Activity, capacity: int = _CAPACITY, finish_seconds: float = 0.0
    ) -> None:
        self.finish_seconds = finish_seconds
        self._activity, self._capacity = activity, capacity
        # By name, and whether its result lasts; the one that is being done stays until it is over.
        self._tasks: OrderedDict[object, tuple[Callable[[], object], bool]] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._changed = activity.changed  # the thread waits for tasks, and for requests to be over
        _OPEN.add(self)

    def offer(
        self,
        name: object,
        work: Callable[[], object],
        *,
        lasts: bool = True,
        is_begun: bool = False,
    ) -> None:
        """Queue a task. If the queue is full, or closed, the task is dropped.

        A later request that misses the same chunk offers its task again.

        Args:
            name: identifies the task; a name that is in the queue already is not added again.
            work: the task.
            lasts: its result outlives the process, so it is worth doing even when the engine is
                being closed.
            is_begun: it goes on with what another task has begun, and holds memory for it; so it
                comes before all others.
        """
        with self._changed:
            if self._is_stopped or name in self._tasks or len(self._tasks) >= self._capacity:
                return
            self._tasks[name] = (work, lasts)
            self._tasks.move_to_end(name, last=not is_begun)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until all tasks that were offered so far are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks)

    def close(self, deadline: float | None = None) -> None:
        """Finish the running task, then begin waiting ones until the time is over.

        The rest is dropped, and its number is logged. The tasks are done on the caller's thread: no
        thread can be started while the interpreter ends.

        Args:
            deadline: no task is begun later, by `time.monotonic`; None for so many seconds from now
                on as the attribute says.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C; all waiting tasks are dropped.
        """
        if deadline is None:
            deadline = time.monotonic() + self.finish_seconds
        try:
            self._stop()
            while time.monotonic() < deadline and (name := self._next()) is not None:
                self._do(name)
        finally:
            with self._changed:
                left = sum(lasts for _, lasts in self._tasks.values())
                self._tasks.clear()
                self._changed.notify_all()
            if left and self.finish_seconds:
                _log.warning(
                    "%d chunk(s) were not encoded, because there was no time left (see "
                    "StoreConfig.finish_seconds); the next prompts that contain them will have "
                    "them encoded",
                    left,
                )

    def _stop(self) -> None:
        """Take no more tasks, and wait until the thread has finished the one it does."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            join(thread)

    def _next(self) -> object | None:
        """The name of the next task whose result lasts."""
        return next((name for name, (_, lasts) in [*self._tasks.items()] if lasts), None)

    def _run(self) -> None:
        while (name := self._awaited()) is not None:
            self._do(name)

    def _awaited(self) -> object | None:
        """The next task's name, once no request is under way; None if the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._is_stopped, _IDLE_SECONDS)
            if not self._tasks:
                self._thread = None
                return None
            while not (self._activity.is_idle or self._is_ending()):
                self._changed.wait(_IDLE_SECONDS)  # nobody notifies of a request that is dropped
            return None if self._is_ending() else next(iter(self._tasks))

    def _is_ending(self) -> bool:
        """Whether waiting tasks are left to `close`, as when the main thread has ended."""
        return self._is_stopped or not threading.main_thread().is_alive()

    def _do(self, name: object) -> None:
        try:
            work, _ = self._tasks[name]
            work()
        except Exception as error:  # such as a full disk; the thread must go on with other tasks
            _log.warning("a chunk could not be encoded in the background: %s", error)
        finally:
            with self._changed:
                self._tasks.pop(name, None)
                self._changed.notify_all()


_OPEN: WeakSet[WriteBack] = WeakSet()


def _finish_all() -> None:
    """At the interpreter's end, finish every queue, each for its own `finish_seconds` from now."""
    found, now = list(_OPEN), time.monotonic()
    try:
        for one in found:
            one.close(now + one.finish_seconds)
    except KeyboardInterrupt:
        for one in found:
            one.close(now)


before_end(_finish_all)
if hasattr(os, "register_at_fork"):  # a child has not the threads, and locks may be held forever
    os.register_at_fork(after_in_child=_OPEN.clear)
