"""MapReduce and MapRerank, which ask about each document by itself (CacheBlend, section 7).

All documents are asked about at the same time, a prompt each. MapReduce summarises each of them and
asks one more prompt about the summaries; MapRerank takes the best answer (LangChain's chains of
these names). They are not KV methods: each prompt is prefilled in full, except for the beginning
that all prompts of a batch have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from cached_rag.backends.prompt_text import Message
from cached_rag.config import GenerationConfig
from cached_rag.engine.decoding import Generation
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Clock, Report
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.measure import Reading, read, score
from cached_rag.evaluation.prompts import messages, summarise

_SUMMARY_TOKENS = 64


def map_reduce(
    engine: Engine, example: Example, config: GenerationConfig, reference: str | None, long: bool
) -> Reading:
    """Summarise each document, and answer from the summaries."""
    prompts = [summarise(chunk, example.question) for chunk in example.chunks]
    summaries, spent = _mapped(engine, prompts, config.replace(max_tokens=_SUMMARY_TOKENS))
    reduced = messages([s.text.strip() for s in summaries], example.question, long=long)
    last = read(engine, reduced, config, reference)
    computed = _computed(s.report for s in summaries)
    computed += last.charged_recompute * engine.count_tokens(reduced)
    return dataclasses.replace(
        last,
        ttft_ms=spent + last.ttft_ms,
        charged_recompute=computed / _plain(engine, example, long),
    )


def map_rerank(
    engine: Engine, example: Example, config: GenerationConfig, reference: str | None, long: bool
) -> Reading:
    """Answer from each document alone, and take the answer that is likeliest given its document.

    In the paper the model rates its answers in words, which small models cannot do. Here the score
    of an answer is its mean log likelihood, which needs no further prompt.
    """
    prompts = [messages([chunk], example.question, long=long) for chunk in example.chunks]
    answers, spent = _mapped(engine, prompts, config)
    parts = [
        score(engine, prompt, config, reference, answer.text)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    best = min(parts, key=lambda part: float("inf") if part.own_nll is None else part.own_nll)
    computed = _computed(answer.report for answer in answers)
    return dataclasses.replace(
        best, ttft_ms=spent, charged_recompute=computed / _plain(engine, example, long)
    )


def _mapped(
    engine: Engine, prompts: Sequence[Sequence[Message]], config: GenerationConfig
) -> tuple[list[Generation], float]:
    """The answers to all prompts, and the milliseconds until the last one is complete."""
    clock = Clock()
    found = engine.generate_batch(prompts, config)
    return found, clock.total()


def _computed(reports: Iterable[Report]) -> float:
    """Prompt tokens computed, in tokens computed in all layers."""
    return sum(report.charged_recompute * report.prompt_tokens for report in reports)


def _plain(engine: Engine, example: Example, long: bool) -> int:
    """Tokens of the one prompt with all documents, which these ways replace."""
    return engine.count_tokens(messages(example.chunks, example.question, long=long))


Several = Callable[[Engine, Example, GenerationConfig, str | None, bool], Reading]
SEVERAL: dict[str, Several] = {"mapreduce": map_reduce, "maprerank": map_rerank}
