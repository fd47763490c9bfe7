"""An index's folder: its documents, its settings, and the models that these name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_rag.config import StoreConfig
from cached_rag.errors import IndexMismatchError, StoreError
from cached_rag.kv.holdings import forget, held_bytes
from cached_rag.rag.embedding import Embedder, Embeddings
from cached_rag.rag.index import DocumentIndex
from cached_rag.rag.prompts import Prompts
from cached_rag.rag.settings import DEFAULTS, RECALLED, contexts

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine
    from cached_rag.kv.remote import RemoteTier
    from cached_rag.library.encode import Context

_log = logging.getLogger(__name__)


class IndexFolder:
    """What lies in an index's folder, and the models, which load when first needed.

    Attributes:
        store: how the KV is kept.
        settings: the index's, or those that were asked for; see `agree`.
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
        self._engine, self._embedder = engine, embedder
        self._has_same_vectors = False
        self._remote = _remote(store)
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
        """Finish what waits in the background, see `Engine.close`, and release files."""
        self.index.close()
        if self._engine is not None:
            self._engine.close()
        if self._remote is not None:
            self._remote.close(0)

    def agree(self) -> None:
        """Take over the settings of the index, to which another process may have given some."""
        self.settings = DEFAULTS | self.index.agree(self._asked) | self._asked

    @property
    def contexts(self) -> tuple[Context | None, ...]:
        """What chunks are encoded behind, besides the prompt's head."""
        return contexts(self.settings["context"])

    @property
    def engine(self) -> Engine:
        """The engine, loaded on first use."""
        from cached_rag.engine.engine import Engine  # with all that runs models

        with self._is_loading:
            if self._engine is None:
                self.agree()
                store = replace(self.store, codec=self.settings["codec"])
                model = self.settings["model"]
                self._engine = Engine.load(model, store=store, **self.load_options())
                self._asked = self.settings  # from now on no others will do
            return self._engine

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

    @property
    def prompts(self) -> Prompts:
        """How the model is asked."""
        return Prompts(self.engine, self.settings["system"])

    def load_options(self) -> dict[str, Any]:
        """How the model is loaded; says where its KV will not be the index's."""
        for name, before in self._replaced().items():
            _log.warning(
                "the index was made with %s %r; with %r its chunks are encoded anew",
                *(name, before, self.settings[name]),
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
        if self._engine is not None or self._remote is not None or self._replaced():
            return None
        return held_bytes(self.path / "kv", texts, len(self.contexts))

    def forget(self, texts: Sequence[str]) -> int:
        """Delete the KV of texts, by whatever model and in whatever codec; says how many went."""
        if not texts:
            return 0
        gone = 0 if self._engine is None else self._engine.forget(texts)
        gone += forget(self.path / "kv", texts, self._remote)
        self.index.forgotten(texts)
        return gone

    def forget_later(self, texts: Sequence[str]) -> None:
        """As `forget`; what the remote store does not delete now, the next `open` does."""
        try:
            self.forget(texts)
        except StoreError as error:
            if self._remote is None:
                raise
            _log.warning("%s", error)


def _remote(store: StoreConfig) -> RemoteTier | None:
    if store.remote is None:
        return None
    from cached_rag.kv.remote import open_remote

    return open_remote(store)
