"""Time to first token of each method, against full prefill of the same ids in the same run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from cached_rag.methods import has_own_ratio

# A text of plain words: tokens are counted, so what it says does not matter.
_WORDS = [
    "river",
    "stone",
    "market",
    "lamp",
    "engine",
    "paper",
    "winter",
    "garden",
    "signal",
    "harbour",
    "copper",
    "letter",
    "music",
    "field",
    "answer",
    "window",
    "bridge",
    "valley",
    "number",
    "silver",
    "forest",
    "captain",
    "morning",
    "island",
    "castle",
    "village",
    "road",
]


@dataclass(frozen=True)
class TtftRow:
    """One method's figures.

    Attributes:
        ttft_ms: median time to first token.
        speedup: full prefill's median over this one.
        overhead_ms: median of what is neither loading nor computing: rendering, tokenising,
            matching, planning, sampling.
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
    on_round: Callable[[], None] = lambda: None,
) -> list[TtftRow]:
    """Encode modules once, then time every method in turn, `repeats` rounds after one to warm up.

    `auto` keeps its own ratio. Rows come in the order `transformers` (the model's own forward pass
    on the same ids), `full`, then `methods`. Speed-ups are against `full`.
    """
    if min(modules, module_tokens, question_tokens, repeats) < 1:
        raise ConfigError("modules, their tokens, question tokens and repeats must be at least 1")
    texts, question = make_texts(engine, modules, module_tokens, question_tokens)
    prefix = "Read these texts.\n\n"
    engine.encode(texts, prefix=prefix)
    prompt = prefix + "\n".join([*texts, question])
    names = list(dict.fromkeys(["full", *methods]))
    configs = {
        name: GenerationConfig(
            method=name, recompute_ratio=None if has_own_ratio(name) else ratio, max_tokens=1
        )
        for name in names
    }
    ids = torch.tensor([engine.prefill(prompt, configs["full"]).tokens.ids])
    samples: dict[str, list[list[float]]] = {name: [] for name in ["transformers", *names]}
    charged: dict[str, float] = {"transformers": 1.0}
    for round_ in range(repeats + 1):
        for name, config in configs.items():
            report = engine.generate(prompt, config).report
            charged[name] = report.charged_recompute
            busy = report.load_ms + report.fuse_ms
            figures = [report.ttft_ms, report.match_ms, report.load_ms, report.fuse_ms]
            if round_:
                samples[name].append([*figures, report.ttft_ms - busy])
        plain = _plain_ms(engine, ids)
        if round_:
            samples["transformers"].append([plain, 0.0, 0.0, plain, 0.0])
        on_round()
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in samples.items()
    }
    full = medians["full"][0]
    return [
        TtftRow(
            name,
            ids.shape[1],
            round(ttft, 2),
            round(full / ttft, 2),
            round(charged[name], 4),
            *[round(value, 2) for value in rest],
        )
        for name, (ttft, *rest) in medians.items()
    ]


def _plain_ms(engine: Engine, ids: torch.Tensor) -> float:
    """What transformers itself takes for these ids."""
    began = time.perf_counter()
    with engine.lock:
        int(engine.model.forward(ids)[0].argmax())
    return (time.perf_counter() - began) * 1000


def make_texts(
    engine: Engine, modules: int, module_tokens: int, question_tokens: int
) -> tuple[list[str], str]:
    """Distinct texts of so many tokens each (to within a word), and a question."""
    rng = random.Random(0)

    def text(tokens: int) -> str:
        words = [rng.choice(_WORDS) for _ in range(2 * tokens)]
        found = engine.tokenization.literal(" ".join(words))
        return " ".join(words)[: found.ends[tokens - 1]].strip()

    return [text(module_tokens) for _ in range(modules)], text(question_tokens)
