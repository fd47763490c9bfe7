"""CachedPostprocessor: nodes that other postprocessors changed or brought get hits, too."""

from __future__ import annotations

import asyncio

import pytest
from conftest import CHUNKS
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import (
    LongContextReorder,
    MetadataReplacementPostProcessor,
    PrevNextNodePostprocessor,
    SentenceEmbeddingOptimizer,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.cached_rag import module_text
from llama_index.postprocessor.cached_rag import CachedPostprocessor
from llama_index.retrievers.cached_rag import CachedRetriever
from test_llama_index_engines import Recording, unclosed  # noqa: F401
from test_llama_index_stores import has_kv

from cached_rag import ConfigError

pytestmark = pytest.mark.slow

QUESTION = "What turned green?"


@pytest.fixture
def llm(engine, monkeypatch):
    llm = Recording(engine=engine, max_tokens=4, method="reuse")
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(4))
    monkeypatch.setattr(Settings, "_llm", llm)
    monkeypatch.setattr(Settings, "_tokenizer", llm.token_ids)
    return llm


def document():
    return Document(text=" ".join(CHUNKS), metadata={"page": 7})


def windows():
    """Sentences, whose windows the model is to see."""
    return SentenceWindowNodeParser(window_size=1).get_nodes_from_documents([document()])


def optimizer():
    return SentenceEmbeddingOptimizer(
        MockEmbedding(4), percentile_cutoff=0.7, context_before=0, context_after=0
    )


class Reranker(BaseNodePostprocessor):
    """Keeps two, the last one first."""

    def _postprocess_nodes(self, nodes, query_bundle=None):
        return [NodeWithScore(node=one.node, score=0.5) for one in nodes[:-3:-1]]


CHANGES = {
    "window": lambda index: MetadataReplacementPostProcessor("window"),
    "optimizer": lambda index: optimizer(),
    "reorder": lambda index: LongContextReorder(),
    "rerank": lambda index: Reranker(),
    "next": lambda index: PrevNextNodePostprocessor(docstore=index.docstore, num_nodes=2),
}


@pytest.fixture
def index(llm):
    return VectorStoreIndex(windows())


def hits(llm, engine):
    """(chunks hit, chunks missed) of two queries, and the texts that the second prompt had."""
    engine.query(QUESTION)
    llm.loaded_engine().write_back.drain()
    response = engine.query(QUESTION)
    reports = [(report.modules_hit, report.modules_missed) for report in llm.reports()]
    return reports, {module_text(one.node) for one in response.source_nodes}


@pytest.mark.parametrize("name", CHANGES)
def test_what_other_postprocessors_made_of_nodes_is_reused(llm, index, name):
    last = [CHANGES[name](index), CachedPostprocessor(llm)]
    engine = index.as_query_engine(similarity_top_k=3, node_postprocessors=last)
    found, texts = hits(llm, engine)
    assert found == [(0, len(texts)), (len(texts), 0)]
    assert len(texts) == (2 if name == "rerank" else 3)


@pytest.mark.parametrize("name", ["window", "optimizer"])
def test_a_retriever_does_not_know_what_comes_after_it(llm, index, name):
    retriever = CachedRetriever(index.as_retriever(similarity_top_k=3), llm)
    engine = RetrieverQueryEngine.from_args(retriever, node_postprocessors=[CHANGES[name](index)])
    _, texts = hits(llm, engine)
    assert not any(has_kv(llm, text) for text in texts)
    both = [CHANGES[name](index), CachedPostprocessor(llm)]
    engine = RetrieverQueryEngine.from_args(retriever, node_postprocessors=both)
    _, texts = hits(llm, engine)
    assert all(has_kv(llm, text) for text in texts)


@pytest.mark.parametrize(
    ("encode", "known", "held"),
    [("eager", True, True), ("background", True, False), ("off", False, False)],
)
def test_it_is_chosen_when_nodes_are_encoded(llm, encode, known, held):
    nodes = [NodeWithScore(node=TextNode(text=CHUNKS[0], metadata={"page": 1}), score=1.0)]
    last = CachedPostprocessor(llm, encode=encode)
    assert last.postprocess_nodes(nodes, query_str=QUESTION) == nodes
    table = llm.loaded_engine().library.table
    for text in (module_text(nodes[0].node), CHUNKS[0]):
        assert (table.get(text) is not None) is known
    assert has_kv(llm, module_text(nodes[0].node)) is held


def test_event_loops_have_it_too_and_wrong_settings_are_named(llm):
    nodes = [NodeWithScore(node=TextNode(text=CHUNKS[0]), score=1.0)]
    assert asyncio.run(CachedPostprocessor(llm).apostprocess_nodes(nodes)) == nodes
    assert llm.loaded_engine().library.table.get(CHUNKS[0]) is not None
    assert CachedPostprocessor(llm).to_dict()["class_name"] == "CachedPostprocessor"
    with pytest.raises(ConfigError, match="'sometimes'"):
        CachedPostprocessor(llm, encode="sometimes")


def test_a_node_that_fits_no_context_does_not_break_retrieval(llm, caplog):
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in (CHUNKS[0], "long " * 3000)]
    found = CachedPostprocessor(llm, encode="eager").postprocess_nodes(nodes)
    assert len(found) == 2
    assert "stays without KV" in caplog.text
    assert has_kv(llm, CHUNKS[0])
