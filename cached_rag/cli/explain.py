"""`cached-rag explain`: what became of a question's prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cached_rag.cli.options import (
    DEFAULT_INDEX,
    Device,
    Dtype,
    Index,
    IndexBackend,
    IndexWeights,
    MaxTokens,
    Method,
    Quality,
    Remote,
    Retrieved,
    opened,
    to_write,
)
from cached_rag.cli.terminal import Json, out, print_json


def explain_command(
    question: str,
    index: Index = DEFAULT_INDEX,
    k: Retrieved = 6,
    method: Method = "auto",
    quality: Quality = None,
    max_tokens: MaxTokens = 128,
    compare: Annotated[
        bool, typer.Option(help="Answer with full prefill, too, to have its time.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            callback=to_write, help="Write a page to this file, the prompt coloured in it."
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    weights: IndexWeights = None,
    backend: IndexBackend = None,
    remote: Remote = None,
    as_json: Json = False,
) -> None:
    """Ask, and show what of the prompt was reused, moved, repaired and computed, and the times."""
    how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
    how["backend"] = backend
    asked: dict[str, Any] = {"k": k, "max_tokens": max_tokens}
    # As in `ask`: full prefill must not find what the first answer left.
    with opened(index, remote, sequence_bytes=0, **how) as rag:
        answer = rag.ask(question, method=method, quality=quality, **asked)
        full = rag.ask(question, method="full", **asked) if compare else None
    explanation = answer.explain(full)
    if html is not None:
        explanation.save(html)
    if as_json:
        print_json(explanation.to_dict())
    elif html is not None:
        out.print(f"written to {html}", markup=False, highlight=False, soft_wrap=True)
    else:
        out.print(str(explanation), markup=False, highlight=False, soft_wrap=True)
