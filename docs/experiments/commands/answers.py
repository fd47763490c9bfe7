"""`answers`, `memory`, `chat`, `weights`: whole answers and what they take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cached_rag.cli.bench import CORPUS
from cached_rag.cli.options import Loading, Model, names
from cached_rag.cli.terminal import Json, err
from cached_rag.config import DEFAULT_MODEL
from docs.experiments.answers import joined
from docs.experiments.commands import Loaded, Methods, NewTokens, Repeats, counts, print_rows

_ROOM = 128  # a prompt is some tokens longer than asked for if its chunks do not fit exactly


def chat(
    model: Model = DEFAULT_MODEL,
    documents: Annotated[int, typer.Option(min=1, help="Documents in the system message.")] = 7,
    document_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each document.")] = 512,
    turns: Annotated[int, typer.Option(min=1, help="Questions of the chat.")] = 7,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each question.")] = 32,
    new_tokens: NewTokens = 32,
    methods: Methods = "full,prefix,auto",
    repeats: Repeats = 3,
    *,
    how: Loaded,
    as_json: Json = False,
) -> None:
    """Turns of a chat with documents in its system message: time to first token of each turn."""
    from cached_rag import load_model
    from cached_rag.backends.thread import submit
    from cached_rag.evaluation.machine import machine
    from docs.experiments.chat import bench_chat

    loaded = submit(lambda: load_model(model, **how)).result()
    timing = partial(
        bench_chat,
        loaded,
        documents=documents,
        document_tokens=document_tokens,
        turns=turns,
        question_tokens=question_tokens,
        new_tokens=new_tokens,
        methods=names(methods),
        repeats=repeats,
    )
    print_rows(submit(timing).result(), machine(loaded), as_json=as_json)


def answers(
    model: Model = DEFAULT_MODEL,
    peers: Annotated[
        str,
        typer.Option(
            help="Who answers, comma-separated: transformers, llama.cpp, vllm, methods of this "
            "library. Without it, the first three as far as they are there, full and auto."
        ),
    ] = "",
    gguf: Annotated[
        Path | None, typer.Option(help="File for llama.cpp; without it, the model's own.")
    ] = None,
    vllm: Annotated[str | None, typer.Option(help="Address of a vLLM server.")] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Lengths of prompts, comma-separated.")
    ] = "1024,4096,8000",
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="About how many tokens a chunk has.")
    ] = 512,
    new_tokens: NewTokens = 64,
    texts: Annotated[Path, typer.Option(help="Folder of plain texts to cut chunks from.")] = CORPUS,
    repeats: Repeats = 3,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """Whole answers over retrieved chunks, beside what people run today (docs/speed.md)."""
    from cached_rag import Engine, StoreConfig
    from cached_rag.evaluation.machine import machine
    from docs.experiments.answers import bench_answers, make_questions
    from docs.experiments.peers import Means, open_peers

    lengths = counts(prompt_tokens, "prompt tokens")
    corpus = joined(texts)
    # Nothing is kept of finished prompts, and nothing is computed while another peer answers.
    store = StoreConfig(sequence_bytes=0, write_back=False, learn_prefixes=False)
    context = max(lengths, default=0) + new_tokens + _ROOM
    with Engine.load(model, store=store, **how) as engine:
        found, missing = open_peers(Means(engine, model, context, gguf, vllm), names(peers))
        for name, reason in missing.items():
            err.print(f"without {name}: {reason}")
        try:
            questions = make_questions(
                engine,
                corpus,
                lengths,
                chunk_tokens=chunk_tokens,
                new_tokens=new_tokens,
                rounds=repeats + 1,
            )
            rows = [row for asked in questions for row in bench_answers(found, asked, new_tokens)]
        finally:
            for peer in found.values():
                peer.close()
        about = {name: peer.about for name, peer in found.items()}
        facts = machine(engine.model) | {"peers": about, "missing": missing}
    print_rows(rows, facts, as_json=as_json)


def memory(
    model: Model = DEFAULT_MODEL,
    peers: Annotated[
        str,
        typer.Option(
            help="Who answers, comma-separated: programs as in `bench peers`, methods of this "
            "library; ratios are to the first."
        ),
    ] = "full,auto",
    gguf: Annotated[
        Path | None, typer.Option(help="File for llama.cpp; without it, the model's own.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompts.")] = 4096,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="About how many tokens a chunk has.")
    ] = 512,
    new_tokens: NewTokens = 64,
    texts: Annotated[Path, typer.Option(help="Folder of plain texts to cut chunks from.")] = CORPUS,
    repeats: Repeats = 3,
    *,
    how: Loading,
    as_json: Json = False,
) -> None:
    """Peak memory of whole answers: each peer in a process of its own."""
    from cached_rag.evaluation.machine import machine
    from docs.experiments.memory import Workload, bench_memory

    work = Workload(
        model,
        joined(texts),
        prompt_tokens,
        prompt_tokens + new_tokens + _ROOM,
        how,
        chunk_tokens,
        new_tokens,
        repeats + 1,
        gguf,
    )
    facts = machine() | {"model": model, "backend": how.get("backend", "transformers")}
    print_rows(bench_memory(work, names(peers)), facts, as_json=as_json)


def weights_formats(
    data: Annotated[
        list[Path], typer.Argument(help="Question sets (.jsonl); their chunks are read.")
    ],
    model: Model = DEFAULT_MODEL,
    formats: Annotated[str, typer.Option(help="Formats to compare with bf16.")] = "as stored",
    texts: Annotated[int, typer.Option(min=1, help="Texts that are read.")] = 40,
    dtype: Annotated[str | None, typer.Option(help="What to compute in.")] = None,
    repeats: Repeats = 20,
    as_json: Json = False,
) -> None:
    """Weights in few bits against dense ones: likelihood of texts, time of a decoding step."""
    from cached_rag.evaluation.data import load_examples
    from cached_rag.evaluation.machine import machine
    from docs.experiments.weights import bench_weights

    examples = [example for path in data for example in load_examples(path)]
    read = ["\n\n".join(example.chunks) for example in examples][:texts]
    rows = bench_weights(model, names(formats), read, dtype=dtype, repeats=repeats)
    print_rows([*rows], machine() | {"model": model}, as_json=as_json)
