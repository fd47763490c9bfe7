"""`python -m vllm_cached_rag describe` and `serve`: what vLLM is started with, and the node."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Annotated

import typer

import cached_rag
from cached_rag import CachedRAGError, ConfigError, Engine, StoreConfig, needs_extra
from vllm_cached_rag.node import PrefillNode

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

_LOCAL = ("127.0.0.1", "::1", "localhost")
_TEXTS = Path(cached_rag.__file__).parent / "cli" / "demo_corpus"
Model = Annotated[str, typer.Option(help="Folder or hub id, the one that vLLM is given.")]
Store = Annotated[Path, typer.Option(help="Folder with chunks' KV; an index has it in kv/.")]
Folder = Annotated[
    Path | None, typer.Option(help="Folder for KV of whole prompts. Default: STORE/prompts.")
]
Dtype = Annotated[str | None, typer.Option(help="The dtype that vLLM is given.")]


def _node(
    model: str,
    store: Path,
    handoff: Path | None,
    dtype: str | None,
    method: str = "auto",
    remote: str | None = None,
) -> PrefillNode:
    signed = os.environ.get("CACHED_RAG_SIGNING_KEY") or None
    settings = StoreConfig(path=str(store), remote=remote, signing_key=signed, learn="recurring")
    engine = Engine.load(model, store=settings, dtype=dtype)
    return PrefillNode(engine, str((handoff or store / "prompts").absolute()), method)


@app.command()
def describe(model: Model, store: Store, handoff: Folder = None, dtype: Dtype = None) -> None:
    """Print the value of vLLM's --kv-transfer-config for a model and a store."""
    node = _node(model, store, handoff, dtype)
    node.close()
    typer.echo(json.dumps(node.settings.transfer_config()))


@app.command()
def serve(
    model: Model,
    store: Store,
    handoff: Folder = None,
    dtype: Dtype = None,
    vllm: Annotated[
        str, typer.Option(help="Address of the vLLM server.")
    ] = "http://127.0.0.1:8000",
    method: Annotated[str, typer.Option(help="How chunks' KV is used and repaired.")] = "auto",
    remote: Annotated[
        str | None,
        typer.Option(help="A KV store that machines share.", envvar="CACHED_RAG_REMOTE"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option(help="That clients must have.", envvar="VLLM_API_KEY")
    ] = None,
) -> None:
    """Prefill what clients ask, and have vLLM answer it."""
    if not api_key and host not in _LOCAL:
        raise ConfigError(f"anybody who reaches {host} could ask; give --api-key, as to vLLM")
    with needs_extra("vllm", "the prefill node"):
        import uvicorn

        from vllm_cached_rag.router import create_app
    node = _node(model, store, handoff, dtype, method, remote)
    uvicorn.run(create_app(node, vllm, api_key), host=host, port=port, log_level="warning")


@app.command()
def bench(
    model: Model,
    handoff: Annotated[Path, typer.Option(help="As vLLM was told by `describe`.")],
    vllm: Annotated[
        str, typer.Option(help="Address of the vLLM server.")
    ] = "http://127.0.0.1:8000",
    texts: Annotated[Path, typer.Option(help="Folder of plain texts to cut chunks from.")] = _TEXTS,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 3400,
    methods: Annotated[str, typer.Option(help="Of the node, comma-separated.")] = "auto,reuse",
    new_tokens: Annotated[int, typer.Option(help="Length of the answers.")] = 16,
    repeats: Annotated[int, typer.Option(help="Rounds; one to warm up comes before.")] = 3,
    pause: Annotated[float, typer.Option(help="Seconds before each answer.")] = 2.0,
    dtype: Dtype = None,
) -> None:
    """Time vLLM alone beside vLLM behind a node, on chunks in new orders; JSON."""
    from cached_rag.benchmarks import machine
    from vllm_cached_rag.bench import bench as timed

    corpus = "\n\n".join(p.read_text() for p in sorted(texts.rglob("*")) if p.is_file())
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


if __name__ == "__main__":
    try:
        app(standalone_mode=False)
    except CachedRAGError as error:
        raise SystemExit(f"error: {error}") from error
