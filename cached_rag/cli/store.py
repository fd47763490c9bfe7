"""`cached-rag store`: what an index keeps on disk. Loads no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cached_rag.cli.options import DEFAULT_INDEX, Index, documents_of, require_index, signing_key
from cached_rag.cli.terminal import Json, out, print_json
from cached_rag.errors import ConfigError, StoreError, StoreFullError
from cached_rag.kv import holdings
from cached_rag.kv.catalog import CATALOG, Catalog
from cached_rag.kv.database import Database, Problem
from cached_rag.kv.files import is_file, status_of
from cached_rag.kv.holdings import Holding
from cached_rag.rag.index import DocumentIndex

if TYPE_CHECKING:
    from cached_rag.kv.disk import DiskStore
    from cached_rag.kv.kept import KeptPrompts

# Bytes to free on a full disk, besides twice the databases' own, so that these can be written.
_ROOM = 1 << 20


store_app = typer.Typer(help="Look after the KV store of an index.", no_args_is_help=True)


@store_app.command()
def stats(index: Index = DEFAULT_INDEX, as_json: Json = False) -> None:
    """How much KV an index holds."""
    prompts = sum(kept.nbytes for kept in _kept_prompts(index))
    with documents_of(index) as documents:
        _, chunks = documents.count()
    with _disk_store(index) as store:
        path, codec, texts, nbytes = str(store.path), store.codec.name, len(store), store.nbytes
    if as_json:
        found = {"path": path, "codec": codec, "texts": texts, "bytes": nbytes}
        print_json(found | {"prompts_bytes": prompts})
    else:
        out.print(
            f"{texts} encodings of {chunks} chunks and the prompt's head, "
            f"{nbytes / 2**30:.2f} GiB, codec {codec}, in {path}; "
            f"{prompts / 2**20:.1f} MiB of finished prompts",
            soft_wrap=True,
        )


@store_app.command()
def verify(index: Index = DEFAULT_INDEX, as_json: Json = False) -> None:
    """Read every KV file and all databases, and report damage; exits 1 if there is any."""
    from cached_rag.kv.disk import DiskStore

    require_index(index)
    folder = index / "kv"
    problems = [
        *_problems(index / "documents.sqlite", DocumentIndex),
        *_problems(folder / CATALOG, lambda path: Catalog(path, "")),
        *_problems(
            folder / "index.sqlite", lambda path: DiskStore(path.parent, secret=signing_key())
        ),
        *(problem for kept in _kept_prompts(index) for problem in kept.check()),
    ]
    if not problems:  # what documents need is known only from undamaged databases
        problems = _needless(index)
    if as_json:
        print_json({"problems": [dataclasses.asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            out.print(f"{problem.key}: {problem.reason}")
        out.print(f"{len(problems)} problems")
    if problems:
        raise typer.Exit(1)


@store_app.command()
def prune(
    context: typer.Context,
    index: Index = DEFAULT_INDEX,
    max_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes to keep at most.")] = None,
    unused: Annotated[bool, typer.Option(help="Drop KV of other weights and dtypes.")] = False,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Keep this one; may be repeated. Default: this machine's fastest."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="With --unused: only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove litter, KV that no document needs and, beyond a bound, KV that nobody asks for.

    Databases are written anew, so that nothing of what was deleted is left in them.
    """
    source = context.get_parameter_source("dtype")  # a file's is for all commands that have one
    if not unused and (dry_run or (source is not None and source.name == "COMMANDLINE")):
        raise ConfigError("--dtype and --dry-run belong to --unused")
    dropped = _drop_unused(index, dtype, dry_run=dry_run) if unused else []
    count, freed = (0, 0) if dry_run else _prune(index, max_bytes)
    count += sum(len(holding.keys) for holding in dropped)
    freed += sum(holding.nbytes for holding in dropped)
    if as_json:
        parts = [{"model": h.maker.name, "dtype": h.maker.dtype} for h in dropped]
        sizes = [{"files": len(h.keys), "bytes": h.nbytes} for h in dropped]
        found = [part | size for part, size in zip(parts, sizes, strict=True)]
        print_json({"files": count, "bytes": freed, "unused": found, "is_dry_run": dry_run})
        return
    for holding in dropped:
        size = f"{len(holding.keys)} files, {holding.nbytes / 2**20:.1f} MiB"
        out.print(f"made by {holding.maker}: {size}")
    would = "would be " if dry_run else ""
    out.print(f"{count} files {would}removed, {freed / 2**20:.1f} MiB {would}freed")


