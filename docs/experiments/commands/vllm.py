"""vLLM behind a prefill node, beside vLLM alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from cached_rag import Engine, StoreConfig
from cached_rag.cli.bench import CORPUS
from docs.experiments.answers import joined

Model = Annotated[str, typer.Option(help="Folder or hub id, the one that vLLM is given.")]
Dtype = Annotated[str | None, typer.Option(help="The dtype that vLLM is given.")]


def vllm_handoff(
    model: Model,
    handoff: Annotated[Path, typer.Option(help="As vLLM was told by `describe`.")],
    vllm: Annotated[
        str, typer.Option(help="Address of the vLLM server.")
    ] = "http://127.0.0.1:8000",
    texts: Annotated[Path, typer.Option(help="Folder of plain texts to cut chunks from.")] = CORPUS,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 3400,
    methods: Annotated[str, typer.Option(help="Of the node, comma-separated.")] = "auto,reuse",
    new_tokens: Annotated[int, typer.Option(help="Length of the answers.")] = 16,
    repeats: Annotated[int, typer.Option(help="Rounds; one to warm up comes before.")] = 3,
    pause: Annotated[float, typer.Option(help="Seconds before each answer.")] = 2.0,
    dtype: Dtype = None,
) -> None:
    """Time vLLM alone beside vLLM behind a node, on chunks in new orders; JSON."""
    from cached_rag.evaluation.machine import machine
    from docs.experiments.vllm import bench as timed

    corpus = joined(texts)
    begin = random.randrange(len(corpus))  # or vLLM would know the prompts of an earlier run
    corpus = corpus[begin:] + corpus[:begin]
    # Nothing is kept of finished prompts, and nothing is computed while vLLM answers.
    store = StoreConfig(sequence_bytes=0, write_back=False, learn_prefixes=False)
    with Engine.load(model, store=store, dtype=dtype) as engine:
        rows = timed(
            engine,
            str(handoff.absolute()),
            vllm,
            corpus,
            [prompt_tokens],
            methods.split(","),
            new_tokens=new_tokens,
            rounds=repeats,
            pause=pause,
        )
        typer.echo(json.dumps({"rows": rows, "machine": machine(engine.model)}, indent=2))
