"""`cached-rag serve`: parses the options, builds the server and runs it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from cached_rag.cli.options import (
    Adapter,
    Device,
    Dtype,
    IndexBackend,
    IndexModel,
    IndexWeights,
    Quality,
    Remote,
    Thinking,
    at_home,
    given,
    require_index,
    shared,
)
from cached_rag.cli.terminal import err
from cached_rag.defaults import DEFAULT_MODEL
from cached_rag.errors import ConfigError, needs_extra

# As browsers write it: a scheme and a host, with nothing behind; "null" is a page in a file.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)


def serve_command(
    index: Annotated[
        Path | None,
        typer.Option("--index", callback=at_home, help="Serve this index's model and chunks."),
    ] = None,
    model: IndexModel = None,
    store: Annotated[Path | None, typer.Option(help="Folder for KV, without an index.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="KEY or TENANT:KEY; may be repeated.", envvar="CACHED_RAG_API_KEYS"),
    ] = None,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="Listen on the network without any key.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name the server is asked under, besides its own; may be repeated."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web page whose scripts may ask, https://host; may be repeated."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="How cached text is used in requests that name no method.")
    ] = "auto",
    quality: Quality = None,
    max_rows: Annotated[int, typer.Option(help="Most answers made at once.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait.")] = 256,
    max_wait_seconds: Annotated[
        float, typer.Option(help="A request that would wait longer is refused.")
    ] = 60.0,
    kv_bytes: Annotated[
        int | None, typer.Option(help="Most bytes of KV of running answers.")
    ] = None,
    sequence_bytes: Annotated[
        int,
        typer.Option(
            help="Most bytes of KV kept of finished conversations, for their next turn.",
        ),
    ] = 1 << 30,
    exact_only: Annotated[
        bool,
        typer.Option(
            "--exact-only",
            help="Keep of them only what full prefill would have computed, nothing repaired.",
        ),
    ] = False,
    learn: Annotated[
        str,
        typer.Option(
            help='"recurring": texts that two prompts have at different places are reused, '
            'whoever retrieved them. "off": only texts that were made known.'
        ),
    ] = "recurring",
    first_exact: Annotated[
        bool,
        typer.Option(
            "--first-exact",
            help="Encode texts behind a known head alone, too: a prompt's first text is exact, "
            "for a pass more and twice the room. An index has a setting of its own.",
        ),
    ] = False,
    audit_rate: Annotated[
        float,
        typer.Option(
            help="Share of the answers whose first token is compared with full prefill's, while "
            "nobody asks; a method that differs too much is used no more. 0 to 1."
        ),
    ] = 0.0,
    memory_bytes: Annotated[int, typer.Option(help="Most bytes of chunks' KV in memory.")] = 2
    << 30,
    disk_bytes: Annotated[
        int | None,
        typer.Option(
            help="Most bytes of KV on disk. Default: those in use, and half of what is free."
        ),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of a request.")] = 16 << 20,
    max_connections: Annotated[int, typer.Option(min=1, help="Most connections.")] = 1000,
    client_seconds: Annotated[
        int, typer.Option(min=1, help="Seconds a client has to send a request, or to read on.")
    ] = 60,
    drain_seconds: Annotated[
        int, typer.Option(min=0, help="Seconds for running answers to finish when stopped.")
    ] = 30,
    dtype: Dtype = None,
    device: Device = None,
    weights: IndexWeights = None,
    backend: IndexBackend = None,
    remote: Remote = None,
    adapter: Adapter = None,
    thinking: Thinking = None,
) -> None:
    """Serve a model over OpenAI's protocol, reusing chunks' KV wherever they occur in prompts."""
    with needs_extra("serve", "the server"):
        from cached_rag.server.app import create_app
        from cached_rag.server.gate import LOCAL_HOSTS
        from cached_rag.server.index import ServedIndex
        from cached_rag.server.limits import default_disk_bytes, share_descriptors
        from cached_rag.server.run import Server, bind
        from cached_rag.server.service import Service
        from cached_rag.server.tenants import Keys
    from cached_rag import BatchConfig, CachedRAG, Engine, GenerationConfig, StoreConfig

    keys = Keys(api_key or [])
    is_local = _is_loopback(host)
    if not (keys or is_local or no_keys):
        raise ConfigError(
            f"anybody who reaches {host or 'this machine'} could ask and delete; give --api-key, "
            "or --no-keys if that is meant"
        )
    _check_names(allowed_host or (), cors_origin or ())
    if index is not None and store is not None:
        raise ConfigError("give --index or --store: an index has its own store")
    if index is not None:
        if first_exact:
            raise ConfigError(
                "an index says itself what its chunks are encoded behind: leave --first-exact out, "
                "and make the index with `cached-rag ingest --context both`, the default"
            )
        require_index(index)
    hosts = (*LOCAL_HOSTS, host, *(allowed_host or ())) if is_local or allowed_host else None
    share = share_descriptors(max_connections)
    folder = store if index is None else index / "kv"
    if disk_bytes is None and folder is not None:
        disk_bytes = default_disk_bytes(folder)
    batch = BatchConfig(
        max_rows=max_rows,
        max_waiting=max_waiting,
        max_wait_seconds=max_wait_seconds,
        max_bytes=kv_bytes,
    )
    where: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights, "batch": batch}
    where |= {"backend": backend, "adapter": adapter}
    if thinking is not None:
        where["chat_template_kwargs"] = {"enable_thinking": thinking}
    kept: dict[str, Any] = {
        "memory_bytes": memory_bytes,
        "disk_bytes": disk_bytes,
        "finish_seconds": drain_seconds,
        "sequence_bytes": sequence_bytes,
        "keeps_repaired": False if exact_only else "conversation",
        "learn": learn,
        "audit_rate": audit_rate,
        **shared(remote),
    }
    with bind(host, port) as bound:  # before the model is loaded, which takes its time
        if index is not None:
            rag = CachedRAG.open(index, model, **kept, **where)
            engine, close = rag.engine, rag.close
        else:
            path = None if store is None else str(store)
            settings = StoreConfig(path=path, first_exact=first_exact, **kept)
            engine = Engine.load(model or DEFAULT_MODEL, store=settings, **given(where))
            close = engine.close
        served = None if index is None else ServedIndex(rag)
        usual = GenerationConfig(method=method, quality=quality)
        service = Service(engine, name, usual, share.spaces, served)

        def say() -> None:
            if folder is not None:
                gib = (disk_bytes or 0) / 2**30
                err.print(f"at most {gib:.1f} GiB of KV on disk (--disk-bytes)", highlight=False)
            at = f"{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
            said = f"serving {service.name} at http://{at}/v1"
            err.print(said, markup=False, highlight=False, soft_wrap=True)

        app = create_app(
            service,
            keys,
            max_body_bytes,
            close,
            hosts=hosts,
            origins=cors_origin or (),
            max_requests=max(1, share.connections * 3 // 4),
        )
        Server(
            app,
            drain_seconds,
            say,
            max_connections=share.connections,
            client_seconds=client_seconds,
        ).run(sockets=[bound])


def _check_names(hosts: Iterable[str], origins: Iterable[str]) -> None:
    """Refuse hosts and origins that no request could have."""
    for host in hosts:
        if not host or "/" in host:
            raise ConfigError(
                f"--allowed-host {host!r} is no host: requests name it without scheme and path; "
                "give server.example, say"
            )
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {origin!r} is no origin: browsers name a page by scheme and host "
                "alone; give https://page.example, say, or * for any"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
