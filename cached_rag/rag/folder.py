"""An index's folder: its settings, its documents, and the models that the settings name.

Loads no model before it is asked.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_rag.config import DEFAULT_MODEL, MOST_PRIMERS, ModelConfig, StoreConfig
from cached_rag.errors import IndexMismatchError, StoreError
from cached_rag.kv.entries import check_reach, until_when
from cached_rag.kv.holdings import forget, held_bytes, hold
from cached_rag.options import check_range, check_types, require
from cached_rag.rag.chunks import DEFAULT_EMBEDDING, Embedder, Embeddings, Reranker
from cached_rag.rag.index import RECALLED, DocumentIndex
from cached_rag.rag.search import Where

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine
    from cached_rag.kv.remote import RemoteTier
    from cached_rag.library.encode import Context

# The nearest chunks beyond these hardly concern a question, and would take minutes to read.
MOST_CHUNKS = 100
SYSTEM = "Answer the question with the help of the documents. Be brief and exact."
SEARCHES = ("auto", "hybrid", "vectors", "words")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexConfig:
    """What an index remembers, from its first ingestion on.

    Attributes:
        embedding: the model that embeds: a hub id, a folder or an alias of sentence-transformers.
        chunk_tokens: most tokens of a chunk, counted by the model's tokenizer.
        codec: how KV is kept on disk: "raw", "int8" or "int4" (docs/store.md).
        primers: in how many passes a chunk is encoded, each behind another neutral text, 1 to 3;
            their mean is kept (docs/methods.md).
        first_exact: encode chunks behind the prompt's head alone, too, so that the first chunk of a
            prompt is exact: a pass more, and twice the disk.
        system: the system prompt that questions are asked under; empty for none.
        search: how chunks are found: "vectors" (what is meant), "words" (BM25), "hybrid" (both), or
            "auto": both if the question has a digit, else vectors. Each `open` may choose anew.

    Raises:
        ConfigError: a number of primers, or a way to search, that does not exist.
    """

    embedding: str = DEFAULT_EMBEDDING
    chunk_tokens: int = 256
    codec: str = "raw"
    primers: int = 1
    first_exact: bool = True
    system: str = SYSTEM
    search: str = "auto"

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, MOST_PRIMERS, "primers")
        known = ", ".join(SEARCHES)
        require(self.search in SEARCHES, f"search {self.search!r} is not one of {known}")


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
            `Hit`; see `search.judge`.
        answer_anyway: let the model answer where no chunk is left. Else the answer says that
            nothing was found, and the model is not asked.
        reorder: let chunks begin in an order that an earlier prompt had, so that its KV serves
            again (where it was repaired, only with `keeps_repaired=True`); changes the prompt, and
            with it maybe the answer.

    Raises:
        ConfigError: k is no number from 1 to 100, `min_score` none from -1 to 1, or `where` no
            filter.
    """

    k: int = 6
    min_score: float | None = None
    where: Where | None = None
    answer_anyway: bool = False
    reorder: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, MOST_CHUNKS, "k")
        check_range(self, -1, 1, "min_score")
        where = self.where
        require(
            where is None or callable(where) or isinstance(where, Mapping),
            f'where is like {{"source": "docs/*"}}, or a function of a Hit, not {where!r}',
        )


@dataclass(frozen=True)
class Reranking:
    """Which of the nearest chunks are used.

    Attributes:
        reranker: puts the nearest chunks into a better order, of which the first k are used: the
            hub id or folder of a cross-encoder; or a function that is called with the question and
            their texts, and gives a number for each, the higher the better.
        candidates: how many chunks the reranker is given, at least k.

    Raises:
        ConfigError: the reranker is neither a name nor a function, or `candidates` less than 1.
    """

    reranker: Reranker | str | None = None
    candidates: int = 24

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, math.inf, "candidates")
        given = self.reranker
        is_one = given is None or isinstance(given, str) or callable(given)
        require(is_one, f"reranker is a cross-encoder's name, or a function, not {given!r}")


