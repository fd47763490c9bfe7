"""A vector store around any other: what is added is prefilled, what is deleted is forgotten."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cached_rag import ConfigError, Embedder
from cached_rag.spi import Encode, Learner, Ledger, Progress, checked
from langchain_cached_rag.settings import EngineSettings, unwrapped

_log = logging.getLogger(__name__)
# Ids of documents, of which some may have none yet, or of all documents; and texts by id, or None
# where a store cannot say.
Ids = Sequence[str | None] | None
Held = dict[str, str] | None


def _search(name: str) -> Callable[..., Any]:
    """A search of the store inside, whose finds are brought into memory meanwhile."""

    @wraps(getattr(VectorStore, name), updated=())  # else it stays abstract
    def search(self: CachedRAGVectorStore, *args: Any, **kwargs: Any) -> list[Any]:
        return self._found(getattr(self.vector_store, name)(*args, **kwargs))

    return search


def _asearch(name: str) -> Callable[..., Any]:
    """As `_search`, off the event loop."""

    @wraps(getattr(VectorStore, name), updated=())  # else it stays abstract
    async def search(self: CachedRAGVectorStore, *args: Any, **kwargs: Any) -> list[Any]:
        found = await getattr(self.vector_store, name)(*args, **kwargs)
        return await asyncio.to_thread(self._found, found)

    return search


class CachedRAGVectorStore(VectorStore):
    """Any vector store, with KV for what it holds.

    Searches, their filters and their scores are those of the store inside, and so are saving and
    loading: `store.vector_store` is it. What is added or deleted there directly has no KV here.

    Example:
        inner = InMemoryVectorStore(SentenceTransformerEmbeddings())
        store = CachedRAGVectorStore(inner, llm)
        store.add_documents(documents)
        retriever = store.as_retriever(search_kwargs={"k": 6})
    """

    def __init__(
        self,
        vector_store: VectorStore,
        llm: EngineSettings | Runnable[Any, Any],
        *,
        encode: Encode = "eager",
        prompt: BasePromptTemplate[Any] | None = None,
        variable: str = "context",
        ledger: str | Path | None = None,
        progress: Progress = None,
    ) -> None:
        """Wrap a vector store; what it holds already is left as it is.

        Args:
            llm: the `ChatCachedRAG` or `CachedRAGLLM` that will read the documents, or what was
                made of it by `bind`, `with_retry`, `with_structured_output` and the like.
            encode: "eager" prefills documents when they are added, "background" after the first
                answer that used them, "off" leaves that to others.
            prompt, variable: the chain's prompt, for "eager"; see `EngineSettings.encode`.
            ledger: file that remembers which document has which text, so that a later process can
                forget what it deletes; None for memory. A store that implements `get_by_ids` is
                asked for texts that the ledger does not know.
            progress: how "eager" shows how far it is; see `cached_rag.encode_progress`.

        Raises:
            cached_rag.ConfigError: `vector_store` is none, `encode` none of these, or `prompt` no
                template; or there is no single model in `llm`.
        """
        said = "is no vector store; give one, such as InMemoryVectorStore(embeddings)"
        self.vector_store: VectorStore = checked(vector_store, VectorStore, said)
        self._llm = unwrapped(llm)
        options = {"prompt": prompt, "variable": variable, "progress": progress}
        self._learner = Learner(self._llm, encode, options)
        self._ledger = Ledger(ledger)

    @property
    def embeddings(self) -> Embeddings | None:
        """What turns texts into vectors."""
        return self.vector_store.embeddings

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        vector_store: type[VectorStore] = InMemoryVectorStore,
        store_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> CachedRAGVectorStore:
        """A store with texts in it; further arguments are the constructor's.

        Args:
            vector_store: the class of the store inside.
            store_options: further arguments of that class's `from_texts`.
        """
        names = [name or str(uuid.uuid4()) for name in ids or [""] * len(texts)]
        options = store_options or {}
        inner = vector_store.from_texts(texts, embedding, metadatas, ids=names, **options)
        store = cls(inner, **kwargs)
        pairs = zip(texts, metadatas or [{}] * len(texts), strict=True)
        store._learn(names, [Document(page_content=t, metadata=m) for t, m in pairs], {})
        return store

    def close(self) -> None:
        """Release the ledger's file."""
        self._ledger.close()

    # What changes ----------------------------------------------------------------------------

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents to the store inside, and prefill them.

        Where it replaces documents by their ids, KV of the old texts goes.

        Args:
            kwargs: what the store inside takes, `ids` among it.

        Raises:
            cached_rag.ConfigError: that store has some of these ids, and would break rather
                than replace their documents, as FAISS does. Nothing is added.
        """
        given = self._given(documents, kwargs)
        before = self._recall(given, self._held(self._unknown(given)))
        ids = self.vector_store.add_documents(documents, **kwargs)
        self._learn(ids, documents, self._held(before))
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """As `add_documents`, off the event loop."""
        given = await asyncio.to_thread(self._given, documents, kwargs)
        before = await self._arecall(given)
        ids = await self.vector_store.aadd_documents(documents, **kwargs)
        held = await self._aheld(before)
        await asyncio.to_thread(self._learn, ids, documents, held)
        return ids

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents from the store inside, and KV that no other document needs.

        Without ids, what that store deletes is found out by `get_by_ids`; where it has none, KV
        stays until others need its room, and a warning says so.
        """
        before = self._recall(ids, self._held(self._unknown(ids)))
        done = self.vector_store.delete(ids, **kwargs)
        self._drop(ids, before, self._held(before))
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """As `delete`, off the event loop."""
        before = await self._arecall(ids)
        done = await self.vector_store.adelete(ids, **kwargs)
        held = await self._aheld(before)
        await asyncio.to_thread(self._drop, ids, before, held)
        return done

    def _given(self, documents: list[Document], options: dict[str, Any]) -> list[str | None]:
        """The ids that documents are added with; errors as `add_documents`."""
        ids = options.get("ids") or [document.id for document in documents]
        # FAISS and its like write vectors first; then their docstore refuses, and no search works.
        if hasattr(self.vector_store, "docstore") and (there := self._held(_named(ids))):
            raise ConfigError(
                f"{type(self.vector_store).__name__} replaces no documents, and has {len(there)} "
                f"of these ids ({', '.join([*there][:9])}); nothing was added; delete them first"
            )
        return list(ids)

    def _unknown(self, ids: Ids) -> list[str]:
        """Those of these ids whose texts the ledger does not have."""
        known = self._ledger.texts(_named(ids))
        return [name for name in _named(ids) if name not in known]

    def _recall(self, ids: Ids, held: Held) -> list[str]:
        """Documents with the texts that these ids have now, None for all that are known.

        An id may have two spellings, as UUIDs do: so more documents may change than are named.

        Args:
            held: what the store inside says of `_unknown` ones.
        """
        if ids is None:
            return self._ledger.ids()
        self._write(held or {})
        return self._ledger.alike(_named(ids))

    async def _arecall(self, ids: Ids) -> list[str]:
        held = await self._aheld(await asyncio.to_thread(self._unknown, ids))
        return await asyncio.to_thread(self._recall, ids, held)

    def _learn(self, ids: list[str], documents: list[Document], held: Held) -> None:
        last = dict(zip(ids, documents, strict=True))  # an id may be there twice: the last stays
        texts = {name: document.page_content for name, document in last.items()}
        # Loaders name the file or page that a document is from, and splitters copy that.
        sources = [str(document.metadata.get("source", name)) for name, document in last.items()]
        self._write((held or {}) | texts)
        self._learner.learn(list(texts.values()), sources)

    def _drop(self, ids: list[str] | None, before: list[str], held: Held) -> None:
        if held is not None:
            ids = [name for name in before if name not in held]
        elif ids is None:
            kind = type(self.vector_store).__name__
            _log.warning("%s cannot say which documents it deleted; their KV is kept", kind)
        self._ledger.remove(ids or [], self._llm.forget)

    def _write(self, texts: dict[str, str]) -> None:
        self._ledger.put(((name, name, text) for name, text in texts.items()), self._llm.forget)

    def _held(self, ids: list[str]) -> Held:
        """Texts that the store inside has now, by id; None if it cannot say."""
        if not ids:
            return {}
        get = self.vector_store.get_by_ids
        try:
            found = get(ids)
            if _lacks_ids(found, ids):
                return {name: found[0].page_content for name in ids if (found := get([name]))}
        except NotImplementedError:
            return None
        return {str(document.id): document.page_content for document in found}

    async def _aheld(self, ids: list[str]) -> Held:
        """As `_held`, by the client that an asynchronous store may have alone."""
        if not ids:
            return {}
        get = self.vector_store.aget_by_ids
        try:
            found = await get(ids)
            if _lacks_ids(found, ids):
                return {name: found[0].page_content for name in ids if (found := await get([name]))}
        except NotImplementedError:
            return None
        return {str(document.id): document.page_content for document in found}

    # What does not ---------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents of the store inside."""
        return self.vector_store.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """As `get_by_ids`."""
        return await self.vector_store.aget_by_ids(ids)

    similarity_search = _search("similarity_search")
    similarity_search_with_score = _search("similarity_search_with_score")
    similarity_search_with_relevance_scores = _search("similarity_search_with_relevance_scores")
    similarity_search_by_vector = _search("similarity_search_by_vector")
    max_marginal_relevance_search = _search("max_marginal_relevance_search")
    max_marginal_relevance_search_by_vector = _search("max_marginal_relevance_search_by_vector")
    asimilarity_search = _asearch("asimilarity_search")
    asimilarity_search_with_score = _asearch("asimilarity_search_with_score")
    asimilarity_search_with_relevance_scores = _asearch("asimilarity_search_with_relevance_scores")
    asimilarity_search_by_vector = _asearch("asimilarity_search_by_vector")
    amax_marginal_relevance_search = _asearch("amax_marginal_relevance_search")
    amax_marginal_relevance_search_by_vector = _asearch("amax_marginal_relevance_search_by_vector")

    def _found(self, results: list[Any]) -> list[Any]:
        """Documents, or pairs of a document and its score, as they came."""
        found = [result[0] if isinstance(result, tuple) else result for result in results]
        self._llm.prefetch(document.page_content for document in found)
        return results


class SentenceTransformerEmbeddings(Embeddings):
    """Unit vectors from a sentence-transformers model, loaded when first used.

    Args:
        model: a hub id or folder, or the alias "all-minilm-l6-v2".
        model_name: the same, as `HuggingFaceEmbeddings` has it.
        device: see `SentenceTransformer`; None for the best this machine has.
    """

    def __init__(
        self, model: str = "all-minilm-l6-v2", *, model_name: str = "", device: str | None = None
    ) -> None:
        self.model = model_name or model
        self._embedder = Embedder(self.model, device)

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


def _named(ids: Ids) -> list[str]:
    return [name for name in ids or () if name]


def _lacks_ids(found: Sequence[Document], ids: Sequence[str]) -> bool:
    """Whether documents came without their ids, which some stores leave out."""
    return bool({document.id for document in found} - set(ids))
