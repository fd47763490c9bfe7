"""MapReduce and MapRerank: the ways of the CacheBlend paper's section 7 to ask without one prompt.

Each document is asked about by itself, all at the same time; then their summaries become one more
prompt, or the best answer is taken (LangChain's chains of these names). Not KV methods: each prompt
is prefilled in full, but for what prompts of one batch begin with alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from cached_rag.backends.tokenizer import Message
from cached_rag.config import GenerationConfig
from cached_rag.engine.decoding import Clock, Generation
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.measure import Reading, read, score
from cached_rag.evaluation.prompts import messages, summarise

_SUMMARY_TOKENS = 64


def map_reduce(
    engine: Engine, example: Example, config: GenerationConfig, reference: str | None, long: bool
) -> Reading:
    """Summaries of single documents, and one more prompt that makes an answer of them."""
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
    """Of the answers to single documents, the one that its own document makes likeliest.

    In the paper the model rates its answers in words, which models this small cannot: the mean log
    likelihood of an answer stands in for its score, and costs nothing but the answer.
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
    """What each document gives, and the milliseconds until the last of them is complete."""
    clock = Clock()
    found = engine.generate_batch(prompts, config)
    return found, clock.total()


def _computed(reports: Iterable[Report]) -> float:
    """Tokens of prompts that were computed in all layers."""
    return sum(report.charged_recompute * report.prompt_tokens for report in reports)


def _plain(engine: Engine, example: Example, long: bool) -> int:
    """Tokens of the prompt that these ways do without."""
    return engine.count_tokens(messages(example.chunks, example.question, long=long))


Several = Callable[[Engine, Example, GenerationConfig, str | None, bool], Reading]
SEVERAL: dict[str, Several] = {"mapreduce": map_reduce, "maprerank": map_rerank}