def as_kept(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as an index keeps them, which is as text: none is empty."""
    return {name: "" if value is None else str(value) for name, value in settings.items()}


def contexts(settings: Mapping[str, str]) -> tuple[Context | None, ...]:
    """What an index's settings have chunks encoded behind, besides the prompt's head, a pass each.

    None among them stands for nothing.
    """
    from cached_rag.library.encode import primer  # with PyTorch, which `list` needs not

    mean = primer(int(settings["primers"]))
    return (mean, None) if settings["first_exact"] == str(True) else (mean,)


DEFAULTS = as_kept(
    {"model": DEFAULT_MODEL, **vars(IndexConfig()), **{n: vars(ModelConfig())[n] for n in RECALLED}}
)


class IndexFolder:
    """What lies in an index's folder, and the models, which load when first needed.

    Attributes:
        store: how the KV is kept.
        settings: the index's, or those that were asked for; see `agree`.
        loaded: the engine that was given, or has been loaded; None before that.
        owns_engine: none was given.
    """

    def __init__(
        self,
        path: Path,
        asked: Mapping[str, str],
        store: StoreConfig,
        engine_options: Mapping[str, Any],
        engine: Engine | None,
        embedder: Embeddings | None,
    ) -> None:
        """Open it; finishes deletions that were interrupted.

        Args:
            asked: settings that were asked for; the index's, or the defaults, are the others.
            engine_options: of `Engine.load`, besides those that an index remembers.
        """
        self.path, self.store = path, store
        self.index = DocumentIndex(path / "documents.sqlite")
        self._asked, self._engine_options = dict(asked), dict(engine_options)
        self.loaded: Engine | None = engine
        self.owns_engine, self._embedder = engine is None, embedder
        self._has_same_vectors = False
        self._remote: RemoteTier | None = None
        if store.remote is not None:
            from cached_rag.kv.remote import open_remote

            self._remote = open_remote(store)
        self._is_loading = threading.Lock()  # several threads may be the first to ask
        try:
            self.agree()
        except IndexMismatchError:
            self.index.close()
            raise
        unneeded = self.index.unneeded()  # by deletions that nobody finished
        try:
            self.forget(unneeded)
        except StoreError as error:  # without `kv/`, too, questions are answered
            _log.warning("KV of deleted documents stays for now: %s", error)

    def close(self) -> None:
        """Finish what waits in the background, see `Engine.close`, and release files.

        An engine that was given stays open.
        """
        self.index.close()
        if self.loaded is not None and self.owns_engine:
            self.loaded.close()
        if self._remote is not None:
            self._remote.close(0)

    def agree(self) -> bool:
        """Take over the settings of the index, to which another process may have given some.

        Returns:
            Whether it has any: an index without documents has not.
        """
        kept = self.index.agree(self._asked)
        self.settings = DEFAULTS | kept | self._asked
        return bool(kept)

    @property
    def engine(self) -> Engine:
        """The engine, loaded on first use."""
        from cached_rag.engine.engine import Engine  # with all that runs models

        with self._is_loading:
            if self.loaded is None:
                self.agree()
                store = replace(self.store, codec=self.settings["codec"])
                model = self.settings["model"]
                self.loaded = Engine.load(model, store=store, **self.load_options())
                self._asked = self.settings  # from now on no others will do
            return self.loaded

    @property
    def embedder(self) -> Embeddings:
        """The embedding model, loaded on first use; the index has its vectors from then on."""
        with self._is_loading:
            if self._embedder is None:
                self.agree()
                embedder = Embedder(self.settings["embedding"])
                embedder.load()
                self._embedder = embedder
                self._asked = self.settings
            if not self._has_same_vectors:
                self.index.see_vectors_of(self._embedder)
                self._has_same_vectors = True
            return self._embedder

    def load_options(self) -> dict[str, Any]:
        """How the model is loaded; says where its KV will not be the index's."""
        for name, before in self._replaced().items():
            _log.warning(
                "the index was made %s; with %r its chunks are encoded anew",
                *(f"with {name} {before!r}" if before else f"without {name}", self.settings[name]),
            )
        return self._engine_options | {name: self.settings[name] or None for name in RECALLED}

    def _replaced(self) -> dict[str, str]:
        """What the index has of those settings of its model that are others now."""
        kept = self.index.settings()
        return {n: kept[n] for n in RECALLED if n in kept and kept[n] != self.settings[n]}

    def held_bytes(self, texts: Collection[str]) -> int | None:
        """How many bytes of KV there are on disk, if all these texts have theirs; else None.

        Loads no model. A remote store, and an engine of somebody's own, have to be asked instead.
        """
        if self.loaded is not None or self._remote is not None or self._replaced():
            return None
        from cached_rag.library.matching import ANCHOR  # with PyTorch, which `list` needs not

        chunks = [text for text in texts if len(text.strip()) >= ANCHOR]
        store = replace(self.store, codec=self.settings["codec"])
        return held_bytes(self.path / "kv", chunks, len(contexts(self.settings)), store)

    def forget(self, texts: Sequence[str]) -> int:
        """Delete the KV of texts, by whatever model and in whatever codec; says how many went."""
        if not texts:
            return 0
        gone = 0 if self.loaded is None else self.loaded.forget(texts)
        gone += forget(self.path / "kv", texts, self._remote)
        self.index.forgotten(texts)
        return gone

    def hold(self, texts: Sequence[str], *, pinned: bool | None, ttl_seconds: float | None) -> int:
        """Say how long KV of texts is kept, by whatever model; see `Engine.hold`."""
        count, until, most = 0, until_when(ttl_seconds), self.store.disk_bytes
        check_reach(until, is_shared=self._remote is not None)
        if self.loaded is not None:  # its KV may be elsewhere
            count = self.loaded.hold(texts, pinned=pinned, ttl_seconds=ttl_seconds)
        return max(count, hold(self.path / "kv", texts, most, pinned=pinned, until=until))

    def forget_later(self, texts: Sequence[str]) -> None:
        """As `forget`; what the remote store does not delete now, the next `open` does."""
        try:
            self.forget(texts)
        except StoreError as error:
            if self._remote is None:
                raise
            _log.warning("%s", error)
