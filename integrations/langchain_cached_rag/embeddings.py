"""sentence-transformers as LangChain embeddings, with the models `cached_rag` can find."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings

from cached_rag import Embedder


class SentenceTransformerEmbeddings(Embeddings):
    """Unit vectors from a sentence-transformers model, loaded when first used.

    Args:
        model: a hub id or folder, or the alias "all-minilm-l6-v2".
        device: see `SentenceTransformer`; None for the best this machine has.
    """

    def __init__(self, model: str = "all-minilm-l6-v2", *, device: str | None = None) -> None:
        self.model = model
        self._embedder = Embedder(model, device)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector a text.

        Raises:
            cached_rag.errors.ModelNotFoundError: the embedding model cannot be loaded.
            cached_rag.errors.MissingPackageError: `[rag]`, which brings sentence-transformers,
                is not installed.
        """
        return self._embedder.embed(texts).tolist() if texts else []

    def embed_query(self, text: str) -> list[float]:
        """A question's vector; errors as `embed_documents`."""
        return self.embed_documents([text])[0]
