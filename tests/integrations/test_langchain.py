"""ChatCachedRAG in a plain LCEL chain, on the tiny model."""

from __future__ import annotations

import asyncio

import pytest
from conftest import CHUNKS
from langchain_cached_rag import ChatCachedRAG
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "You answer briefly."), ("human", "{context}\n\nQuestion: {question}")]
)


class AllChunks(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager, **kwargs):
        return [Document(chunk) for chunk in CHUNKS]


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=8)


def join(documents):
    return "\n\n".join(document.page_content for document in documents)


def chain(llm):
    context = {"context": AllChunks() | join, "question": RunnablePassthrough()}
    return context | PROMPT | llm


def test_a_chain_reuses_what_was_encoded_and_answers_as_without(llm):
    before = chain(llm).invoke("What turned green?")
    assert before.usage_metadata["input_token_details"]["cache_read"] == 0
    llm.encode(CHUNKS)
    after = chain(llm).invoke("What turned green?")
    report = after.response_metadata["cached_rag"]
    assert report["modules_hit"] == 3
    usage = after.usage_metadata
    assert usage["input_token_details"]["cache_read"] == report["cached_tokens"] > 0
    exact = chain(llm.model_copy(update={"recompute_ratio": 1.0})).invoke("What turned green?")
    assert exact.content == before.content
    text = (chain(llm) | StrOutputParser()).invoke("What turned green?")
    assert text == after.content


def test_streaming_and_async_give_the_same_text(llm):
    llm.encode(CHUNKS)
    whole = chain(llm).invoke("Why?")
    chunks = list(chain(llm).stream("Why?"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    merged = sum(chunks[1:], chunks[0])
    assert merged.usage_metadata == whole.usage_metadata
    assert asyncio.run(chain(llm).ainvoke("Why?")).content == whole.content


def test_all_kinds_of_messages_are_understood(llm):
    messages = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "One."}, {"type": "text", "text": " Two."}]),
        HumanMessage("Three."),
        AIMessage("Well."),
        ToolMessage("A result.", tool_call_id="1"),
    ]
    assert isinstance(llm.invoke(messages), AIMessage)


def test_settings_reach_the_engine_and_are_part_of_the_identity(llm):
    full = llm.bind(method="full", max_tokens=2).invoke("Hello there")
    assert full.response_metadata["cached_rag"]["method"] == "full"
    assert full.usage_metadata["output_tokens"] <= 2
    changed = llm.model_copy(update={"recompute_ratio": 0.5})
    assert changed._get_llm_string() != llm._get_llm_string()
    with pytest.raises(ValueError, match="unknown setting"):
        llm.invoke("Hello", no_such_option=1)
