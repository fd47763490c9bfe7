"""Prompts of PML schemas against full prefill: one prompt by several methods; growing prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from cached_rag.backends.base import Backend
from cached_rag.config import StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from cached_rag.evaluation.summary import new_figure, save
from cached_rag.evaluation.timing import NEW_PROMPTS, check_prompts_are_new, make_texts, medians
from cached_rag.pml import Import, Schema, SchemaPrompt
from docs.experiments.loading import forget_pages

_MODULE_TOKENS = 512


@dataclass(frozen=True)
class PromptRow:
    """One method on one prompt.

    Attributes:
        ttft_ms: median milliseconds to the first token.
        speedup: the first method's `ttft_ms` over this one's.
        text: the answer.
    """

    method: str
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    speedup: float
    text: str


@dataclass(frozen=True)
class LengthRow:
    """Median milliseconds to the first token of a prompt: full prefill, KV in memory, on disk."""

    prompt_tokens: int
    full_ms: float
    memory_ms: float
    disk_ms: float


@dataclass(frozen=True)
class Footprint:
    """Bytes of KV per token: by formula (Prompt Cache, table 2), in memory, and in files."""

    formula: int
    memory: float
    disk: float | None


def bench_prompt(
    engine: Engine,
    prompt: SchemaPrompt,
    methods: Sequence[str] = ("full", "reuse", "auto"),
    *,
    max_tokens: int = 48,
    repeats: int = 3,
) -> list[PromptRow]:
    """Answer a prompt by each method, which warms up; then time their first tokens in turn.

    Raises:
        ConfigError: the engine keeps finished prompts.
    """
    check_prompts_are_new(engine)
    prompt.schema.encode(engine)
    answers = {m: engine.generate(prompt, method=m, max_tokens=max_tokens) for m in methods}
    variants = {method: partial(_first_token, engine, prompt, method) for method in methods}
    times = medians(variants, repeats, warm_up=0)
    first = times[methods[0]]["ttft_ms"]
    rows = []
    for method, answer in answers.items():
        ttft, report = times[method]["ttft_ms"], answer.report
        counts = report.prompt_tokens, report.cached_tokens
        rows.append(PromptRow(method, *counts, ttft, first / ttft, answer.text))
    return rows


def _first_token(engine: Engine, prompt: SchemaPrompt, method: str) -> dict[str, float]:
    return {"ttft_ms": engine.generate(prompt, method=method, max_tokens=1).report.ttft_ms}


def footprint(engine: Engine) -> Footprint:
    """Bytes per token of an engine's KV, all of which must be in memory.

    Raises:
        ConfigError: no KV is in memory.
    """
    library = engine.library
    held = sum(kv.seq_len for tier in library.shelf.memory for kv in tier.held.values())
    if not held:
        raise ConfigError("nothing is in memory, so there is nothing to weigh")
    disk = library.shelf.disk.nbytes / held if library.shelf.disk is not None else None
    return Footprint(engine.model.shapes.bytes_per_token, library.shelf.memory_bytes() / held, disk)


def bench_lengths(
    model: Backend,
    lengths: Sequence[int],
    folder: Path,
    *,
    method: str = "reuse",
    repeats: int = 3,
    on_round: Callable[[], object] = lambda: None,
) -> list[LengthRow]:
    """Time prompts of several lengths, cached except for the question (Prompt Cache, figure 5).

    All lengths and ways take turns within one run. With KV on disk, every request has a new engine,
    and the files' pages are dropped from the system's cache first, where it allows that (Linux).

    Raises:
        ConfigError: a length is below 64 tokens, or exceeds the model's context.
    """
    if not lengths or min(lengths) < 64 or max(lengths) >= model.context_length:
        raise ConfigError(
            f"lengths are from 64 to {model.context_length - 1} tokens, what {model.name} reads"
        )
    settings = dataclasses.replace(NEW_PROMPTS, path=str(folder), write_back=False)
    with Engine(model, settings) as engine:
        prompts = [_prompt_of(engine, length) for length in lengths]
        for prompt in prompts:
            prompt.schema.encode(engine)
        tokens = [engine.count_tokens(prompt) for prompt in prompts]
        variants: dict[tuple[int, str], Callable[[], dict[str, float]]] = {}
        for number, prompt in enumerate(prompts):
            variants[number, "full"] = partial(_first_token, engine, prompt, "full")
            variants[number, "memory"] = partial(_first_token, engine, prompt, method)
            variants[number, "disk"] = partial(_from_disk, model, settings, prompt, method)
        found = medians(variants, repeats, on_round=on_round)
    return [
        LengthRow(count, *(found[number, way]["ttft_ms"] for way in ("full", "memory", "disk")))
        for number, count in enumerate(tokens)
    ]


def _from_disk(
    model: Backend, settings: StoreConfig, prompt: SchemaPrompt, method: str
) -> dict[str, float]:
    forget_pages(Path(str(settings.path)))
    with Engine(model, dataclasses.replace(settings, pipelined=False)) as fresh:
        prompt.planner(fresh)
        return _first_token(fresh, prompt, method)


def _prompt_of(engine: Engine, length: int) -> SchemaPrompt:
    """A prompt of about `length` tokens, in modules of equal size."""
    count = -(-length // _MODULE_TOKENS)
    *texts, question = make_texts(engine, *[(length - 24) // count] * count, 16)
    modules = "\n".join(
        f'<module name="text-{number}">{escape(text)}</module>' for number, text in enumerate(texts)
    )
    schema = Schema.from_string(f'<schema name="texts-{length}">{modules}</schema>')
    return schema.prompt(*(Import(f"text-{number}") for number in range(count)), question)


def plot_lengths(rows: Sequence[LengthRow], path: Path) -> None:
    """Draw time to first token against length, both axes logarithmic.

    Raises:
        EvaluationError: matplotlib is missing, or does not know the format.
    """
    figure, axes = new_figure()
    tokens = [row.prompt_tokens for row in rows]
    for label, name in (
        ("full prefill", "full_ms"),
        ("cached, KV on disk", "disk_ms"),
        ("cached, KV in memory", "memory_ms"),
    ):
        axes.loglog(tokens, [getattr(row, name) for row in rows], marker="o", label=label)
    axes.set(xlabel="prompt tokens", ylabel="time to first token, ms")
    axes.set_xticks(tokens, [str(count) for count in tokens], minor=False)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    save(figure, path)
