"""`cached-rag ingest`: documents into an index."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from cached_rag.cli.options import (
    DEFAULT_INDEX,
    Codec,
    Device,
    Dtype,
    Index,
    IndexBackend,
    IndexModel,
    IndexWeights,
    Remote,
    SearchBy,
    shared,
)
from cached_rag.cli.terminal import Json, err, out, print_json
from cached_rag.rag.limits import DocumentLimits
from cached_rag.rag.naming import shown

if TYPE_CHECKING:
    from cached_rag import CachedRAG, IngestSummary
    from cached_rag.rag.workers import IngestWorkers

# What a shell knows a command by that was interrupted.
_INTERRUPTED = 130
# Most files that are named for one reason.
_MOST_LINES = 20


class IngestCommand(TyperCommand):
    """Takes `--ray` without an address, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a lone `--ray` the address of this machine."""
        given = []
        for argument, following in zip_longest(args, args[1:], fillvalue="-"):
            given.append(argument)
            if argument == "--ray" and following.startswith("-"):
                given.append("local")
        return super().parse_args(ctx, given)


def ingest_command(
    # Not a Path, in which an empty one would be this folder.
    path: Annotated[str, typer.Argument(help="File or folder.")],
    index: Index = DEFAULT_INDEX,
    model: IndexModel = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Most tokens of a chunk.")] = None,
    codec: Codec = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Encode chunks behind: both (the default; twice), primer (once), both:3, "
            "primer:3, none."
        ),
    ] = None,
    search: SearchBy = None,
    name: Annotated[
        str | None, typer.Option(help="Name of PATH in the index; its own by default.")
    ] = None,
    delete_missing: Annotated[bool, typer.Option(help="Drop documents gone from PATH.")] = False,
    watch: Annotated[
        bool, typer.Option(help="Go on, and keep the index in step with the folder PATH.")
    ] = False,
    dtype: Dtype = None,
    device: Device = None,
    weights: IndexWeights = None,
    backend: IndexBackend = None,
    remote: Remote = None,
    max_document_bytes: Annotated[
        int, typer.Option(help="Larger files are skipped.")
    ] = DocumentLimits.max_bytes,
    parse_seconds: Annotated[
        float, typer.Option(help="Files that take longer to read are skipped; 0 for any time.")
    ] = DocumentLimits.seconds or 0,
    parse_memory: Annotated[
        int, typer.Option(help="So are those that take more bytes of memory; 0 for any.")
    ] = DocumentLimits.memory_bytes or 0,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Do it on a Ray cluster: auto for the one of this machine, host:port, or "
            "ray://host:10001; without an address, in processes of this machine (extra ray).",
        ),
    ] = None,
    ray_workers: Annotated[
        int | None, typer.Option(help="Workers on the cluster; without it, as many as fit.")
    ] = None,
    ray_cpus: Annotated[
        float | None, typer.Option(help="CPUs of each worker; without it, 1.")
    ] = None,
    ray_gpus: Annotated[
        float | None, typer.Option(help="GPUs of each worker, such as 1 or 0.5; without it, none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read, split, embed, index and prefill documents; what the index has already is skipped."""
    from cached_rag import CachedRAG, ConfigError
    from cached_rag.rag.finding import is_folder
    from cached_rag.rag.roots import absolute

    if watch and name is not None:
        raise ConfigError(
            "--watch names documents after PATH; leave --name out, or rename the folder"
        )
    if watch and ray is not None:
        raise ConfigError("--watch goes on in one process; ingest with --ray before, or leave it")
    workers = _workers(ray, workers=ray_workers, cpus_per_worker=ray_cpus, gpus_per_worker=ray_gpus)

    options: dict[str, Any] = {"chunk_tokens": chunk_tokens, "codec": codec, "context": context}
    options["search"] = search
    is_folder(absolute(path))  # before the index has a folder
    limits = DocumentLimits(max_document_bytes, parse_seconds or None, parse_memory or None)
    options |= shared(remote) | {"limits": limits}
    with CachedRAG.open(
        index, model, dtype=dtype, device=device, weights=weights, backend=backend, **options
    ) as rag:
        if watch:
            _keep_in_step(rag, path, as_json=as_json)
            return
        how: dict[str, Any] = {"name": name, "delete_missing": delete_missing, "ray": workers}
        try:
            summary = rag.ingest(path, **how, progress=not as_json)
        except KeyboardInterrupt:
            err.print("interrupted; what is done is kept, and the same command goes on from there")
            raise typer.Exit(_INTERRUPTED) from None
    _print(summary, as_json=as_json)
    if summary.skipped and not (summary.added or summary.unchanged):
        raise typer.Exit(1)  # of what was named nothing could be read


def _workers(address: str | None, **options: float | None) -> IngestWorkers | None:
    from cached_rag import ConfigError

    given = {name: value for name, value in options.items() if value is not None}
    if address is None:
        if given:
            raise ConfigError("--ray-workers, --ray-cpus and --ray-gpus go with --ray")
        return None
    from cached_rag.rag.workers import workers

    return workers(address, **given)


def _keep_in_step(rag: CachedRAG, path: str, *, as_json: bool) -> None:
    """Print what is done, until interrupted."""
    with suppress(KeyboardInterrupt):
        for summary in rag.watch(path):
            _print(summary, as_json=as_json)


def _print(summary: IngestSummary, *, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    out.print(
        f"{summary.added} documents added, {summary.unchanged} unchanged, "
        f"{summary.deleted} deleted; {summary.chunks} chunks, "
        f"{summary.encoded} prefilled now ({summary.tokens} tokens in all passes) "
        f"in {summary.seconds:.1f} s; the index has {summary.stored_bytes / 2**20:.0f} MiB of KV"
    )
    if summary.unsent:
        line = (
            f"KV of {summary.unsent} chunks did not reach the remote store; ingest again to send it"
        )
        err.print(line, style="yellow")
    if summary.missing:
        err.print(
            f"{len(summary.missing)} documents are gone from there, and answers go on citing them; "
            "drop them with --delete-missing, or one with `cached-rag delete`: "
            + _some(list(map(shown, summary.missing)), ", "),
            style="yellow",
            markup=False,
        )
    _print_left_out(summary)


def _some(lines: Sequence[str], between: str) -> str:
    """The first lines, and how many others there are."""
    rest = len(lines) - _MOST_LINES
    return between.join([*lines[:_MOST_LINES], *([f"{rest} others (see --json)"] * (rest > 0))])


def _print_left_out(summary: IngestSummary) -> None:
    """Print which files could not be read, and which are of no known kind."""
    from cached_rag.rag import READERS

    if not (summary.added or summary.unchanged or summary.skipped):
        err.print("there is no file of a known kind", style="yellow")
    if summary.skipped:
        lines = [f"skipped {reason}" for _, reason in summary.skipped]
        err.print(_some(lines, "\n"), style="yellow", markup=False)
    if summary.passed_over:
        total = sum(count for _, count in summary.passed_over)
        kinds = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in summary.passed_over)
        known = ", ".join(sorted(READERS))
        line = f"{total} files passed over: {kinds}; known kinds: {known}"
        err.print(line, style="yellow", markup=False, highlight=False)
