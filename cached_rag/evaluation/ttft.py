"""Time to first token of each method against full prefill of the same ids, and of ingestion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.evaluation.loop import medians, milliseconds
from cached_rag.evaluation.texts import check_prompts_are_new, make_prompt
from cached_rag.library.encode import BATCH_TOKENS, encode_chunks
from cached_rag.library.matching import EncodedAfter
from cached_rag.methods import has_own_ratio

PLAIN = "transformers"


@dataclass(frozen=True)
class TtftRow:
    """One method's medians.

    Attributes:
        ttft_ms: milliseconds to the first token.
        speedup: full prefill's `ttft_ms` over this one.
        charged_recompute, match_ms, load_ms, fuse_ms: as in `Report`.
        overhead_ms: milliseconds of `ttft_ms` that are neither loading nor computing: rendering,
            tokenising, matching, planning, sampling.
    """

    method: str
    prompt_tokens: int
    ttft_ms: float
    speedup: float
    charged_recompute: float
    match_ms: float
    load_ms: float
    fuse_ms: float
    overhead_ms: float


def bench_ttft(
    engine: Engine,
    *,
    modules: int = 8,
    module_tokens: int = 512,
    question_tokens: int = 32,
    methods: Sequence[str] = ("reuse", "cacheblend"),
    ratio: float = 0.15,
    repeats: int = 5,
) -> list[TtftRow]:
    """Encode a document's chunks as an index does, and time every method on a prompt of them.

    The first row, `transformers`, is the model's own forward pass on the same ids; then come `full`
    and `methods`. A method with a ratio of its own, such as `auto`, keeps it.

    Raises:
        ConfigError: a count below 1, an unknown method, or an engine that keeps finished prompts.
    """
    check_prompts_are_new(engine)
    configs = {name: _config(name, ratio) for name in dict.fromkeys(["full", *methods])}
    contexts = (engine.primer, None)
    prompt, _ = make_prompt(engine, modules, module_tokens, question_tokens, contexts)
    ids = torch.tensor([engine.prefill(prompt, configs["full"]).tokens.ids])
    variants = {PLAIN: partial(_plain, engine, ids)}
    for name, config in configs.items():
        variants[name] = partial(_asked, engine, prompt, config)
    found = medians(variants, repeats)
    full = found["full"]["ttft_ms"]
    return [
        TtftRow(name, ids.shape[1], speedup=full / figures["ttft_ms"], **figures)
        for name, figures in found.items()
    ]


def _config(method: str, ratio: float) -> GenerationConfig:
    given = None if has_own_ratio(method) else ratio
    return GenerationConfig(method=method, recompute_ratio=given, max_tokens=1)


def _asked(engine: Engine, prompt: str, config: GenerationConfig) -> dict[str, float]:
    report = engine.generate(prompt, config).report
    names = ("ttft_ms", "charged_recompute", "match_ms", "load_ms", "fuse_ms")
    overhead = report.ttft_ms - report.load_ms - report.fuse_ms
    return {name: getattr(report, name) for name in names} | {"overhead_ms": overhead}


def _plain(engine: Engine, ids: torch.Tensor) -> dict[str, float]:
    """Figures of the model's own forward pass."""
    with engine.lock:
        spent = milliseconds(lambda: engine.model.forward(ids).argmax(), engine.model.shapes.device)
    figures = {"ttft_ms": spent, "charged_recompute": 1.0, "match_ms": 0.0, "load_ms": 0.0}
    return figures | {"fuse_ms": spent, "overhead_ms": 0.0}


@dataclass(frozen=True)
class IngestRow:
    """Encoding chunks into the store, and the model's own forward pass over the same batches.

    Attributes:
        ratio: `tokens_per_s` over `plain_tokens_per_s`.
    """

    tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float


def bench_ingest(
    engine: Engine, *, modules: int = 8, module_tokens: int = 512, repeats: int = 3
) -> IngestRow:
    """Time both in turn on random tokens, in batches of the encoder's size."""
    generator = torch.Generator().manual_seed(0)
    size = (modules, module_tokens)
    ids = torch.randint(0, engine.model.vocab_size, size, generator=generator)
    batches = torch.split(ids, max(1, BATCH_TOKENS // module_tokens))

    def encode() -> None:
        for kv in encode_chunks(engine.model, [None], list(map(tuple, ids.tolist()))):
            engine.library.put(EncodedAfter((0,)), kv)

    def forward() -> None:
        for batch in batches:
            engine.model.forward(batch)

    def rate(work: Callable[[], None]) -> dict[str, float]:
        spent = milliseconds(work, engine.model.shapes.device)
        return {"tokens_per_s": 1000 * ids.numel() / spent}

    found = medians({"own": lambda: rate(encode), "plain": lambda: rate(forward)}, repeats)
    own, plain = (figures["tokens_per_s"] for figures in found.values())
    return IngestRow(own, plain, own / plain)
