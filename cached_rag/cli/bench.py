"""`cached-rag bench` and `doctor`: times of each method, and what a machine and a model can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cached_rag.cli.demo import CORPUS
from cached_rag.cli.options import (
    IndexModel,
    Loading,
    Model,
    OptionsOf,
    SettingsCommand,
    at_home,
    counts,
    names,
    opened,
    with_settings,
)
from cached_rag.cli.terminal import (
    Json,
    out,
    plain,
    print_json,
    print_machine,
    print_rows,
    print_table,
)
from cached_rag.config import DEFAULT_MODEL
from cached_rag.errors import ConfigError
from cached_rag.options import check_types, require

if TYPE_CHECKING:
    from cached_rag.evaluation.timing import TtftRow


bench_app = typer.Typer(
    help="Measure speed, as ratios within one run. Without a command: time to first token of each "
    "method, against full prefill."
)


@dataclass(frozen=True)
class FirstTokens:
    """What prompts are made of random tokens, and how often each is asked.

    Attributes:
        chunks: chunks in the prompt.
        chunk_tokens: tokens of each chunk.
        question_tokens: tokens of the question.
        methods: methods to compare, comma-separated.
        ratio: share of cached tokens to recompute.
        repeats: rounds that are measured, after a round to warm up.
    """

    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    methods: str = "auto,fast,reuse"
    ratio: float = 0.15
    repeats: int = 5

    def __post_init__(self) -> None:
        check_counts(self)


@dataclass(frozen=True)
class Answers:
    """What questions are asked about, how long their answers are, and how often.

    Attributes:
        methods: methods to compare, comma-separated.
        prompt_tokens: lengths of prompts, comma-separated.
        chunk_tokens: about how many tokens a chunk has.
        new_tokens: tokens of an answer.
        texts: folder of plain texts to cut chunks from; None for the demo's.
        repeats: rounds that are measured, after a round to warm up.
    """

    methods: str = "full,auto"
    prompt_tokens: str = "1024,4096"
    chunk_tokens: int = 512
    new_tokens: int = 64
    texts: str | None = None
    repeats: int = 3

    def __post_init__(self) -> None:
        check_counts(self)


def check_counts(settings: Any) -> None:
    """Refuse whole numbers that are less than 1.

    Raises:
        ConfigError: there is one.
    """
    check_types(settings)
    for name, value in vars(settings).items():
        require(not isinstance(value, int) or value >= 1, f"{name} is at least 1, not {value}")


@bench_app.callback(invoke_without_command=True)
@with_settings
def ttft(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    *,
    asked: Annotated[FirstTokens, OptionsOf()],
    how: Loading,
    as_json: Json = False,
) -> None:
    """Time to first token of each method against full prefill, in one run."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from cached_rag import Engine
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.timing import NEW_PROMPTS, bench_ingest, bench_ttft

    sizes = {"modules": asked.chunks, "module_tokens": asked.chunk_tokens}
    with Engine.load(model, store=NEW_PROMPTS, **how) as engine:
        rows = bench_ttft(
            engine,
            **sizes,
            question_tokens=asked.question_tokens,
            methods=names(asked.methods),
            ratio=asked.ratio,
            repeats=asked.repeats,
        )
        encoding = bench_ingest(engine, **sizes)
        facts = machine(engine.model)
    if as_json:
        found = {"rows": [plain(row) for row in rows], "ingest": plain(encoding)}
        print_json(found | {"machine": facts})
        return
    print_table([_cells(row) for row in rows])
    out.print(
        f"ingestion: {encoding.tokens_per_s:.0f} tokens/s, {encoding.ratio:.2f}x the model's own "
        f"batched prefill"
    )
    print_machine(facts)


def _cells(row: TtftRow) -> dict[str, object]:
    return {
        "method": row.method,
        "tokens": row.prompt_tokens,
        "TTFT ms": f"{row.ttft_ms:.1f}",
        "speed-up": f"{row.speedup:.1f}x",
        "charged": f"{row.charged_recompute:.3f}",
        "overhead ms": f"{row.overhead_ms:.1f}",
    }


def _refuse_options(context: typer.Context) -> None:
    """Refuse options of this command that stand before another one, which would not have them."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, at in sources.items() if at is not None and at.name == "COMMANDLINE"]
    if given:
        raise ConfigError(
            f"{', '.join(given)} stand before {context.invoked_subcommand}, which has options of "
            "its own; put them behind it"
        )


@bench_app.command(cls=SettingsCommand)
@with_settings
def answers(
    model: Model = DEFAULT_MODEL,
    *,
    asked: Annotated[Answers, OptionsOf()],
    how: Loading,
    as_json: Json = False,
) -> None:
    """Whole answers of each method over chunks of your texts.

    Beside transformers' own, if it runs the model.
    """
    from cached_rag import Engine, StoreConfig
    from cached_rag.evaluation.answers import (
        Own,
        Peer,
        Transformers,
        bench_answers,
        joined,
        make_questions,
    )
    from cached_rag.evaluation.machine import machine

    lengths = counts(asked.prompt_tokens, "prompt tokens")
    corpus = joined(CORPUS if asked.texts is None else Path(asked.texts))
    # Nothing is kept of finished prompts, and nothing is computed while another one answers.
    store = StoreConfig(sequence_bytes=0, write_back=False, learn_prefixes=False)
    with Engine.load(model, store=store, **how) as engine:
        peers: dict[str, Peer] = {}
        if how.get("backend", "transformers") == "transformers":
            peers["transformers"] = Transformers(engine)
        peers |= {name: Own(engine, name) for name in names(asked.methods)}
        sizes = {"chunk_tokens": asked.chunk_tokens, "new_tokens": asked.new_tokens}
        questions = make_questions(engine, corpus, lengths, **sizes, rounds=asked.repeats + 1)
        rows = [row for each in questions for row in bench_answers(peers, each, asked.new_tokens)]
        about = {name: peer.about for name, peer in peers.items()}
        facts = machine(engine.model) | {"peers": about}
    print_rows(rows, facts, as_json=as_json)


def doctor_command(
    model: IndexModel = None,
    index: Annotated[
        Path | None, typer.Option("--index", callback=at_home, help="Also look at this index.")
    ] = None,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """What this machine and model can do, and whether reuse computes what the model would."""
    from cached_rag import Engine
    from cached_rag.evaluation.machine import examine, self_test

    if index is not None:
        with opened(index, model=model, **how) as rag:
            facts, tests = examine(rag.engine), self_test(rag.engine)
    else:
        with Engine.load(model or DEFAULT_MODEL, **how) as engine:
            facts, tests = examine(engine), self_test(engine)
    if as_json:
        print_json(facts | {"self_test": [vars(test) | {"passed": test.passed} for test in tests]})
    else:
        verdicts = {
            f"self-test: {test.name}": f"{'passed' if test.passed else 'FAILED'}, "
            f"error {test.error:.1e}"
            for test in tests
        }
        shown = facts | verdicts
        print_table([{"what": name, "found": value} for name, value in shown.items()])
    if not all(test.passed for test in tests):
        raise typer.Exit(1)
