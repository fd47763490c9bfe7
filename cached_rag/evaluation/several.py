"""MapReduce and MapRerank: the ways of the CacheBlend paper's section 7 to ask without one prompt.

Each document is asked by itself; then the answers are combined, or the best one is taken. Not KV
methods: each prompt is prefilled in full.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cached_rag.config import GenerationConfig
from cached_rag.engine import Engine
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.measure import Reading, read
from cached_rag.evaluation.prompts import combine, messages


def map_reduce(
    engine: Engine, example: Example, config: GenerationConfig, reference: str | None, long: bool
) -> Reading:
    """Answers of single documents, and one more prompt that makes one answer of them."""
    parts, spent = _mapped(engine, example, config, None, long)
    prompt = combine([part.text or "" for part in parts], example.question, long=long)
    last = read(engine, prompt, config, reference)
    return dataclasses.replace(last, ttft_ms=spent + last.ttft_ms)


def map_rerank(
    engine: Engine, example: Example, config: GenerationConfig, reference: str | None, long: bool
) -> Reading:
    """The answer that its own document makes likeliest, by mean log likelihood.

    The paper has the model rate itself in words, which models this small cannot.
    """
    parts, spent = _mapped(engine, example, config, reference, long)
    best = min(parts, key=lambda part: float("inf") if part.own_nll is None else part.own_nll)
    return dataclasses.replace(best, ttft_ms=spent)


def _mapped(
    engine: Engine, example: Example, config: GenerationConfig, reference: str | None, long: bool
) -> tuple[list[Reading], float]:
    """What each document gives, and the milliseconds until the last answer is complete."""
    prompts = [messages([chunk], example.question, long=long) for chunk in example.chunks]
    parts = [read(engine, prompt, config, reference) for prompt in prompts]
    return parts, sum(part.total_ms for part in parts)


Several = Callable[[Engine, Example, GenerationConfig, str | None, bool], Reading]
SEVERAL: dict[str, Several] = {"mapreduce": map_reduce, "maprerank": map_rerank}
