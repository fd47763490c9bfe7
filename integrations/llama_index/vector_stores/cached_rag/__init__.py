"""A vector store around any other: what is added is prefilled, what is deleted is forgotten.

Indexes and ingestion pipelines end in a vector store, whatever their caches skipped and wherever
their workers ran, so this is where KV is kept in step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from cached_rag.errors import needs_extra
from cached_rag.spi import Learner, Ledger, checked

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.llms.llm import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.schema import BaseComponent, BaseNode
    from llama_index.core.vector_stores import VectorStoreQuery, VectorStoreQueryResult
    from llama_index.core.vector_stores.types import BasePydanticVectorStore, MetadataFilters
    from llama_index.llms.cached_rag import CachedRAGLLM, unwrapped
    from llama_index.llms.cached_rag.nodes import bare_text, module_text

__all__ = ["CachedVectorStore"]
_log = logging.getLogger(__name__)


class CachedVectorStore(BasePydanticVectorStore):
    """Any vector store, with KV for what it holds.

    Example:
        store = CachedVectorStore(SimpleVectorStore(), llm, ledger="my-index/nodes.sqlite")
        context = StorageContext.from_defaults(vector_store=store)
        index = VectorStoreIndex(nodes, storage_context=context)
    """

    stores_text: bool = False
    is_embedding_query: bool = True
    vector_store: BasePydanticVectorStore = Field(description="The one inside.")
    encode: Literal["eager", "background"] = Field(
        default="eager",
        description="Prefill nodes when they are added, or after the first answer that used them.",
    )
    _llm: CachedRAGLLM = PrivateAttr()
    _options: dict[str, Any] = PrivateAttr()
    _ledger: Ledger = PrivateAttr()

    def __init__(
        self,
        vector_store: BasePydanticVectorStore,
        llm: LLM,
        *,
        encode: Literal["eager", "background"] = "eager",
        prompt: BasePromptTemplate | None = None,
        variable: str = "context_str",
        ledger: str | Path | None = None,
    ) -> None:
        """Wrap a vector store.

        Args:
            llm: the one that will read the nodes.
            prompt, variable: the template nodes go to; see `CachedRAGLLM.encode`.
            ledger: file that remembers which node has which text, so that a later process can
                forget what it deletes; None for memory.

        Raises:
            cached_rag.ConfigError: `vector_store`, `llm` or `prompt` is of another kind.
        """
        checked(vector_store, BasePydanticVectorStore, "is no vector store of LlamaIndex")
        super().__init__(  # type: ignore[call-arg]
            stores_text=vector_store.stores_text,
            is_embedding_query=vector_store.is_embedding_query,
            vector_store=vector_store,
            encode=encode,
        )
        self._llm, self._options = unwrapped(llm), {"prompt": prompt, "variable": variable}
        Learner(self._llm, encode, self._options)  # which checks them
        self._ledger = Ledger(ledger)

    def __getstate__(self) -> dict[Any, Any]:
        """For pickling: all of it. LlamaIndex's own would leave out what cannot be pickled.

        Raises:
            cached_rag.ConfigError: when it is pickled, the ledger is in memory.
        """
        return super(BaseComponent, self).__getstate__()

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """As it was, with the same ledger."""
        super(BaseComponent, self).__setstate__(state)

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CachedVectorStore"

    @property
    def client(self) -> Any:
        """The client of the store inside."""
        return self.vector_store.client

    # What changes ----------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes to the store inside, and their KV to the engine's."""
        ids = self.vector_store.add(nodes, **kwargs)
        self._learn(nodes)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """As `add`, off the event loop."""
        ids = await self.vector_store.async_add(nodes, **kwargs)
        await asyncio.to_thread(self._learn, nodes)
        return ids

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, and KV that no other node needs."""
        self.vector_store.delete(ref_doc_id, **delete_kwargs)
        self._drop(self._ledger.ids(ref_doc_id))

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """As `delete`."""
        await self.vector_store.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(self._drop, self._ledger.ids(ref_doc_id))

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes and their KV.

        With filters, KV goes only if the store inside can say which nodes they meet, and with
        neither ids nor filters, stores differ in what they delete. KV of nodes that are not known
        stays until others need its room, and a warning says so.
        """
        gone = node_ids if filters is None else None
        if filters is not None:
            with suppress(NotImplementedError):
                gone = [node.node_id for node in self.get_nodes(node_ids, filters)]
        self.vector_store.delete_nodes(node_ids, filters, **delete_kwargs)
        self._drop(gone)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """As `delete_nodes`."""
        gone = node_ids if filters is None else None
        if filters is not None:
            with suppress(NotImplementedError):
                gone = [node.node_id for node in await self.aget_nodes(node_ids, filters)]
        await self.vector_store.adelete_nodes(node_ids, filters, **delete_kwargs)
        await asyncio.to_thread(self._drop, gone)

    def clear(self) -> None:
        """Delete all nodes and their KV."""
        self.vector_store.clear()
        self._drop(self._ledger.ids())

    async def aclear(self) -> None:
        """As `clear`."""
        await self.vector_store.aclear()
        await asyncio.to_thread(self._drop, self._ledger.ids())

    def _learn(self, nodes: Sequence[BaseNode]) -> None:
        last = {node.node_id: node for node in nodes}.values()  # of the same id, as stores do
        rows = [(n.node_id, n.ref_doc_id or n.node_id, module_text(n)) for n in last]
        # Whoever shows nodes without metadata, such as citations, has these encoded.
        bare = [(_bare(n.node_id), n.ref_doc_id or n.node_id, bare_text(n)) for n in last]
        self._ledger.put([*rows, *bare], self._llm.forget)
        texts, sources = [text for *_, text in rows], [source for _, source, _ in rows]
        Learner(self._llm, self.encode, self._options).learn(texts, sources)

    def _drop(self, ids: list[str] | None) -> None:
        """Forget nodes; None where it is not known which they were."""
        if ids is None:
            kind = type(self.vector_store).__name__
            said = "%s cannot say which nodes it deletes; their KV is kept until clear()"
            _log.warning(said, kind)
            return
        self._ledger.remove([*ids, *map(_bare, ids)], self._llm.forget)

    # What does not ---------------------------------------------------------------------------

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Nodes of the store inside."""
        return self.vector_store.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """As `get_nodes`."""
        return await self.vector_store.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Ask the store inside; begin to bring what it finds into memory."""
        return self._found(self.vector_store.query(query, **kwargs))

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """As `query`."""
        return await asyncio.to_thread(self._found, await self.vector_store.aquery(query, **kwargs))

    def _found(self, result: VectorStoreQueryResult) -> VectorStoreQueryResult:
        self._llm.prefetch(self._ledger.texts(result.ids or []).values())
        return result

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Save the store inside; KV lies in the engine's store already."""
        self.vector_store.persist(persist_path, fs)


def _bare(name: str) -> str:
    """The ledger's name for a node without its metadata."""
    return f"{name} (bare)"
