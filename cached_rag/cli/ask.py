"""`cached-rag ask`: a question to an index."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from cached_rag.cli.options import (
    DEFAULT_INDEX,
    AnswerAnyway,
    Device,
    Drafts,
    Dtype,
    Index,
    IndexBackend,
    IndexWeights,
    MaxTokens,
    Method,
    MinScore,
    Quality,
    Remote,
    RerankerName,
    Retrieved,
    SearchBy,
    Seed,
    Temperature,
    Where,
    filters,
    opened,
)
from cached_rag.cli.terminal import Json, err, out, print_json, print_reports


def ask_command(
    question: str,
    index: Index = DEFAULT_INDEX,
    k: Retrieved = 6,
    search: SearchBy = None,
    reranker: RerankerName = None,
    where: Where = None,
    min_score: MinScore = None,
    answer_anyway: AnswerAnyway = False,
    method: Method = "auto",
    quality: Quality = None,
    ratio: Annotated[
        float | None,
        typer.Option(help="Share of cached tokens to recompute; without it, the method's own."),
    ] = None,
    max_tokens: MaxTokens = 128,
    adaptive: Annotated[
        bool,
        typer.Option(help="Recompute as much as loading from this disk hides, see docs/store.md."),
    ] = False,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    drafts: Drafts = True,
    compare: Annotated[
        bool, typer.Option(help="Answer with full prefill, too, which reuses nothing.")
    ] = False,
    dtype: Dtype = None,
    device: Device = None,
    weights: IndexWeights = None,
    backend: IndexBackend = None,
    remote: Remote = None,
    as_json: Json = False,
) -> None:
    """Ask the documents of an index; the answer streams."""
    from cached_rag import GenerationConfig

    config = GenerationConfig(
        method=method,
        quality=quality,
        recompute_ratio=ratio,
        adaptive=adaptive,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        drafts=drafts,
    )
    # The one question there is; and full prefill, to compare it with, must not find what it left.
    how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
    how |= {"search": search, "reranker": reranker}
    how["backend"] = backend
    with opened(index, remote, sequence_bytes=0, **how) as rag:
        chosen: dict[str, Any] = {"k": k, "where": filters(where), "min_score": min_score}
        chosen["answer_anyway"] = answer_anyway
        stream = rag.stream(question, config=config, **chosen)
        for piece in stream:
            if not as_json:
                out.print(piece, end="", markup=False, highlight=False)
        answer = stream.answer
        plain = config.replace(method="full")
        full = rag.ask(question, config=plain, **chosen) if compare else None
    if as_json:
        found: dict[str, Any] = {
            "text": answer.text,
            "sources": [dataclasses.asdict(hit) for hit in answer.sources],
            "report": answer.report.to_dict(),
        }
        if full is not None:
            found["full"] = {"text": full.text, "report": full.report.to_dict()}
        print_json(found)
        return
    out.print("\n")
    for hit in answer.sources:
        out.print(f"  {hit}", style="dim", markup=False)
    print_reports([("cached", answer.report)] + ([("full prefill", full.report)] if full else []))
    for note in answer.report.notes:
        err.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    if full is not None:
        out.print(f"Full prefill's answer: {full.text}", markup=False)
