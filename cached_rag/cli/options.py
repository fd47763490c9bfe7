"""The options that several commands have, each with its name and help in one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cached_rag.errors import ConfigError

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
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; without it, this machine's fastest."),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or mps; without it, the best this machine has.")
]
_WEIGHTS = typer.Option(help="How weights are kept for decoding: as stored, bf16, int8 or int4.")
Weights = Annotated[str, _WEIGHTS]
IndexWeights = Annotated[str | None, _WEIGHTS]
Adapter = Annotated[
    str | None, typer.Option(help="Folder or hub id of a LoRA adapter (extra lora).")
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="What a chat template that knows enable_thinking is told; without it, nothing.",
    ),
]
_BACKEND = typer.Option(
    "--backend", help="What runs the model: transformers, or llama.cpp for a GGUF."
)
BackendName = Annotated[str, _BACKEND]
# Those that an index was made with, if none is given.
IndexBackend = Annotated[str | None, _BACKEND]
Method = Annotated[
    str,
    typer.Option(help="How cached text is used: auto, fast, full, prefix, reuse, cacheblend, ..."),
]
Quality = Annotated[
    str | None, typer.Option(help="The same in a word: exact (full prefill's answers), auto, fast.")
]
Methods = Annotated[str, typer.Option(help="Methods to compare, comma-separated.")]
Codec = Annotated[
    str | None, typer.Option(help="How KV is kept: raw, or int8 for half the disk (new index).")
]
Drafts = Annotated[
    bool, typer.Option(help="Check several tokens in one pass where the answer copies the prompt.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        help="Use only chunks with FIELD=VALUE, such as source=docs/guide/*, page=3 or "
        "'heading=*Install*'. Of one field repeated, any value will do."
    ),
]
Remote = Annotated[
    str | None,
    typer.Option(
        envvar="CACHED_RAG_REMOTE",
        help="A KV store that machines share, such as redis://host:6379/0 or s3://bucket/kv. "
        "CACHED_RAG_SIGNING_KEY signs KV, there and on disk.",
    ),
]
Retrieved = Annotated[int, typer.Option("-k", help="Chunks to retrieve.")]
SearchBy = Annotated[
    str | None,
    typer.Option(
        "--search", help="How chunks are found: hybrid, vectors or words; an index remembers it."
    ),
]
RerankerName = Annotated[
    str | None,
    typer.Option("--reranker", help="Hub id or folder of a cross-encoder that orders chunks anew."),
]
MinScore = Annotated[
    float | None,
    typer.Option(help="Leave out chunks whose similarity to the question, -1 to 1, is less."),
]
AnswerAnyway = Annotated[
    bool, typer.Option("--answer-anyway", help="Let the model answer where no chunk is left.")
]
Temperature = Annotated[
    float, typer.Option(help="0 always takes the likeliest token; more is more random.")
]
Seed = Annotated[int | None, typer.Option(help="Makes random answers repeatable.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
Repeats = Annotated[
    int, typer.Option(min=1, help="Rounds that are measured, after a round to warm up.")
]
Plot = Annotated[
    Path | None,
    typer.Option(callback=to_write, help="Draw the figures to this file (.png, .svg, ...)."),
]


def require_index(index: Path) -> None:
    """Refuse a folder that is no index.

    Raises:
        ConfigError: it is none.
    """
    if not (index / "documents.sqlite").is_file():
        raise ConfigError(
            f"there is no index at {index}; make one with: cached-rag ingest PATH --index {index}"
        )


def opened(index: Path, remote: str | None = None, **options: Any) -> CachedRAG:
    """See `CachedRAG.open`; a folder that is no index is refused, as by `require_index`."""
    from cached_rag import CachedRAG

    require_index(index)
    return CachedRAG.open(index, **shared(remote), **options)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not left to their defaults."""
    return {name: value for name, value in options.items() if value is not None}


def shared(remote: str | None) -> dict[str, Any]:
    """What `--remote` says, as `CachedRAG.open` and `StoreConfig` take it."""
    return {"remote": remote, "signing_key": signing_key()}


def signing_key() -> str | None:
    """What KV is signed with. In the environment, for others see what a command is given."""
    return os.environ.get("CACHED_RAG_SIGNING_KEY") or None


def filters(where: list[str] | None) -> dict[str, list[str]] | None:
    """What `--where` says, by field.

    Raises:
        ConfigError: one of them has no "=".
    """
    found: dict[str, list[str]] = {}
    for text in where or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--where takes FIELD=VALUE, not {text!r}")
        found.setdefault(name, []).append(value)
    return found or None


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
