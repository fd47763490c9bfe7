"""`cached-rag serve`: parses, builds the server, runs it. Holds no logic of its own."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any

import typer

from cached_rag.cli.terminal import err, require_index
from cached_rag.errors import ConfigError, MissingPackageError


def serve_command(
    index: Annotated[
        Path | None, typer.Option("--index", help="Serve this index's model and chunks.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Alias, hub id, folder or .gguf file.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder for KV, without an index.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="KEY or TENANT:KEY; may be repeated.", envvar="CACHED_RAG_API_KEYS"),
    ] = None,
    method: Annotated[str, typer.Option(help="For requests that name none.")] = "auto",
    max_rows: Annotated[int, typer.Option(help="Most answers made at once.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait.")] = 256,
    kv_bytes: Annotated[int | None, typer.Option(help="Most KV of running answers.")] = None,
    recent_bytes: Annotated[
        int, typer.Option(help="Most KV of finished conversations, for their next turn.")
    ] = 1 << 30,
    memory_bytes: Annotated[int, typer.Option(help="Most KV of texts in memory.")] = 2 << 30,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request.")] = 16 << 20,
    drain_seconds: Annotated[int, typer.Option(help="Time to finish when stopped.")] = 30,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.")] = None,
) -> None:
    """Serve a model over OpenAI's protocol, with cached texts wherever they occur in prompts."""
    try:
        from cached_rag.server.app import create_app
        from cached_rag.server.run import bind, run
        from cached_rag.server.service import Service
        from cached_rag.server.tenants import Keys
    except ModuleNotFoundError as error:
        raise MissingPackageError("the server", "serve", error) from error
    from cached_rag import BatchConfig, CachedRAG, Engine, StoreConfig

    keys = Keys(api_key or [])
    if not keys and not _is_loopback(host):
        err.print(f"anybody who reaches {host}:{port} may ask; see --api-key", style="yellow")
    batch = BatchConfig(
        max_rows=max_rows,
        max_waiting=max_waiting,
        max_bytes=kv_bytes,
        recent_bytes=recent_bytes,
    )
    if index is not None and store is not None:
        raise ConfigError("give --index or --store: an index has its own store")
    with bind(host, port) as bound:  # before the model is loaded, which takes its time
        where: dict[str, Any] = {"dtype": dtype, "device": device, "batch": batch}
        kept: dict[str, Any] = {"memory_bytes": memory_bytes, "finish_seconds": drain_seconds}
        if index is not None:
            require_index(index)
            rag = CachedRAG.open(index, model, **kept, **where)
            engine, close = rag.engine, rag.close
        else:
            settings = StoreConfig(path=None if store is None else str(store), **kept)
            engine = Engine.load(model or "smollm2-135m", store=settings, **where)
            close = engine.close
        service = Service(engine, name or engine.model.name, method)

        def say() -> None:
            at = f"{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
            err.print(f"serving {service.name} at http://{at}/v1", highlight=False, soft_wrap=True)

        run(create_app(service, keys, max_body_bytes, close), bound, drain_seconds, say)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
