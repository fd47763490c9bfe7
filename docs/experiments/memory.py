"""Peak memory of whole answers: each peer in a process of its own, with the same prompts.

A process holds Python and this library's imports in each case; programs that run without them take
that much less by themselves, so the row says how much it is. Weights that are mapped from a file
count as far as they were read. Where another program answers, this library's engine is not there:
the prompts were made in a process before.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from cached_rag.backends.machine import peak_bytes
from cached_rag.config import StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from docs.experiments.answers import make_questions
from docs.experiments.peers import OTHERS, Means, Question, open_peers

_MIB = 1 << 20
_T = TypeVar("_T")


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


@dataclass(frozen=True)
class _Prepared:
    """What another program is given.

    Attributes:
        questions: the prompts.
        engine: stands for the engine; it knows what its model is, and holds nothing.
    """

    questions: list[Question]
    engine: SimpleNamespace


def bench_memory(work: Workload, peers: Sequence[str]) -> list[MemoryRow]:
    """Let each peer answer all prompts, in a process of its own.

    Raises:
        CachedRAGError: a peer is not there, or computes elsewhere, or a prompt does not fit.
    """
    for peer in peers:
        if peer == "vllm" or "@" in peer:
            raise ConfigError(
                f"the memory of {peer!r} cannot be seen from here: a server has processes of its "
                "own; for a method in another backend give --backend"
            )
    rows: list[MemoryRow] = []
    prepared = _apart(_prepared, work) if set(peers) & set(OTHERS) else None
    for peer in peers:
        found = _apart(_measured, work, peer, prepared if peer in OTHERS else None)
        imports, loaded, peak = (nbytes // _MIB for nbytes in found)
        base = rows[0].peak if rows else peak
        rows.append(MemoryRow(work.prompt_tokens, peer, imports, loaded, peak, peak / base))
    return rows


def _apart(run: Callable[..., _T], *args: Any) -> _T:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        return child.submit(run, *args).result()


def _prepared(work: Workload) -> _Prepared:
    with work.engine() as engine:
        model = engine.model
        facts = SimpleNamespace(
            name=model.name,
            shapes=model.shapes,
            tokenizer=model.tokenizer,
            context_length=model.context_length,
        )
        return _Prepared(work.questions(engine), SimpleNamespace(model=facts))


def _measured(work: Workload, peer: str, prepared: _Prepared | None) -> tuple[int, int, int]:
    """Bytes held at most after the imports, after loading, and after the answers."""
    imports = peak_bytes()
    if prepared is not None:
        loaded, peak = _asked(cast(Engine, prepared.engine), work, peer, prepared.questions)
    else:
        with work.engine() as engine:
            loaded, peak = _asked(engine, work, peer, work.questions(engine))
    # The kernel counts in batches, so what was the most may fall a bit.
    return imports, max(imports, loaded), max(imports, loaded, peak)


def _asked(
    engine: Engine, work: Workload, name: str, questions: Sequence[Question]
) -> tuple[int, int]:
    peers, _ = open_peers(Means(engine, work.model, work.context, work.gguf), [name])
    loaded = peak_bytes()
    try:
        for question in questions:
            peers[name].answer(question, work.new_tokens)
    finally:
        peers[name].close()
    return loaded, peak_bytes()
