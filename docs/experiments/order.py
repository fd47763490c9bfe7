"""What an order of chunks is worth that begins as an earlier prompt did.

Questions come one after another, each over chunks of one article, ranked for it by their vectors.
They are asked in this order; in the one that `Engine.order` makes of it (`reorder`); and, if it is
installed (`pip install --no-deps contextpilot==0.5.0`, and scipy), as ContextPilot (arXiv
2511.03475) writes the prompt: chunks in its order, in the system message, with a line that tells
their rank. Between two questions there is time for what engines do in the background.
"""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig, StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.measure import f1, right
from cached_rag.rag.answer import Prompts, Turn
from cached_rag.rag.chunks import Embedder
from docs.experiments.answers import Question
from docs.experiments.peers.llama_cpp import gguf_file
from docs.experiments.peers.llama_server import LlamaServer

_SYSTEM = "Answer the question with the help of the documents. Answer with a few words only."
ORDERS = ("ranked", "kept", "contextpilot")
SERVER = "llama-server"
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class OrderRow:
    """One method and order, means over questions.

    Attributes:
        method: one of this library's, or `llama-server`, which keeps the last prompt's beginning.
        right, f1: of the answers; None for the server, which is timed to its first token only.
        from_earlier: share of the prompts' tokens whose KV earlier prompts left; None where it is
            not told.
        charged: share of (token, layer) pairs that were computed; None likewise.
        ttft_ms: median of the milliseconds to the first token.
    """

    method: str
    order: str
    questions: int
    right: float | None
    f1: float | None
    from_earlier: float | None
    charged: float | None
    ttft_ms: float


@dataclass(frozen=True)
class _Said:
    ttft_ms: float
    tokens: int
    text: str | None = None
    kept: int | None = None
    charged: float | None = None


# Answers a question over chunks, ranked best first.
_Asks = Callable[[str, Sequence[str]], _Said]


def bench_order(
    model: Backend,
    examples: Sequence[Example],
    folder: str,
    *,
    name: str,
    methods: Sequence[str] = ("full", "prefix", "auto"),
    new_tokens: int = 16,
) -> list[OrderRow]:
    """Ask all questions with each method in each order, each of them in an engine of its own.

    Args:
        folder: for the chunks' KV, which all engines share.
        name: of the model, from which the server's file follows.
        methods: of this library, and `llama-server` for llama.cpp's server with the same file.
    """
    embedder, store = Embedder(), StoreConfig(path=folder, sequence_disk_bytes=0)
    found: dict[tuple[str, str], list[tuple[_Said, Example]]] = {}
    with ExitStack() as opened:
        asks: dict[tuple[str, str], _Asks] = {}
        for method in methods:
            for order in _orders(method):
                engine = opened.enter_context(Engine(model, store))
                chats = _CHATS[order](engine)
                if method == SERVER:
                    asks[method, order] = _of_server(name, engine, chats, opened)
                else:
                    asks[method, order] = _of_engine(engine, chats, method, new_tokens)
        for one in examples:
            texts = _ranked(embedder, one)
            for variant, ask in asks.items():
                found.setdefault(variant, []).append((ask(one.question, texts), one))
    return [_row(method, order, rows) for (method, order), rows in found.items()]


def _orders(method: str) -> list[str]:
    """Orders that a method is asked in: a server knows none that begins as what it kept."""
    is_there = {"contextpilot": find_spec("contextpilot") is not None, "kept": method != SERVER}
    return [order for order in ORDERS if is_there.get(order, True)]


# Makes a chat of a question and its chunks.
_Chats = Callable[[str, Sequence[str]], list[Turn]]


def _as_ranked(engine: Engine) -> _Chats:
    return Prompts(engine, _SYSTEM).messages


def _as_kept(engine: Engine) -> _Chats:
    prompts = Prompts(engine, _SYSTEM)
    return lambda question, texts: prompts.messages(
        question, [texts[at] for at in engine.order(texts)]
    )


def _as_contextpilot(engine: Engine) -> _Chats:
    """As its `optimize` does, with an index of its own."""
    from contextpilot import ContextPilot, api

    with contextlib.redirect_stdout(io.StringIO()):
        pilot = ContextPilot(use_gpu=False)

    def chat(question: str, texts: Sequence[str]) -> list[Turn]:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells what it does
            (ordered,), _ = pilot.reorder(list(texts))
        system = api._build_system_prompt(ordered, list(texts), _SYSTEM)
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]

    return chat


_CHATS: Mapping[str, Callable[[Engine], _Chats]] = {
    "ranked": _as_ranked,
    "kept": _as_kept,
    "contextpilot": _as_contextpilot,
}


def _of_engine(engine: Engine, chats: _Chats, method: str, new_tokens: int) -> _Asks:
    prompts = Prompts(engine, _SYSTEM)
    config = GenerationConfig(method=method, max_tokens=new_tokens)

    def ask(question: str, texts: Sequence[str]) -> _Said:
        engine.encode(texts, prompts.head())
        answer = engine.generate(prompts.rendered(chats(question, texts)), config)
        assert engine.write_back is not None
        engine.write_back.drain()
        report = answer.report
        return _Said(
            report.ttft_ms,
            report.prompt_tokens,
            answer.text,
            report.kept_tokens,
            report.charged_recompute,
        )

    return ask


def _of_server(model: str, engine: Engine, chats: _Chats, opened: ExitStack) -> _Asks:
    """llama.cpp's server, which is timed to its first token; the engine only makes the prompts."""
    server = LlamaServer(gguf_file(model), _MOST_TOKENS, torch.get_num_threads())
    opened.callback(server.close)
    prompts = Prompts(engine, _SYSTEM)

    def ask(question: str, texts: Sequence[str]) -> _Said:
        rendered = prompts.rendered(chats(question, texts))
        tokens, _ = engine.plan(rendered, "full", Report("full"))
        sample = server.answer(Question(rendered, tuple(tokens.ids)), 1)
        return _Said(sample.ttft_ms, len(tokens.ids))

    return ask


def _ranked(embedder: Embedder, one: Example) -> list[str]:
    """The chunks, those nearest to the question first."""
    vectors = embedder.embed([one.question, *one.chunks])
    nearness = (vectors[1:] @ vectors[0]).tolist()
    return [chunk for _, chunk in sorted(zip(nearness, one.chunks, strict=True), reverse=True)]


def _row(method: str, order: str, rows: Sequence[tuple[_Said, Example]]) -> OrderRow:
    said = [one for one, _ in rows]
    kept = [one.kept for one in said if one.kept is not None]
    return OrderRow(
        method,
        order,
        len(rows),
        _mean(right(one.text, asked.answers) for one, asked in rows if one.text is not None),
        _mean(f1(one.text, asked.answers) for one, asked in rows if one.text is not None),
        sum(kept) / sum(one.tokens for one in said) if kept else None,
        _mean(one.charged for one in said if one.charged is not None),
        statistics.median(one.ttft_ms for one in said),
    )


def _mean(values: Iterable[float]) -> float | None:
    """The mean; None if there is none."""
    found = list(values)
    return statistics.fmean(found) if found else None
