"""What a GPU gives, on a machine that has no model: `make test-gpu`.

Results are held to the CPU's on tiny models, times are of a model with random weights.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cached_rag import Engine
from cached_rag.config import GenerationConfig
from cached_rag.evaluation.timing import (
    NEW_PROMPTS,
    bench_ttft,
    configs_of,
    make_prompt,
    make_texts,
    medians,
    milliseconds,
)
from cached_rag.spi import LanguageModel
from docs.experiments.attention import bench_attention, query_heads
from docs.experiments.serving import bench_serving
from docs.experiments.traffic import bench_traffic

ROOT = Path(__file__).parents[2]
METHODS = ("auto", "anchorflow:recompute_ratio=0.3", "fast", "reuse")


@dataclass(frozen=True)
class Sizes:
    """How long prompts are.

    Attributes:
        chunks: how many the short and the long prompts have.
        shared_tokens: what prompts of `relay` begin with.
    """

    chunks: tuple[int, int] = (8, 32)
    chunk_tokens: int = 512
    answer_tokens: int = 32
    shared_tokens: tuple[int, ...] = (2048, 8192)
    requests: int = 16
    repeats: int = 3


SMALL = Sizes(
    chunks=(2, 3), chunk_tokens=16, answer_tokens=4, shared_tokens=(16,), requests=2, repeats=1
)


@dataclass(frozen=True)
class WholeRow:
    """Whole answers of one method; medians.

    Attributes:
        ttft_ms, total_ms: milliseconds to the first token, and to the last.
        token_ms: milliseconds of each later token.
        speedup: transformers' `total_ms` over this one.
    """

    method: str
    prompt_tokens: int
    ttft_ms: float
    total_ms: float
    token_ms: float
    speedup: float


def first_tokens(model: LanguageModel, sizes: Sizes) -> Iterator[Sequence[Any]]:
    """Times to the first token of a short and a long prompt."""
    for chunks in sizes.chunks:
        with Engine(model, NEW_PROMPTS) as engine:
            yield bench_ttft(
                engine,
                configs_of(METHODS),
                modules=chunks,
                module_tokens=sizes.chunk_tokens,
                repeats=sizes.repeats,
            )


def whole_answers(model: LanguageModel, sizes: Sizes) -> Iterator[Sequence[WholeRow]]:
    """Answers of one length, beside transformers' own `generate` on the same ids."""
    device = model.shapes.device
    for chunks in sizes.chunks:
        with Engine(model, NEW_PROMPTS) as engine:
            contexts = (engine.primer, None)
            prompt, _ = make_prompt(engine, chunks, sizes.chunk_tokens, 32, contexts)
            ids = engine.prefill(prompt, method="full").tokens.ids
            given = torch.tensor([ids], device=device)
            variants: dict[str, Callable[[], dict[str, float]]] = {
                "transformers": partial(_generated, model, given, sizes.answer_tokens)
            }
            for method in ("full", "auto", "fast"):
                variants[method] = partial(_answered, engine, prompt, method, sizes.answer_tokens)
            found = medians(variants, sizes.repeats)
        whole = found["transformers"]["total_ms"]
        yield [
            WholeRow(
                method,
                len(ids),
                figures["ttft_ms"],
                figures["total_ms"],
                (figures["total_ms"] - figures["ttft_ms"]) / max(1, sizes.answer_tokens - 1),
                whole / figures["total_ms"],
            )
            for method, figures in found.items()
        ]


def _generated(model: LanguageModel, ids: torch.Tensor, tokens: int) -> dict[str, float]:
    device, generate = model.shapes.device, model.decoder.model.generate

    def spent(count: int) -> float:
        how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        with torch.inference_mode():
            return milliseconds(
                lambda: generate(ids, attention_mask=torch.ones_like(ids), **how), device
            )

    return {"ttft_ms": spent(1), "total_ms": spent(tokens)}


def _answered(engine: Engine, prompt: str, method: str, tokens: int) -> dict[str, float]:
    config = GenerationConfig(method, max_tokens=tokens, ignore_eos=True, drafts=False)
    report = engine.generate(prompt, config).report
    return {"ttft_ms": report.ttft_ms, "total_ms": report.total_ms}


def relay(model: LanguageModel, sizes: Sizes) -> Iterator[Sequence[Any]]:
    """Many answers behind one beginning (RelayAttention, figures 7 and 10), and one layer's."""
    for shared in sizes.shared_tokens:
        yield bench_serving(
            model,
            shared_tokens=shared,
            requests=sizes.requests,
            new_tokens=sizes.answer_tokens,
            repeats=sizes.repeats,
            methods=("relay", "copied", "recomputed"),
        )
        yield bench_attention(
            model.shapes,
            query_heads(model),
            batches=(1, sizes.requests, 4 * sizes.requests),
            lengths=[shared],
            repeats=sizes.repeats,
        )


def batches(model: LanguageModel, sizes: Sizes) -> Iterator[Sequence[Any]]:
    """Clients that ask at the same time, each over chunks drawn from a few that all share.

    A table a method, so that none is lost with the next; its speed-up is over its own one client.
    """
    with Engine(model, NEW_PROMPTS) as engine:
        per_prompt = sizes.chunks[0]
        texts = make_texts(engine, *[sizes.chunk_tokens] * (2 * per_prompt))
        chance = random.Random(0)
        questions = [
            (chance.sample(texts, per_prompt), f"What does text {number} say?")
            for number in range(sizes.requests)
        ]
        for method in ("full", "auto"):
            yield bench_traffic(
                engine,
                questions,
                name="drawn",
                methods=[method],
                clients=(1, sizes.requests),
                new_tokens=sizes.answer_tokens,
                drafts=False,
            )


PARTS: dict[str, Callable[[LanguageModel, Sizes], Iterator[Sequence[Any]]]] = {
    "first-tokens": first_tokens,
    "answers": whole_answers,
    "relay": relay,
    "batches": batches,
}
EQUALITY = "equality"


def run_apart(parts: Sequence[str], shape: str, device: str, folder: Path, seconds: float) -> int:
    """Run each part in a process of its own, so that none takes another with it.

    What a part prints is shown, and is kept in the folder as it comes.

    Args:
        seconds: for all parts together; each may take an equal share of what is left of it.

    Returns:
        How many failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ends, failed = time.monotonic() + seconds, 0
    env = os.environ | {
        "CACHED_RAG_TEST_DEVICE": torch.device(device).type,
        "COLUMNS": "200",  # of tables in a file
        "PYTHONUNBUFFERED": "1",
    }
    for done, part in enumerate(parts):
        command = [sys.executable, "-m", "docs.experiments", "gpu", part]
        command += ["--shape", shape, "--device", device]
        if part == EQUALITY:
            command = [sys.executable, "-m", "pytest", "tests/backends/test_cuda.py"]
        began = time.monotonic()
        share = max(1.0, (ends - began) / (len(parts) - done))
        is_done = _runs(command, env, folder / f"{part}.txt", share)
        failed += not is_done
        spent = time.monotonic() - began
        print(f"{part}: {'done' if is_done else 'FAILED'} after {spent:.0f} s", flush=True)
    return failed


def _runs(command: Sequence[str], env: Mapping[str, str], output: Path, seconds: float) -> bool:
    """Whether a command ends well in time; what it prints is kept in a file, and shown."""
    with output.open("w+", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            done = None
        file.seek(0)
        print(file.read(), flush=True)
    return done is not None and done.returncode == 0
