"""CachedRAGLLM in a query engine, on the tiny model."""

from __future__ import annotations

import asyncio

import pytest
from conftest import CHUNKS
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.llms.cached_rag import CachedRAGLLM


@pytest.fixture
def llm(engine):
    return CachedRAGLLM(engine=engine, max_tokens=8)


def test_it_is_an_llm():
    assert BaseLLM in CachedRAGLLM.__mro__


def test_a_query_engine_reuses_what_was_encoded(llm, monkeypatch):
    nodes = [TextNode(text=chunk) for chunk in CHUNKS]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(4))
    reports = []
    original = CachedRAGLLM._stream

    def recording(self, prompt, options):
        stream = original(self, prompt, options)
        reports.append(stream)
        return stream

    monkeypatch.setattr(CachedRAGLLM, "_stream", recording)
    engine = index.as_query_engine(llm=llm, similarity_top_k=3)
    before = str(engine.query("What turned green?"))
    llm.encode(node.get_content(MetadataMode.LLM) for node in nodes)
    engine.query("What turned green?")
    assert [stream.report.modules_hit for stream in reports] == [0, 3]
    exact = index.as_query_engine(
        llm=CachedRAGLLM(engine=llm.loaded_engine(), max_tokens=8, recompute_ratio=1.0),
        similarity_top_k=3,
    )
    assert str(exact.query("What turned green?")) == before


def test_chat_completion_streams_and_async_agree(llm):
    messages = [ChatMessage(role="user", content="Why is copper green?")]
    text = llm.chat(messages).message.content
    assert [r.message.content for r in llm.stream_chat(messages)][-1] == text
    assert asyncio.run(llm.achat(messages)).message.content == text
    assert llm.complete("Why is copper green?").text == text
    assert "".join(r.delta for r in llm.stream_complete("Why is copper green?")) == text
    assert asyncio.run(llm.acomplete("Why is copper green?")).text == text


def test_metadata_and_serialisation_keep_the_truth(llm):
    assert llm.metadata.context_window == 1024
    assert llm.metadata.is_chat_model
    kept = CachedRAGLLM.from_dict(llm.to_dict())
    assert (kept.model, kept.max_tokens, kept.method) == ("llama", 8, "auto")
