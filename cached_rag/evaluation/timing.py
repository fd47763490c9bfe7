"""Times of variants that take turns: to the first token with each method, and of ingestion.

When a machine is slow for a while, all variants are slow. So the ratios of their times within one
run can be trusted where the times cannot. Prompts are of random words, as only the number of
tokens matters.
"""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from cached_rag.config import MOST_PRIMERS, GenerationConfig, StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.library.encode import BATCH_TOKENS, Context, encode_chunks, primer
from cached_rag.library.matching import EncodedAfter
from cached_rag.methods import SELECTORS, is_compared_at

Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")


def take_turns(
    variants: Mapping[Name, Callable[[], Sample]],
    rounds: int,
    *,
    warm_up: int = 1,
    on_round: Callable[[], object] = lambda: None,
) -> dict[Name, list[Sample]]:
    """Call every variant once in each round, and collect what it returns.

    Each round begins with the next variant, so that none always runs in the same place.

    Args:
        rounds: how many rounds are kept.
        warm_up: how many rounds come before these and are discarded.
        on_round: called after every round, also of the warm-up; for a progress bar.

    Raises:
        ConfigError: there is no variant, or no round to keep.
    """
    if not variants or rounds < 1:
        raise ConfigError("there is nothing to measure: give at least one variant and one round")
    samples: dict[Name, list[Sample]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            sample = variants[name]()
            if number >= warm_up:
                samples[name].append(sample)
        on_round()
    return samples


def medians(
    variants: Mapping[Name, Callable[[], Mapping[str, float]]],
    rounds: int,
    *,
    warm_up: int = 1,
    on_round: Callable[[], object] = lambda: None,
) -> dict[Name, dict[str, float]]:
    """As `take_turns`, for variants that return figures by name: the median of each figure."""
    samples = take_turns(variants, rounds, warm_up=warm_up, on_round=on_round)
    return {
        name: {figure: statistics.median(one[figure] for one in found) for figure in found[0]}
        for name, found in samples.items()
    }


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, until its device has finished the work."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return (time.perf_counter() - began) * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PREFIX = "Read these texts.\n\n"


# Where every prompt is a new one.
NEW_PROMPTS = StoreConfig(sequence_bytes=0)


def make_texts(engine: Engine, *sizes: int) -> list[str]:
    """Distinct texts of about `sizes` tokens each, of the primers' words; the same ones every time.

    These are many words, for `auto` takes a few in any order for a table of numbers.

    Raises:
        ConfigError: a size below 1.
    """
    if min(sizes, default=0) < 1:
        raise ConfigError(f"there must be texts, each of at least one token, not {sizes}")
    passages = (passage for one in primer(MOST_PRIMERS).ways for passage in one.before(""))
    rng, known = random.Random(0), sorted(set(" ".join(passages).split()))

    def text(tokens: int) -> str:
        words = " ".join(rng.choice(known) for _ in range(2 * tokens))
        return words[: engine.tokenization.literal(words).ends[tokens - 1]].strip()

    return [text(size) for size in sizes]


def make_prompt(
    engine: Engine,
    texts: int,
    text_tokens: int,
    question_tokens: int,
    contexts: Sequence[Context | None] = (None,),
) -> tuple[str, list[str]]:
    """Encode random texts behind `PREFIX` and each of the contexts, as those of one document.

    Returns:
        A prompt of `PREFIX`, the texts and a question; and the texts.

    Raises:
        ConfigError: a count below 1.
        ContextOverflowError: they do not fit the model's context.
    """
    least, room = texts * text_tokens + question_tokens, engine.model.context_length
    if least >= room:
        raise ContextOverflowError(
            f"{texts} chunks of {text_tokens} tokens and a question of {question_tokens} do not "
            f"fit the model's context of {room} tokens; take fewer or shorter ones"
        )
    *given, question = make_texts(engine, *[text_tokens] * texts, question_tokens)
    engine.encode([given], prefix=PREFIX, context=contexts)
    return PREFIX + "\n".join([*given, question]), given


def check_prompts_are_new(engine: Engine) -> None:
    """Refuse an engine that keeps KV of finished prompts.

    Raises:
        ConfigError: it does.
    """
    if engine.sequences.max_bytes:
        raise ConfigError(
            "this engine keeps the KV of finished prompts, so a prompt that is asked again is no "
            "new one, and what it costs says nothing of its method; make the engine with "
            "StoreConfig(sequence_bytes=0)"
        )


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
        total_ms: milliseconds of the whole answer; None for the model's own forward pass.
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
    total_ms: float | None = None


def configs_of(
    methods: Sequence[str], ratio: float = 0.15, new_tokens: int = 1
) -> dict[str, GenerationConfig]:
    """`full` and these methods as settings, by name, for answers of so many tokens without drafts.

    Args:
        ratio: share of cached tokens to recompute; a method with one of its own, such as `auto`,
            keeps it.

    Raises:
        ConfigError: an unknown method, or a number out of range.
    """
    return {
        method: GenerationConfig(
            method=method,
            recompute_ratio=ratio if is_compared_at(method, SELECTORS) else None,
            max_tokens=new_tokens,
            ignore_eos=True,
            drafts=False,
        )
        for method in ("full", *methods)
    }


def bench_ttft(
    engine: Engine,
    configs: Mapping[str, GenerationConfig],
    *,
    modules: int = 8,
    module_tokens: int = 512,
    question_tokens: int = 32,
    repeats: int = 5,
) -> list[TtftRow]:
    """Encode a document's chunks as an index does, and time every method on a prompt of them.

    The first row, `transformers`, is the model's own forward pass on the same ids; then come those
    of `configs_of`.

    Raises:
        ConfigError: a count below 1, or an engine that keeps finished prompts.
    """
    check_prompts_are_new(engine)
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


def _asked(engine: Engine, prompt: str, config: GenerationConfig) -> dict[str, float]:
    report = engine.generate(prompt, config).report
    names = ("ttft_ms", "charged_recompute", "match_ms", "load_ms", "fuse_ms", "total_ms")
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
