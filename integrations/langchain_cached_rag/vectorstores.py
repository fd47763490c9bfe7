"""A FAISS vector store whose documents' KV comes and goes with them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from langchain_cached_rag.documents import DocumentTable
from langchain_cached_rag.filters import Filter
from langchain_cached_rag.retrievers import Encode
from langchain_cached_rag.settings import EngineSettings
from langchain_cached_rag.vector_index import Hit, VectorIndex

_FILE = "documents.sqlite"


class CachedRAGVectorStore(VectorStore):
    """Documents, searched by exact cosine similarity, prefilled when they are added.

    Example:
        store = CachedRAGVectorStore(SentenceTransformerEmbeddings(), llm=llm, path="my-index")
        store.add_documents(documents)
        retriever = store.as_retriever(search_kwargs={"k": 6})
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        llm: EngineSettings | None = None,
        path: str | Path | None = None,
        encode: Encode = "eager",
        prompt: BasePromptTemplate[Any] | None = None,
        variable: str = "context",
    ) -> None:
        """A store, empty or with what is at `path`.

        Args:
            llm: the `ChatCachedRAG` or `CachedRAGLLM` that will read the documents; None for none.
            path: folder to keep the documents in; None for memory.
            encode: "eager" prefills documents when they are added, "background" after the first
                answer that used them, "off" leaves that to others.
            prompt, variable: the chain's prompt, for "eager"; see `EngineSettings.encode`.
        """
        self._embedding = embedding
        self._llm = llm if encode != "off" else None
        self._is_eager = encode == "eager"
        self._prompt, self._variable = prompt, variable
        self._table = DocumentTable(None if path is None else Path(path) / _FILE)
        self._index = VectorIndex(self._table)

    @property
    def embeddings(self) -> Embeddings:
        """What turns texts into vectors."""
        return self._embedding

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> CachedRAGVectorStore:
        """A store with texts in it; further arguments are the constructor's."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    # Documents -------------------------------------------------------------------------------

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts; see `add_documents`."""
        texts = list(texts)
        about = metadatas or [{} for _ in texts]
        names: Sequence[str | None] = ids or [None] * len(texts)
        triples = zip(texts, about, names, strict=True)
        return self.add_documents([Document(t, metadata=m, id=name) for t, m, name in triples])

    def add_documents(
        self, documents: list[Document], *, ids: list[str] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add documents, or replace those with the same ids, and prefill them.

        Returns:
            Their ids; those that had none get one.

        Raises:
            ValueError: metadata that is no JSON, or vectors of another length than before.
        """
        if not documents:
            return []
        given: Sequence[str | None] = ids or [document.id for document in documents]
        named = {
            name: Document(document.page_content, id=name, metadata=document.metadata)
            for document, name in zip(documents, map(_or_new, given), strict=True)
        }
        texts = [document.page_content for document in named.values()]
        vectors = self._index.checked(self._embedding.embed_documents(texts))
        self._forget(self._table.put(list(named.values()), vectors))
        if self._llm is not None and self._is_eager:
            self._llm.encode_all(texts, prompt=self._prompt, variable=self._variable)
        elif self._llm is not None:
            self._llm.register(texts)
        return list(named)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Drop documents, None for all of them, and KV that no other document needs."""
        self._forget(self._table.delete(ids))
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents that are there, in the order of `ids`."""
        return self._table.by_ids(ids)

    def save_local(self, folder: str | Path) -> None:
        """Write the documents to a folder, over those that are there; KV has its own store."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._table.copy_to(Path(folder) / _FILE)

    @classmethod
    def load_local(
        cls, folder: str | Path, embedding: Embeddings, **kwargs: Any
    ) -> CachedRAGVectorStore:
        """A store in the folder that `save_local` wrote to; it is changed there from now on.

        Further arguments are the constructor's.

        Raises:
            FileNotFoundError: there is no store in the folder.
        """
        if not (Path(folder) / _FILE).is_file():
            raise FileNotFoundError(f"there is no {_FILE} in {folder}; `save_local` writes one")
        return cls(embedding, path=folder, **kwargs)

    def close(self) -> None:
        """Release the file."""
        self._table.close()

    def _forget(self, texts: list[str]) -> None:
        if self._llm is not None and texts:
            self._llm.forget(texts)

    # Search ----------------------------------------------------------------------------------

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The k documents nearest to a query, best first; `filter` as in `filters.as_predicate`."""
        return [d for d, _ in self.similarity_search_with_score(query, k, filter=filter)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """As `similarity_search`, each with its cosine similarity: higher is nearer."""
        hits = self._index.search(self._embedding.embed_query(query), k, filter)
        return [(hit.document, hit.score) for hit in self._read(hits)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """As `similarity_search`, for a query's vector."""
        return [hit.document for hit in self._read(self._index.search(embedding, k, filter))]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Near documents that differ: see `max_marginal_relevance_search_by_vector`."""
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(
            vector, k, fetch_k, lambda_mult, filter=filter
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """k of the `fetch_k` nearest, each as near and as unlike those before it as can be.

        Args:
            lambda_mult: 1 for nearness alone, 0 for difference alone.
        """
        hits = self._index.search(embedding, fetch_k, filter)
        vectors = [hit.vector.tolist() for hit in hits]
        chosen = maximal_marginal_relevance(np.array(embedding), vectors, lambda_mult, k)
        return [hit.document for hit in self._read([hits[index] for index in chosen])]

    def _select_relevance_score_fn(self) -> Any:
        return lambda cosine: min(1.0, max(0.0, (1 + cosine) / 2))  # rounding may exceed 1

    def _read(self, hits: list[Hit]) -> list[Hit]:
        """The hits; whoever gets them is likely to put them in a prompt."""
        if self._llm is not None and hits:
            self._llm.prefetch(hit.document.page_content for hit in hits)
        return hits


def _or_new(name: str | None) -> str:
    return name or str(uuid.uuid4())
