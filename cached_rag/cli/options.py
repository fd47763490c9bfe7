"""The options that several commands have, each with its name and help in one place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cached_rag.cli.settings import OptionsOf
from cached_rag.config import GenerationConfig, ModelConfig, StoreConfig
from cached_rag.errors import ConfigError
from cached_rag.rag.folder import IndexConfig, Retrieval

if TYPE_CHECKING:
    from cached_rag import CachedRAG

DEFAULT_INDEX = Path("cached-rag-index")
Number = TypeVar("Number", int, float)

_MODEL = "Alias, Hugging Face id, folder or .gguf file."


def at_home(path: Path | None) -> Path | None:
    """A path whose `~` is the user's home; of `--index=~/x`, unlike `--index ~/x`, shells keep it.

    Raises:
        ConfigError: nobody knows where the home is.
    """
    try:
        return path and path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}; write the whole path") from error


def to_write(path: Path | None) -> Path | None:
    """A file for results, of which it is known before they are measured that it can be written.

    Raises:
        ConfigError: it cannot.
    """
    path = at_home(path)
    if path and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{path} cannot be written; name a file in a folder that is there")
    return path


Index = Annotated[Path, typer.Option("--index", callback=at_home, help="Folder of the index.")]
Model = Annotated[str, typer.Option(help=_MODEL)]
IndexModel = Annotated[
    str | None, typer.Option("--model", help=f"{_MODEL} An index keeps the one it was made with.")
]

# How a model is loaded. Of its `model_kwargs` some load code, which no file of settings may name.
LOADING = OptionsOf(
    (ModelConfig,), shown=("device", "dtype", "weights", "backend"), but=("model_kwargs",)
)
Loading = Annotated[dict[str, Any], LOADING]
# What a form, or a method that is being studied, needs stands in programs.
_OF_PROGRAMS = ("grammar", "check_layer", "gradual", "logprobs", "ignore_eos")
# What the first ingestion of an index settles.
SETTLED = ("embedding", "chunk_tokens", "codec", "context", "system")
ENVIRONMENT = {"remote": "CACHED_RAG_REMOTE"}
# What an index has in its own folder. The key comes from the environment: others see what a command
# is given.
NOT_OF_AN_INDEX = ("path", "namespace", "primers", "first_exact", "signing_key", "model_kwargs")


def filters(where: list[str]) -> dict[str, list[str]]:
    """What `--where` says, by field.

    Raises:
        ConfigError: one of them has no "=".
    """
    found: dict[str, list[str]] = {}
    for text in where:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--where takes FIELD=VALUE, not {text!r}")
        found.setdefault(name, []).append(value)
    return found


def answering(*kinds: type, shown: tuple[str, ...] = (), **defaults: Any) -> OptionsOf:
    """Which chunks a question is answered from, and how."""
    return OptionsOf(
        (*kinds, GenerationConfig),
        shown=("k", "method", "quality", "max_tokens", *shown),
        but=_OF_PROGRAMS,
        defaults=defaults,
        parsers={"where": filters} if Retrieval in kinds else {},
    )


def opening(*kinds: type, shown: tuple[str, ...] = (), **defaults: Any) -> OptionsOf:
    """How an index that is there is opened: all but what its first ingestion settled."""
    return OptionsOf(
        (IndexConfig, *kinds, ModelConfig, StoreConfig),
        shown=("search", "device", "backend", "remote", *shown),
        but=(*SETTLED, *NOT_OF_AN_INDEX),
        defaults=defaults,
        environment=ENVIRONMENT,
    )


def require_index(index: Path) -> None:
    """Refuse a folder that is no index.

    Raises:
        ConfigError: it is none.
    """
    if not (index / "documents.sqlite").is_file():
        raise ConfigError(
            f"there is no index at {index}; make one with: cached-rag ingest PATH --index {index}"
        )


def opened(index: Path, **options: Any) -> CachedRAG:
    """See `CachedRAG.open`; a folder that is no index is refused, as by `require_index`."""
    from cached_rag import CachedRAG

    require_index(index)
    return CachedRAG.open(index, **signed(options))


def signed(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a store, with the key that the environment has."""
    key = signing_key()
    return {**options, "signing_key": key} if key else options


def signing_key() -> str | None:
    """What KV is signed with."""
    return os.environ.get("CACHED_RAG_SIGNING_KEY") or None


def names(text: str) -> list[str]:
    """Names between commas; a comma between the options of one method does not split."""
    parts: list[str] = []
    for part in text.split(","):
        method, _, _ = part.partition("@")  # what follows names how chunks are encoded
        if parts and "=" in method and ":" not in method and ":" in parts[-1]:
            parts[-1] += "," + part
        elif part.strip():
            parts.append(part.strip())
    return parts


def numbers(text: str, kind: Callable[[str], Number], what: str) -> list[Number]:
    """Numbers between commas.

    Args:
        what: says in the error what they are.

    Raises:
        ConfigError: one of them is no number.
    """
    try:
        return [kind(part) for part in names(text)]
    except ValueError:
        raise ConfigError(f"{what}, comma-separated where several, not {text!r}") from None


def counts(text: str, what: str) -> list[int]:
    """Whole numbers between commas, each 1 or more; see `numbers`."""
    found = numbers(text, int, f"{what} are whole numbers")
    if not found or min(found) < 1:
        raise ConfigError(f"{what} are whole numbers, 1 or more, not {text!r}")
    return found
