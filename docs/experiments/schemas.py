"""What a schema's layouts, encodings and methods cost in quality, against full prefill.

Prompts are drawn at random from a schema. Each is prefilled in full, as plain text would be, and
answered; then every trial is scored by the likelihood of that answer. Knows no file.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.evaluation.measure import Measurement, figures, read
from cached_rag.evaluation.summary import Interval, bootstrap
from cached_rag.pml import Import, Said, Schema, SchemaPrompt
from cached_rag.pml.nodes import Message, Module, Node, Union, params
from cached_rag.pml.schema import LAYOUTS
from cached_rag.pml.units import BEHIND

_QUESTIONS = (
    "Summarise what you were told in two sentences.",
    "What matters most here, and why?",
    "Name one thing that is said above and explain it.",
)


@dataclass(frozen=True)
class SchemaTrial:
    """One way to serve a schema's prompts: `layout` and `behind` as in `Schema`, and a method."""

    layout: str
    behind: str
    method: str


@dataclass(frozen=True)
class SchemaRow:
    """One trial's figures over all prompts.

    Attributes:
        kl: divergence of the first token's distribution from full prefill's.
        agreement: share of prompts whose first token is full prefill's.
        nll: negative log likelihood per token of full prefill's answer, less full prefill's own.
        speedup: full prefill's median time to first token over this trial's.
        charged: share of all (token, layer) pairs that was computed.
    """

    trial: SchemaTrial
    kl: Interval
    agreement: float
    nll: Interval
    speedup: float
    charged: float


def schema_trials(methods: Sequence[str]) -> list[SchemaTrial]:
    """All combinations of a layout, an encoding and one of the methods."""
    layouts = [layout for layout in LAYOUTS if layout != "auto"]
    return [SchemaTrial(la, b, m) for la in layouts for b in BEHIND for m in methods]


def evaluate_schema(
    engine: Engine,
    schema: Schema,
    trials: Sequence[SchemaTrial],
    *,
    prompts: int = 20,
    answer_tokens: int = 32,
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> list[SchemaRow]:
    """Serve random prompts of a schema by every trial.

    Raises:
        RelocationError: a compact layout on a model whose keys cannot be moved.
    """
    rng = random.Random(seed)
    found: dict[SchemaTrial, list[tuple[dict[str, Any], Measurement, Measurement]]] = {}
    for number in range(prompts):
        prompt = random_prompt(schema, rng, _QUESTIONS[number % len(_QUESTIONS)])
        config = GenerationConfig(method="full", max_tokens=answer_tokens)
        answered = read(engine, prompt, config, None)
        full = read(engine, prompt, config, answered.text, generates=False)
        for trial in trials:
            laid_out = replace(schema, layout=trial.layout, behind=trial.behind)
            asked = replace(prompt, schema=laid_out)
            how = config.replace(method=trial.method)
            engine.prefill(asked, how).release()  # encodes what is missing
            reading = read(engine, asked, how, answered.text, generates=False)
            found.setdefault(trial, []).append((figures(reading, full, ()), reading, full))
        progress()
    return [_row(trial, readings) for trial, readings in found.items()]


def _row(
    trial: SchemaTrial, readings: list[tuple[dict[str, Any], Measurement, Measurement]]
) -> SchemaRow:
    paired = [(r.nll, f.nll) for _, r, f in readings if r.nll is not None and f.nll is not None]
    return SchemaRow(
        trial,
        bootstrap([scores["kl"] for scores, _, _ in readings]),
        statistics.mean(scores["agreement"] for scores, _, _ in readings),
        bootstrap([ours - full for ours, full in paired]),
        statistics.median(f.ttft_ms for _, _, f in readings)
        / statistics.median(r.ttft_ms for _, r, _ in readings),
        statistics.mean(r.charged_recompute for _, r, _ in readings),
    )


def random_prompt(schema: Schema, rng: random.Random, question: str) -> SchemaPrompt:
    """A prompt with one module of every union, every other module, and short arguments."""
    parts = tuple(_imports(schema.node.children, rng))
    arguments = _arguments(schema.node.children)
    asked = Said("user", question) if schema.node.is_chat else question
    return schema.prompt(*parts, asked, **arguments)


def _imports(children: tuple[Node, ...], rng: random.Random) -> Iterator[Import]:
    for child in children:
        if isinstance(child, Module):
            yield _import(child, rng)
        elif isinstance(child, Union):
            yield _import(rng.choice(child.children), rng)
        elif isinstance(child, Message):
            yield from _imports(child.children, rng)


def _import(module: Module, rng: random.Random) -> Import:
    inside = _imports(module.children, rng)
    return Import(module.name, *inside, **_arguments(module.children))


def _arguments(children: tuple[Node, ...]) -> dict[str, str]:
    """An argument for every parameter: one word, which is one token in most vocabularies."""
    return {name: "it" if param.lead else " it" for name, param in params(children).items()}
