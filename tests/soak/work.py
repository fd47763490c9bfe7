"""What one process of the soak does: its threads ingest, ask, delete and prune at random."""

from __future__ import annotations

import faulthandler
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faults import world

from cached_rag import CachedRAG, ConfigError
from cached_rag.errors import DocumentError

_EXACT = ("prefix", "cacheblend:recompute_ratio=1")
# What may be said to somebody who asks while others delete.
_FINE = ("the index is empty", "the index has no document")


@dataclass
class Done:
    """What was done in a process.

    Attributes:
        counts: how often each thing was done.
        wrong: answers, or modules, that were not as they have to be.
        faults: what else was wrong, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    faults: list[str] = field(default_factory=list)


class Worker:
    """One thread's part. Its own document has words that no other has."""

    def __init__(self, rag: CachedRAG, folder: Path, name: str, seed: int, right: str) -> None:
        """Args: `right` is the answer to `world.PROMPT`."""
        self._rag, self._folder, self._name, self._right = rag, folder, name, right
        self._chance = random.Random(seed)
        self.done = Done()

    def run(self, until: float) -> None:
        """Do one thing after the other."""
        things: list[Callable[[], None]] = [
            *(self._ask, self._ask, self.exact, self._stream, self._batch, self._chat),
            *(self._ingest, self._delete, self._prune, self.own_document, self._learn),
        ]
        while time.monotonic() < until:
            thing = self._chance.choice(things)
            try:
                thing()
            except (DocumentError, ConfigError) as error:
                if not any(fine in str(error) for fine in _FINE):
                    self._fault(thing, error)
            except Exception as error:
                self._fault(thing, error)
            self.done.counts[thing.__name__.strip("_")] += 1

    def _fault(self, thing: Callable[[], None], error: Exception) -> None:
        self.done.faults.append(f"{thing.__name__}: {error!r:.300}")

    def _ask(self) -> None:
        method = self._chance.choice(["auto", "reuse", "epic", "full"])
        self._rag.ask(world.QUESTION, k=6, max_tokens=2, method=method)
        self.done.wrong += world.wrong_in_prompt(self._rag.engine)

    def exact(self) -> None:
        method = self._chance.choice(_EXACT)
        answer = self._rag.engine.generate(
            world.PROMPT, method=method, max_tokens=world.sure_tokens()
        )
        self.done.wrong += answer.text != self._right

    def _stream(self) -> None:
        stream = self._rag.stream(world.QUESTION, k=4, max_tokens=8)
        for _ in range(self._chance.randrange(3)):
            next(stream, None)
        if self._chance.random() < 0.5:
            stream.stream.cancel()

    def _batch(self) -> None:
        prompts = [world.PROMPT, f"{world.TEXTS[0]} {world.QUESTION}"]
        first, _ = self._rag.engine.generate_batch(
            prompts, method="prefix", max_tokens=world.sure_tokens()
        )
        self.done.wrong += first.text != self._right

    def _chat(self) -> None:
        chat = self._rag.chat()
        for question in (world.QUESTION, "And why?"):
            chat.ask(question, max_tokens=2)

    def _ingest(self) -> None:
        self._rag.ingest(self._folder / "documents", progress=False)

    def _delete(self) -> None:
        sources = [one.source for one in self._rag.documents() if one.source.endswith(".txt")]
        if sources:
            self._rag.delete(self._chance.choice(sources))

    def _prune(self) -> None:
        disk = self._rag.engine.library.shelf.disk
        assert disk is not None
        disk.prune(self._chance.choice([None, 60_000]))

    def _learn(self) -> None:
        texts = self._chance.sample(world.TEXTS, 3)
        self._rag.engine.register(texts)
        self._rag.engine.prefetch(texts)

    def own_document(self) -> None:
        """A document comes, is asked for, and goes: then nothing of it is used or left."""
        number = self._chance.randrange(1 << 30)
        mark = f"{self._name} {number:x} stands"
        words = " ".join(f"The heron {mark} in reed {n}." for n in range(12))
        source = f"own-{self._name}"
        self._rag.add_texts({source: words}, progress=False)
        question = f"Where is the heron {self._name} {number:x}?"
        if source not in _sources(self._rag, question):
            self.done.faults.append("what was added is not found")
        self._rag.delete(source)
        if source in _sources(self._rag, question):
            self.done.faults.append("what was deleted is found")
        report = self._rag.engine.generate(f"{words}\n\n{question}", method="reuse", max_tokens=1)
        if report.report.modules_hit:
            self.done.faults.append("KV of what was deleted is used")
        self.done.faults += [
            f"{path} has what was deleted" for path in _holding(self._folder, mark)
        ]


def _sources(rag: CachedRAG, question: str) -> list[str]:
    return [hit.source for hit in rag.search(question, k=50)]


def _holding(folder: Path, mark: str) -> list[str]:
    """Names of files with these words.

    Read by another process: closing a database's file would end this one's locks on it.
    """
    command = ["grep", "--recursive", "--files-with-matches", "--fixed-strings", "--text", mark]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    return [Path(line).name for line in done.stdout.splitlines()]


def run(folder: Path, threads: int, seconds: float, seed: int, *, right: str) -> Done:
    """Work on an index with so many threads."""
    # If it hangs, the log says where.
    faulthandler.dump_traceback_later(seconds + 120, exit=True)
    whole = Done()
    with world.index(folder / "index", write_back=True, memory_bytes=200_000) as rag:
        workers = [
            Worker(rag, folder, f"{seed}-{n}", seed * 1000 + n, right) for n in range(threads)
        ]
        until = time.monotonic() + seconds
        running = [threading.Thread(target=one.run, args=(until,)) for one in workers]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        for worker in workers:
            whole.counts += worker.done.counts
            whole.wrong += worker.done.wrong
            whole.faults += worker.done.faults
        scheduler = rag.engine.scheduler
        if scheduler.num_running or scheduler.num_waiting or scheduler.nbytes:
            whole.faults.append("requests, or their KV, are left")
    faulthandler.cancel_dump_traceback_later()
    return whole
