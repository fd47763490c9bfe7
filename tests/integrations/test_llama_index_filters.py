"""Metadata filters, ids and query modes through the wrappers find what the wrapped ones find."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from conftest import CHUNKS
from llama_index.core import MockEmbedding, Settings, StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    SimpleVectorStore,
)
from llama_index.llms.cached_rag import CachedRAGLLM, module_text
from llama_index.retrievers.cached_rag import CachedRetriever
from llama_index.vector_stores.cached_rag import CachedVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import AsyncQdrantClient, QdrantClient
from test_llama_index_engines import unclosed  # noqa: F401
from test_llama_index_stores import has_kv

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning"),
]


def one(key, value, operator=FilterOperator.EQ):
    return MetadataFilter(key=key, value=value, operator=operator)


def some(*filters, condition=FilterCondition.AND):
    return MetadataFilters(filters=list(filters), condition=condition)


# What is asked for, and the pages of the nodes that meet it.
ASKED = {
    "equal": (some(one("kind", "metal")), {1}),
    "greater": (some(one("page", 0, FilterOperator.GT)), {1, 2}),
    "in": (some(one("kind", ["light", "ice"], FilterOperator.IN)), {0, 2}),
    "either": (
        some(one("kind", "metal"), one("page", 0), condition=FilterCondition.OR),
        {0, 1},
    ),
    "both": (some(one("kind", "metal"), one("page", 0)), set()),
}
STORES = {
    "simple": SimpleVectorStore,
    "qdrant": lambda: QdrantVectorStore("nodes", client=QdrantClient(":memory:")),
}


def nodes():
    kinds = ("light", "metal", "ice")
    return [
        TextNode(text=chunk, id_=str(UUID(int=page)), metadata={"page": page, "kind": kinds[page]})
        for page, chunk in enumerate(CHUNKS)
    ]


def pages(found):
    return [node.metadata["page"] for node in found]


@pytest.fixture
def llm(engine, monkeypatch):
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(4))
    return CachedRAGLLM(engine=engine, max_tokens=4)


def make_index(store):
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(nodes(), storage_context=context)


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("kind", STORES)
def test_what_meets_a_filter_is_what_met_it_before(llm, kind, name):
    filters, wanted = ASKED[name]
    options = {"similarity_top_k": 3, "filters": filters}
    before = pages(make_index(STORES[kind]()).as_retriever(**options).retrieve("Why?"))
    assert set(before) == wanted
    index = make_index(CachedVectorStore(STORES[kind](), llm))
    assert pages(CachedRetriever(index.as_retriever(**options), llm).retrieve("Why?")) == before


def test_event_loops_and_query_modes_reach_the_store_inside(llm):
    index = make_index(CachedVectorStore(SimpleVectorStore(), llm))
    options = {"similarity_top_k": 3, "filters": ASKED["either"][0]}
    retriever = CachedRetriever(index.as_retriever(**options), llm)
    assert set(pages(asyncio.run(retriever.aretrieve("Why?")))) == {0, 1}
    options |= {"vector_store_query_mode": "mmr", "vector_store_kwargs": {"mmr_threshold": 0.5}}
    assert set(pages(index.as_retriever(**options).retrieve("Why?"))) == {0, 1}
    options["vector_store_query_mode"] = "hybrid"
    with pytest.raises(ValueError, match="Invalid query mode"):
        index.as_retriever(**options).retrieve("Why?")


@pytest.mark.parametrize("kind", STORES)
def test_what_a_filter_deletes_is_forgotten_where_the_store_can_name_it(llm, kind, caplog):
    store = CachedVectorStore(STORES[kind](), llm)
    index = make_index(store)
    store.delete_nodes(filters=some(one("kind", "metal")))
    assert set(pages(index.as_retriever(similarity_top_k=3).retrieve("Why?"))) == {0, 2}
    is_kept = "SimpleVectorStore cannot say which nodes it deletes" in caplog.text
    assert [has_kv(llm, module_text(node)) for node in nodes()] == [True, is_kept, True]
    assert is_kept is (kind == "simple")


def test_a_store_that_works_asynchronously_only_is_wrapped(llm):
    async def main():
        inner = QdrantVectorStore("nodes", aclient=AsyncQdrantClient(":memory:"))
        store = CachedVectorStore(inner, llm)
        embedded = [node.model_copy(update={"embedding": [0.1] * 4}) for node in nodes()]
        await store.async_add(embedded)
        ids = [node.node_id for node in embedded]
        assert {node.node_id for node in await store.aget_nodes(ids[:2])} == set(ids[:2])
        await store.adelete_nodes(ids[:1])
        await store.adelete_nodes(filters=some(one("kind", "metal")))
        return pages(await store.aget_nodes(ids))

    assert asyncio.run(main()) == [2]
    assert [has_kv(llm, module_text(node)) for node in nodes()] == [False, False, True]


def test_asynchronously_too_a_store_that_cannot_name_nodes_keeps_their_kv(llm, caplog):
    store = CachedVectorStore(SimpleVectorStore(), llm)
    index = make_index(store)
    asyncio.run(store.adelete_nodes(filters=some(one("kind", "metal"))))
    assert set(pages(index.as_retriever(similarity_top_k=3).retrieve("Why?"))) == {0, 2}
    assert "SimpleVectorStore cannot say which nodes it deletes" in caplog.text
    assert has_kv(llm, module_text(nodes()[1]))
