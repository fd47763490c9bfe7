"""What people ask of RAG, of this library and of what they use today."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cached_rag.cli.options import Loading, Model, names
from cached_rag.cli.terminal import Json, err
from cached_rag.config import DEFAULT_MODEL
from cached_rag.errors import ConfigError
from docs.experiments.commands import NewTokens, Plot, print_rows

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine
    from docs.experiments.scenarios import Asked, PeerRow, Scenario


def peers_command(
    data: Annotated[
        list[Path], typer.Argument(help="Question sets (.jsonl), as `cached-rag eval` reads them.")
    ],
    model: Model = DEFAULT_MODEL,
    peers: Annotated[
        str,
        typer.Option(
            help="Who answers, comma-separated; ratios are to the first. Without it, all that are "
            "there: docs/speed.md."
        ),
    ] = "",
    scenarios: Annotated[
        str, typer.Option(help="What is asked, comma-separated: cold, stream, document, chat.")
    ] = "cold,stream,document,chat",
    questions: Annotated[
        int, typer.Option(min=1, help="Questions of each, after one to warm up.")
    ] = 10,
    gguf: Annotated[
        Path | None, typer.Option(help="File for llama.cpp; without it, the model's own.")
    ] = None,
    vllm: Annotated[str | None, typer.Option(help="Address of a vLLM server.")] = None,
    new_tokens: NewTokens = 32,
    plot: Plot = None,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """RAG as people use it, beside the programs they use today (docs/speed.md)."""
    from cached_rag import Engine
    from cached_rag.evaluation.machine import machine
    from cached_rag.evaluation.timing import NEW_PROMPTS
    from docs.experiments.peers import EVERYBODY, Means, open_peers
    from docs.experiments.peers_plot import plot_peers
    from docs.experiments.scenarios import bench_scenario

    with Engine.load(model, store=NEW_PROMPTS, **how) as engine:
        facts = machine(engine.model)
        asked = _scenarios(engine, data, names(scenarios), questions + 1)
        longest = max(len(one.ids) for scenario in asked for one in scenario.questions)
        means = Means(engine, model, longest + new_tokens + 1, gguf, vllm, apart=True)
        rows: list[PeerRow] = []
        about: dict[str, str] = {}
        for scenario in asked:  # opened for each, so that none knows what another one learned
            found, missing = open_peers(means, names(peers), EVERYBODY)
            for name, reason in missing.items() if not about else ():
                err.print(f"without {name}: {reason}")
            try:
                rows += bench_scenario(found, scenario, new_tokens)
            finally:
                for peer in found.values():
                    peer.close()
            about = {name: peer.about for name, peer in found.items()}
        facts |= {"peers": about, "missing": missing}
    if plot is not None:
        plot_peers(rows, plot)
    print_rows(rows, facts, as_json=as_json)


def _scenarios(
    engine: Engine, data: list[Path], kinds: list[str], questions: int
) -> list[Scenario]:
    """Streams over every set; the others over the first. Cold has the set's last questions."""
    from docs.experiments.scenarios import SCENARIOS, Scenarios

    made, found = Scenarios(engine), []
    for kind in sorted(kinds, key=lambda kind: SCENARIOS.index(kind) if kind in SCENARIOS else 0):
        for path in data if kind == "stream" else data[:1]:
            asked = _asked(path)
            if len(asked) < 2 * questions:
                raise ConfigError(
                    f"{path} has {len(asked)} questions with an answer; {2 * questions} are needed"
                )
            some = asked[-questions:] if kind == "cold" else asked[:questions]
            found.append(made.named(kind, path.stem, some))
    return found


def _asked(path: Path) -> list[Asked]:
    from cached_rag.evaluation.data import load_examples

    return [(e.chunks, e.question, e.reference) for e in load_examples(path) if e.reference]
