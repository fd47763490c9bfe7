"""`python -m vllm_cached_rag describe` and `serve`: what vLLM is started with, and the node."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from cached_rag import CachedRAGError, ConfigError, Engine, StoreConfig
from cached_rag.errors import needs_extra
from vllm_cached_rag.node import PrefillNode

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

# Where in a store the engine keeps finished prompts; whoever bounds one deletes the other's.
_KEPT = "prompts"
_LOCAL = ("127.0.0.1", "::1", "localhost")
Model = Annotated[str, typer.Option(help="Folder or hub id, the one that vLLM is given.")]
Store = Annotated[Path, typer.Option(help="Folder with chunks' KV; an index has it in kv/.")]
Folder = Annotated[
    Path | None, typer.Option(help="Folder for KV of whole prompts. Default: STORE/handoff.")
]
Dtype = Annotated[str | None, typer.Option(help="The dtype that vLLM is given.")]
Key = Annotated[str | None, typer.Option(help="That clients must have.", envvar="VLLM_API_KEY")]


def _node(
    model: str,
    store: Path,
    handoff: Path | None,
    dtype: str | None,
    method: str = "auto",
    remote: str | None = None,
) -> PrefillNode:
    handoff = (handoff or store / "handoff").absolute()
    if handoff.resolve() in (store.resolve(), (store / _KEPT).resolve()):
        raise ConfigError(
            f"in {handoff} the store keeps KV of its own, and each would delete the other's; give "
            "--handoff another folder, such as STORE/handoff"
        )
    signed = os.environ.get("CACHED_RAG_SIGNING_KEY") or None
    settings = StoreConfig(path=str(store), remote=remote, signing_key=signed, learn="recurring")
    engine = Engine.load(model, store=settings, dtype=dtype)
    return PrefillNode(engine, str(handoff), method)


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
    vllm: Annotated[str, typer.Option(help="Address of vLLM's server.")] = "http://127.0.0.1:8000",
    method: Annotated[str, typer.Option(help="How chunks' KV is used and repaired.")] = "auto",
    remote: Annotated[
        str | None, typer.Option(help="A KV store that machines share.", envvar="CACHED_RAG_REMOTE")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    api_key: Key = None,
) -> None:
    """Prefill what clients ask, and have vLLM answer it."""
    if not api_key and host not in _LOCAL:
        raise ConfigError(f"anybody who reaches {host} could ask; give --api-key, as to vLLM")
    with needs_extra("vllm", "the prefill node"):
        import uvicorn

        from vllm_cached_rag.router import create_app
    node = _node(model, store, handoff, dtype, method, remote)
    uvicorn.run(create_app(node, vllm, api_key), host=host, port=port, log_level="warning")


if __name__ == "__main__":
    try:
        app(standalone_mode=False)
    except CachedRAGError as error:
        raise SystemExit(f"error: {error}") from error
