"""Metadata filters, ids and query modes through the wrappers find what the wrapped ones find."""

from __future__ import annotations

import asyncio

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
from test_llama_index_stores import has_kv


def one(key, value, operator=FilterOperator.EQ):
    return MetadataFilter(key=key, value=value, operator=operator)


def some(*filters, condition=FilterCondition.AND):
    return MetadataFilters(filters=list(filters), condition=condition)


# What is asked for, and the nodes that meet it.
ASKED = {
    "equal": ({"filters": some(one("kind", "metal"))}, {"n1"}),
    "greater": ({"filters": some(one("page", 0, FilterOperator.GT))}, {"n1", "n2"}),
    "in": ({"filters": some(one("page", [0, 2], FilterOperator.IN))}, {"n0", "n2"}),
    "either": (
        {"filters": some(one("kind", "metal"), one("page", 0), condition=FilterCondition.OR)},
        {"n0", "n1"},
    ),
    "nested": (
        {
            "filters": some(
                one("page", 1, FilterOperator.LTE),
                some(one("kind", "metal"), one("kind", "ice"), condition=FilterCondition.OR),
            )
        },
        {"n1"},
    ),
    "none": ({"filters": some(one("kind", "wood"))}, set()),
    "ids": ({"node_ids": ["n2"]}, {"n2"}),
    "mmr": (
        {"vector_store_query_mode": "mmr", "vector_store_kwargs": {"mmr_threshold": 0.5}},
        {"n0", "n1", "n2"},
    ),
}


def nodes():
    kinds = ("light", "metal", "ice")
    return [
        TextNode(text=chunk, id_=f"n{page}", metadata={"page": page, "kind": kinds[page]})
        for page, chunk in enumerate(CHUNKS)
    ]


@pytest.fixture
def llm(engine, monkeypatch):
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(4))
    return CachedRAGLLM(engine=engine, max_tokens=4)


@pytest.fixture
def index(llm):
    store = CachedVectorStore(SimpleVectorStore(), llm)
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(nodes(), storage_context=context)


@pytest.mark.parametrize("name", ASKED)
def test_what_meets_a_filter_is_what_met_it_before(llm, index, name):
    options, wanted = ASKED[name]
    bare = VectorStoreIndex(nodes()).as_retriever(similarity_top_k=3, **options)
    before = [node.node_id for node in bare.retrieve(CHUNKS[0])]
    assert set(before) == wanted
    retriever = CachedRetriever(index.as_retriever(similarity_top_k=3, **options), llm)
    assert [node.node_id for node in retriever.retrieve(CHUNKS[0])] == before
    assert [n.node_id for n in asyncio.run(retriever.aretrieve(CHUNKS[0]))] == before


def test_a_filtered_answer_reuses_what_met_the_filter(llm, index):
    metal = some(one("kind", "metal"))
    engine = index.as_query_engine(llm=llm, similarity_top_k=3, filters=metal)
    (found,) = engine.query("What turned green?").source_nodes
    assert found.node_id == "n1"
    assert has_kv(llm, module_text(found.node))
