"""Peak memory of whole answers: each peer in a process of its own, with the same prompts.

A process holds Python and this library's imports in each case; programs that run without them take
that much less by themselves, so the row says how much it is. Weights that are mapped from a file
count as far as they were read.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cached_rag.backends.process import peak_bytes
from cached_rag.backends.tokenizer import Rendered
from cached_rag.benchmarks.answers import make_questions
from cached_rag.benchmarks.peers import Means, Question, open_peers
from cached_rag.config import StoreConfig
from cached_rag.engine.engine import Engine

_OTHER_PROGRAMS = ("llama.cpp", "llama-server")  # they need no engine
_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryRow:
    """One peer's memory, in MiB.

    Attributes:
        imports: before it loads anything.
        loaded: when the model is loaded, and, by this library, the chunks are encoded.
        peak: when all prompts are answered.
        ratio: its peak over the first peer's.
    """

    prompt_tokens: int
    peer: str
    imports: int
    loaded: int
    peak: int
    ratio: float


@dataclass(frozen=True)
class Workload:
    """What is answered, and with what.

    Attributes:
        options: of `Engine.load`.
        corpus, prompt_tokens, chunk_tokens, new_tokens, rounds: see `make_questions`.
        gguf: see `Means`.
        context: see `Means`.
    """

    model: str
    corpus: str
    prompt_tokens: int
    context: int
    options: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int = 512
    new_tokens: int = 64
    rounds: int = 4
    gguf: Path | None = None

    def engine(self) -> Engine:
        """This library, which keeps nothing of finished prompts."""
        store = StoreConfig(sequence_bytes=0, write_back=False, learn_prefixes=False)
        return Engine.load(self.model, store=store, **self.options)

    def questions(self, engine: Engine) -> list[Question]:
        """The prompts; their chunks are encoded."""
        [found] = make_questions(
            engine,
            self.corpus,
            [self.prompt_tokens],
            chunk_tokens=self.chunk_tokens,
            new_tokens=self.new_tokens,
            rounds=self.rounds,
        )
        return found


def bench_memory(work: Workload, peers: Sequence[str]) -> list[MemoryRow]:
    """Let each peer answer all prompts, in a process of its own.

    Raises:
        CachedRAGError: a peer is not there, or a prompt does not fit.
    """
    spawn = multiprocessing.get_context("spawn")
    rows: list[MemoryRow] = []
    ids = None
    for peer in peers:
        if peer in _OTHER_PROGRAMS and ids is None:
            with ProcessPoolExecutor(1, spawn) as child:
                ids = child.submit(_ids, work).result()
        with ProcessPoolExecutor(1, spawn) as child:
            found = child.submit(_measured, work, peer, ids).result()
        imports, loaded, peak = (nbytes // _MIB for nbytes in found)
        base = rows[0].peak if rows else peak
        rows.append(MemoryRow(work.prompt_tokens, peer, imports, loaded, peak, peak / base))
    return rows


def _ids(work: Workload) -> list[tuple[int, ...]]:
    with work.engine() as engine:
        return [question.ids for question in work.questions(engine)]


def _measured(
    work: Workload, peer: str, ids: Sequence[tuple[int, ...]] | None
) -> tuple[int, int, int]:
    """Bytes held at most after the imports, after loading, and after the answers."""
    imports = peak_bytes()
    if peer in _OTHER_PROGRAMS:
        assert ids is not None
        questions = [Question(Rendered(""), one) for one in ids]  # it is given tokens, not text
        return (imports, *_asked(None, work, peer, questions))
    with work.engine() as engine:
        return (imports, *_asked(engine, work, peer, work.questions(engine)))


def _asked(
    engine: Engine | None, work: Workload, name: str, questions: Sequence[Question]
) -> tuple[int, int]:
    peers, _ = open_peers(Means(engine, work.model, work.context, work.gguf), [name])
    loaded = peak_bytes()
    try:
        for question in questions:
            peers[name].answer(question, work.new_tokens)
    finally:
        peers[name].close()
    return loaded, peak_bytes()
