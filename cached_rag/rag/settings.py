"""Settings of an index, and of what is found in it for a question. Loads no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING

from cached_rag.config import DEFAULT_MODEL, MOST_PRIMERS, ModelConfig
from cached_rag.errors import ConfigError
from cached_rag.options import check_types
from cached_rag.rag.hits import Where

if TYPE_CHECKING:
    from cached_rag.library.encode import Context

DEFAULT_EMBEDDING = "all-minilm-l6-v2"
# The nearest chunks beyond these hardly concern a question, and would take minutes to read.
MOST_CHUNKS = 100
# Told a question and texts, says how well each of them answers it; the higher, the better.
Reranker = Callable[[str, list[str]], Sequence[float]]
SYSTEM = "Answer the question with the help of the documents. Be brief and exact."
SEARCHES = ("hybrid", "vectors", "words")


@dataclass(frozen=True)
class IndexConfig:
    """What an index remembers, from its first ingestion on.

    Attributes:
        embedding: the model that embeds: a hub id, a folder or an alias of sentence-transformers.
        chunk_tokens: most tokens of a chunk, counted by the model's tokenizer.
        codec: how KV is kept on disk: "raw", or "int8" for half of it (docs/store.md).
        context: what chunks are encoded behind, besides the prompt's head: "primer" (some neutral
            text), "none", "both" of these (the first chunk of a prompt is exact then),
            "primer:3" or "both:3" (the mean behind three such texts, in three passes instead of
            one). "both" takes a pass more, and twice the disk; see docs/methods.md.
        system: the system prompt that questions are asked under; empty for none.
        search: how chunks are found: by "vectors" (what is meant), by "words" (BM25: part numbers,
            names), or "hybrid" by both. Each `open` may choose anew.

    Raises:
        ConfigError: a context, or a way to search, that does not exist.
    """

    embedding: str = DEFAULT_EMBEDDING
    chunk_tokens: int = 256
    codec: str = "raw"
    context: str = "both"
    system: str = SYSTEM
    search: str = "vectors"

    def __post_init__(self) -> None:
        check_types(self)
        _parsed(self.context)
        if self.search not in SEARCHES:
            raise ConfigError(f"search {self.search!r} is not one of {', '.join(SEARCHES)}")


@dataclass(frozen=True)
class Retrieval:
    """Which chunks a question is answered from.

    Attributes:
        k: how many chunks, 1 to 100; those that fit the model's context are used.
        min_score: leave out chunks whose cosine similarity (-1 to 1) to the question is less; None
            uses all k. `report.notes` says where none is left, or the nearest one has less than
            0.25.
        where: which chunks may be used, by their source, title, ordinal, or metadata such as page
            and heading. `{"source": "docs/guide/*", "page": range(3, 9)}`, or a function of a
            `Hit`; see `hits.judge`.
        answer_anyway: let the model answer where no chunk is left. Else the answer says that
            nothing was found, and the model is not asked.
        reorder: let chunks begin in an order that an earlier prompt had, so that its KV serves
            again (where it was repaired, only with `keeps_repaired=True`); changes the prompt, and
            with it maybe the answer.

    Raises:
        ConfigError: k is no number from 1 to 100, or `min_score` none from -1 to 1.
    """

    k: int = 6
    min_score: float | None = None
    where: Where | None = None
    answer_anyway: bool = False
    reorder: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.k, Integral) or not 1 <= self.k <= MOST_CHUNKS:
            raise ConfigError(
                f"k, the number of chunks, must be from 1 to {MOST_CHUNKS}, not {self.k!r}"
            )
        if self.min_score is None:
            return
        if not isinstance(self.min_score, Real) or not -1 <= self.min_score <= 1:
            raise ConfigError(
                "min_score is a number from -1 to 1, as a cosine similarity is, or None; not "
                f"{self.min_score!r}"
            )


@dataclass(frozen=True)
class Reranking:
    """Which of the nearest chunks are used.

    Attributes:
        reranker: puts the nearest chunks into a better order, of which the first k are used: the
            hub id or folder of a cross-encoder; or a function that is called with the question and
            their texts, and gives a number for each, the higher the better.
        candidates: how many chunks the reranker is given, at least k.
    """

    reranker: Reranker | str | None = None
    candidates: int = 24


def as_kept(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as an index keeps them, which is as text: none is empty."""
    return {name: "" if value is None else str(value) for name, value in settings.items()}


def contexts(text: str) -> tuple[Context | None, ...]:
    """What chunks are encoded behind, besides the prompt's head, one pass for each.

    Args:
        text: the setting; None among the results stands for nothing.

    Raises:
        ConfigError: a context that does not exist.
    """
    from cached_rag.library.encode import primer  # with PyTorch, which a command's help needs not

    kind, count = _parsed(text)
    if kind == "none":
        return (None,)
    return (primer(count), None) if kind == "both" else (primer(count),)


def _parsed(text: str) -> tuple[str, int]:
    """The kind of context and the number of primers."""
    kind, _, number = text.partition(":")
    count = int(number) if number.isdecimal() else int(text in ("primer", "both"))
    is_known = kind in ("primer", "both") and 1 <= count <= MOST_PRIMERS
    if not is_known and text != "none":
        raise ConfigError(
            f"context {text!r} is not one of none, primer, both, primer:n, both:n (n from 1 to "
            f"{MOST_PRIMERS})"
        )
    return kind, count


# Those of a model that an index remembers, too; its KV is of another model if they change.
RECALLED = ("backend", "dtype", "weights", "revision", "adapter")
DEFAULTS = as_kept(
    {"model": DEFAULT_MODEL, **vars(IndexConfig()), **{n: vars(ModelConfig())[n] for n in RECALLED}}
)