def _prune(index: Path, max_bytes: int | None) -> tuple[int, int]:
    """Remove what is not needed; returns how many files went, and their bytes.

    Raises:
        StoreFullError: the disk is full, and stays so without the KV that may go.
    """
    folder = index / "kv"
    databases = [*filter(is_file, (index / "documents.sqlite", folder / CATALOG))]
    gone: list[tuple[int, int]] = []
    try:
        opened = _disk_store(index)
    except StoreFullError:
        gone.append(_unlink_some(folder))
        opened = _disk_store(index)
    with opened as store:

        def drop_needless() -> tuple[int, int]:
            size = store.nbytes
            count = holdings.forget_digests(folder, _unneeded(index))
            count += holdings.drop_strays(folder)
            return count, size - store.nbytes

        def prune_kept() -> tuple[int, int]:
            left = None if max_bytes is None else max(0, max_bytes - store.nbytes)
            return next((kept.prune(left) for kept in _kept_prompts(index)), (0, 0))

        def compact() -> tuple[int, int]:
            for path in databases:
                with closing(Database(path, "")) as database:
                    database.compact()
            return 0, 0

        for step in (drop_needless, lambda: store.prune(max_bytes), prune_kept, compact):
            try:
                gone.append(step())
            except StoreFullError:
                gone.append(_make_room(store, databases, max_bytes))
                gone.append(step())
    return sum(count for count, _ in gone), sum(nbytes for _, nbytes in gone)


def _unlink_some(folder: Path) -> tuple[int, int]:
    """Delete KV where the disk has no room even to open databases: whoever misses it computes it.

    What prompts left goes first; what is pinned only a database would tell. `prune` drops the rows.
    """
    sizes = list[int]()
    for place in (folder / holdings.FOLDER, folder):
        for path in place.glob("blobs/*/*.safetensors"):
            is_own = not any(one.is_symlink() for one in (path, *path.parents[:2]))
            with suppress(OSError):  # if none can go, the disk is still full, which is said
                if is_own and sum(sizes) < _ROOM:
                    size = path.stat().st_size
                    path.unlink()
                    sizes.append(size)
    return len(sizes), sum(sizes)


def _kept_prompts(index: Path) -> Iterator[KeptPrompts]:
    return holdings.kept_prompts(index / "kv", signing_key())


def _make_room(
    store: DiskStore, databases: Sequence[Path], max_bytes: int | None
) -> tuple[int, int]:
    """Make room on a full disk for writing databases anew, by what nobody asks for.

    A file goes before its row does, which takes no room.
    """
    room = _ROOM + 2 * sum(path.stat().st_size for path in databases)
    least = max(0, store.nbytes - room)
    return store.prune(least if max_bytes is None else min(least, max_bytes))


def _needless(index: Path) -> list[Problem]:
    """A problem for each KV that no document needs."""
    texts = "KV of a text that no document has; `prune` drops it"
    strays = "KV of a text that nothing knows of; `prune` drops it"
    return [
        *(Problem(name, texts) for name in sorted(_unneeded(index))),
        *(Problem(key, strays) for key in holdings.strays(index / "kv")),
    ]


def _unneeded(index: Path) -> set[str]:
    """Digests of texts that the KV store knows and no document contains."""
    with documents_of(index) as documents:
        return holdings.unneeded(index / "kv", documents.all_texts)


def _drop_unused(index: Path, dtypes: list[str] | None, *, dry_run: bool) -> list[Holding]:
    """KV that the index's model cannot use in these dtypes; deleted, unless this is a dry run."""
    from cached_rag.backends.machine import best_device, fastest_dtype, parse_dtype

    wanted = map(parse_dtype, dtypes) if dtypes else [fastest_dtype(best_device())]
    names = [str(dtype).removeprefix("torch.") for dtype in wanted]
    settings = _settings(index)
    if "model" not in settings:
        raise ConfigError(f"the index at {index} is empty; ingest documents first")
    folder = index / "kv"
    found = holdings.unused(folder, settings["model"], names)
    for holding in [] if dry_run else found:
        holdings.drop(folder, holding)
    return found


def _settings(index: Path) -> dict[str, str]:
    with documents_of(index) as documents:
        return documents.settings()


def _problems(
    path: Path, opened: Callable[[Path], Catalog | DiskStore | DocumentIndex]
) -> list[Problem]:
    """What is wrong with a file; nothing if there is no file."""
    try:
        if status_of(path) is None:
            return []
        with closing(opened(path)) as checked:
            return checked.check()
    except StoreError as error:
        return [Problem(path.name, str(error))]


def _disk_store(index: Path) -> closing[DiskStore]:
    from cached_rag.kv.disk import DiskStore  # with PyTorch, which help needs not

    return closing(DiskStore(index / "kv", _settings(index).get("codec", "raw")))
