"""`cached-rag serve`: builds the server and runs it."""

from pathlib import Path
from typing import Annotated

import typer

import cached_rag
from cached_rag.cli import options
from cached_rag.cli.terminal import err
from cached_rag.config import DEFAULT_MODEL, BatchConfig, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.errors import ConfigError, needs_extra
from cached_rag.options import parted
from cached_rag.server import ServerConfig

_LISTENING = options.OptionsOf(shown=("host", "port", "name", "api_key"))
_USUAL = options.OptionsOf(shown=("method", "quality"), only=options.OF_METHODS)
_ENGINE = options.OptionsOf(
    (ModelConfig, StoreConfig, BatchConfig),
    shown=(
        *("device", "dtype", "weights", "backend"),
        *("memory_bytes", "disk_bytes", "max_rows", "remote"),
    ),
    defaults={
        "learn": "recurring",
        "sequence_bytes": 1 << 30,
        "max_waiting": 256,
        "max_wait_seconds": 60.0,
    },
)


def serve_command(
    index: Annotated[
        Path | None,
        typer.Option(
            "--index", callback=options.at_home, help="Serve this index's model and chunks."
        ),
    ] = None,
    model: options.IndexModel = None,
    store: Annotated[
        Path | None, typer.Option(callback=options.at_home, help="Folder for KV, without an index.")
    ] = None,
    *,
    config: Annotated[ServerConfig, _LISTENING],
    usual: Annotated[GenerationConfig, _USUAL],
    how: Annotated[options.Given, _ENGINE],
) -> None:
    """Serve a model over OpenAI's protocol, reusing chunks' KV wherever they occur in prompts."""
    with needs_extra("serve", "the server"):
        from cached_rag.server.gate import Keys
        from cached_rag.server.index import ServedIndex
        from cached_rag.server.run import bind, default_disk_bytes, serve, share_descriptors
        from cached_rag.server.service import Service

    Keys(config.api_key)  # what cannot be one is said before the model is loaded
    if index is not None and store is not None:
        raise ConfigError("give --index or --store: an index has its own store")
    if index is not None:
        options.require_index(index)
    connections, spaces = share_descriptors(config.max_connections)
    how = options.signed({"finish_seconds": config.drain_seconds} | how)
    folder = store if index is None else index / "kv"
    if folder is not None:
        how.setdefault("disk_bytes", default_disk_bytes(folder))
    with bind(config.host, config.port) as bound:  # before the model, which takes its time
        if index is not None:
            rag = cached_rag.CachedRAG.open(index, model, **how)
            _say_loading(rag.settings["model"])
            engine, served, close = rag.engine, ServedIndex(rag), rag.close
        else:
            loading, kept, batch = parted(how, *_ENGINE.kinds)
            settings = StoreConfig(path=None if store is None else str(store), **kept)
            _say_loading(model or DEFAULT_MODEL)
            engine = cached_rag.Engine.load(
                model or DEFAULT_MODEL, store=settings, batch=BatchConfig(**batch), **loading
            )
            served, close = None, engine.close
        service = Service(engine, config.name, usual, spaces, served)

        def say(address: str) -> None:
            if folder is not None:
                gib = how["disk_bytes"] / 2**30
                err.print(f"at most {gib:.1f} GiB of KV on disk (--disk-bytes)")
            err.print(f"serving {service.name} at {address}/v1")

        serve(service, config, bound, say, close, connections)


def _say_loading(model: str) -> None:
    err.print(f"Loading {model} ...")
