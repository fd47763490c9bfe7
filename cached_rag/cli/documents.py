"""`cached-rag ingest`, `list` and `delete`: the documents of an index."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

import cached_rag
from cached_rag.cli import options
from cached_rag.cli.terminal import Json, err, out, print_json, print_table
from cached_rag.config import ModelConfig, StoreConfig
from cached_rag.options import require
from cached_rag.rag.document import DocumentLimits, shown
from cached_rag.rag.folder import IndexConfig

if TYPE_CHECKING:
    from cached_rag.rag.workers import IngestWorkers

# Most files that are named for one reason.
_MOST_LINES = 20


@dataclass(frozen=True)
class Ingesting:
    """How documents are taken in.

    Attributes:
        name: name of PATH in the index, instead of its own.
        delete_missing: drop documents gone from PATH.
        watch: go on, and keep the index in step with the folder PATH.
        ray: do it on a Ray cluster (docs/scale.md): local, auto, host:port or ray://host:10001;
            local begins one on this machine, auto takes the one that runs there (extra ray).
        ray_workers: workers on the cluster; None for as many as fit.
        ray_cpus: CPUs of each worker; None for 1.
        ray_gpus: GPUs of each worker, such as 1 or 0.5; None for none.

    Raises:
        ConfigError: two of these do not go together.
    """

    name: str | None = None
    delete_missing: bool = False
    watch: bool = False
    ray: str | None = None
    ray_workers: int | None = None
    ray_cpus: float | None = None
    ray_gpus: float | None = None

    def __post_init__(self) -> None:
        require(
            not self.watch or self.name is None,
            "--watch names documents after PATH; leave --name out, or rename the folder",
        )
        require(
            not self.watch or self.ray is None,
            "--watch goes on in one process; ingest with --ray before, or leave it",
        )
        require(
            self.ray is not None or not self._sizes,
            "--ray-workers, --ray-cpus and --ray-gpus go with --ray",
        )

    @property
    def _sizes(self) -> dict[str, float]:
        sizes = {
            "workers": self.ray_workers,
            "cpus_per_worker": self.ray_cpus,
            "gpus_per_worker": self.ray_gpus,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def workers(self) -> IngestWorkers | None:
        """Those of the cluster, if there is to be one."""
        if self.ray is None:
            return None
        from cached_rag.rag.workers import workers

        return workers(self.ray, **self._sizes)


def ingest_command(
    # Not a Path, in which an empty one would be this folder.
    path: Annotated[str, typer.Argument(help="File or folder.")],
    index: options.Index = options.DEFAULT_INDEX,
    model: options.IndexModel = None,
    *,
    asked: Annotated[Ingesting, options.OptionsOf(shown=("delete_missing", "watch", "ray"))],
    how: Annotated[
        options.Given,
        options.OptionsOf(
            (IndexConfig, ModelConfig, StoreConfig, DocumentLimits),
            shown=("chunk_tokens", "codec", "first_exact", "search", "device", "remote"),
        ),
    ],
    as_json: Json = False,
) -> None:
    """Read, split, embed, index and prefill documents that the index does not have."""
    from cached_rag.rag.finding import absolute, is_folder

    workers = asked.workers
    for name in ("parse_seconds", "parse_memory_bytes"):
        if how.get(name) == 0:
            how[name] = None
    is_folder(absolute(path))  # before the index has a folder
    with cached_rag.CachedRAG.open(index, model, **options.signed(how)) as rag:
        if asked.watch:
            with suppress(KeyboardInterrupt):  # it goes on until then
                for summary in rag.watch(path):
                    _print(summary, rag.settings["model"], as_json=as_json)
            return
        told: dict[str, Any] = {"name": asked.name, "delete_missing": asked.delete_missing}
        try:
            summary = rag.ingest(path, ray=workers, progress=not as_json, **told)
        except KeyboardInterrupt:
            err.print("interrupted; what is done is kept, and the same command goes on from there")
            raise
    _print(summary, rag.settings["model"], as_json=as_json)
    if summary.skipped and not (summary.added or summary.unchanged):
        raise typer.Exit(1)  # of what was named nothing could be read


def _print(summary: cached_rag.IngestSummary, model: str, *, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    out.print(f"{summary.to_line()} of {model}")
    for note in _notes(summary):
        err.print(note, style="yellow")


def _notes(summary: cached_rag.IngestSummary) -> Iterator[str]:
    """What the user of an index should know of an ingestion besides."""
    if summary.unsent:
        yield f"KV of {summary.unsent} chunks is not in the remote store; ingest again to send it"
    if summary.missing:
        yield (
            f"{len(summary.missing)} documents are gone from there, and answers go on citing them; "
            "drop them with --delete-missing, or one with `cached-rag delete`: "
            + _some(list(map(shown, summary.missing)), ", ")
        )
    if not (summary.added or summary.unchanged or summary.skipped):
        yield "there is no file of a known kind"
    if summary.skipped:
        yield _some([f"skipped {reason}" for _, reason in summary.skipped], "\n")
    if summary.passed_over:
        from cached_rag.rag.readers import READERS

        total = sum(count for _, count in summary.passed_over)
        kinds = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in summary.passed_over)
        yield f"{total} files passed over: {kinds}; known kinds: {', '.join(sorted(READERS))}"


def _some(lines: Sequence[str], between: str) -> str:
    """The first lines, and how many others there are."""
    rest = len(lines) - _MOST_LINES
    return between.join([*lines[:_MOST_LINES], *([f"{rest} others (see --json)"] * (rest > 0))])


def list_command(index: options.Index = options.DEFAULT_INDEX, as_json: Json = False) -> None:
    """List the documents of an index, by the names that answers show and `delete` takes."""
    with options.documents_of(index) as kept:
        documents = kept.documents()
    if as_json:
        print_json({"documents": [dataclasses.asdict(document) for document in documents]})
        return
    print_table(
        [
            {
                "source": shown(one.source),
                "title": shown(one.title),
                "chunks": one.chunks,
                "encoded": "yes" if one.is_encoded else "no",
            }
            for one in documents
        ]
    )


def hold_command(
    sources: Annotated[list[str], typer.Argument(help="As `list` has them, or paths on disk.")],
    index: options.Index = options.DEFAULT_INDEX,
    *,
    pinned: Annotated[
        bool | None, typer.Option("--pinned/--no-pinned", help="It stays when others need room.")
    ] = None,
    ttl_seconds: Annotated[
        float | None, typer.Option(help="It is deleted so long from now on; `inf` for never.")
    ] = None,
) -> None:
    """Say how long the KV of documents is kept that there is now."""
    said = pinned is not None or ttl_seconds is not None
    require(said, "say how long: --pinned, --no-pinned or --ttl-seconds SECONDS")
    with options.opened(index) as rag:
        found = dict.fromkeys(rag.index.roots.find(source) for source in sources)
        for source in found:
            count = rag.hold(source, pinned=pinned, ttl_seconds=ttl_seconds)
            out.print(f"{shown(source)}: {count} KVs")


def delete_command(
    sources: Annotated[list[str], typer.Argument(help="As `list` has them, or paths on disk.")],
    index: options.Index = options.DEFAULT_INDEX,
    *,
    how: Annotated[
        options.Given,
        options.OptionsOf((StoreConfig,), shown=("remote",), only=("remote", "remote_timeout")),
    ],
    as_json: Json = False,
) -> None:
    """Delete documents with their chunks and KV; if one is unknown, nothing is deleted."""
    with options.opened(index, **how) as rag:
        found = dict.fromkeys(rag.index.roots.find(source) for source in sources)
        deleted = [rag.delete(source) for source in found]
    if as_json:
        print_json({"deleted": [dataclasses.asdict(one) for one in deleted]})
        return
    for one in deleted:
        out.print(f"{shown(one.source)}: {one.chunks} chunks and {one.kvs} KVs deleted")
