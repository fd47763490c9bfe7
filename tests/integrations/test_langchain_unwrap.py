"""`llm=` may be what an application made of the model: bound, retried, structured, in a chain."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from langchain_cached_rag import (
    CachedRAGLLM,
    CachedRAGVectorStore,
    CachedRetriever,
    CacheReportHandler,
    ChatCachedRAG,
)
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import BaseModel

from cached_rag import ConfigError, Engine

OTHER = FakeListChatModel(responses=["no"])
ASK = ChatPromptTemplate.from_template("{question}")


class Person(BaseModel):
    name: str


def get_weather(city: str) -> str:
    """The weather in a city."""
    return city


MADE = {
    "itself": lambda llm: llm,
    "bound": lambda llm: llm.bind(stop=["\n"]),
    "bound twice": lambda llm: llm.bind(stop=["\n"]).bind(temperature=0.5),
    "configured": lambda llm: llm.with_config(tags=["a"]),
    "retried": lambda llm: llm.with_retry(stop_after_attempt=2),
    "with tools": lambda llm: llm.bind_tools([get_weather]),
    "structured": lambda llm: llm.with_structured_output(Person),
    "structured, by a tool": lambda llm: llm.with_structured_output(
        Person, method="function_calling"
    ),
    "in a chain": lambda llm: ASK | llm.bind(stop=["\n"]) | StrOutputParser(),
    "used twice": lambda llm: ASK | llm | StrOutputParser() | llm.bind(stop=["\n"]),
}


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=4, method="reuse")


def retriever():
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=6))
    store.add_documents([Document(CHUNKS[0], id="0")])
    return store.as_retriever()


def knows(engine):
    return engine.library.table.get(CHUNKS[0]) is not None


@pytest.mark.parametrize("name", MADE)
def test_the_model_inside_learns_the_documents(llm, name):
    made = MADE[name](llm)
    cached = CachedRetriever(retriever=retriever(), llm=made)
    assert cached.llm is llm
    cached.invoke("Who lit the lamp?")
    assert knows(llm.engine)
    llm.forget(CHUNKS)
    store = CachedRAGVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=6)), made)
    store.add_texts(CHUNKS)
    assert knows(llm.engine)
    store.close()


def test_a_string_model_is_found_as_well(engine):
    llm = CachedRAGLLM(engine=engine)
    chain = PromptTemplate.from_template("{question}") | llm.with_retry()
    assert CachedRetriever(retriever=retriever(), llm=chain).llm is llm


def test_a_chain_of_a_bound_model_has_hits(llm):
    bound = llm.bind(stop=["\n"]).with_retry()
    cached = CachedRetriever(retriever=retriever(), llm=bound)
    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    documents = cached | (lambda found: found[0].page_content)
    chain = {"context": documents, "question": RunnablePassthrough()} | prompt | bound
    handler = CacheReportHandler()
    for _ in range(2):
        chain.invoke("Who lit the lamp?", {"callbacks": [handler]})
        llm.engine.write_back.drain()
    assert [report.modules_hit for report in handler.reports] == [0, 1]


def test_a_bound_name_means_another_model(model_folder):
    llm = ChatCachedRAG(model="smollm2-135m", max_tokens=4)  # which is never loaded
    cached = CachedRetriever(retriever=retriever(), llm=llm.bind(model=model_folder))
    cached.invoke("Who lit the lamp?")
    engine = Engine.shared(model_folder)
    assert knows(engine)
    assert llm.loaded_engine(model_folder) is engine


def test_models_with_the_same_settings_are_one(llm, engine):
    chain = ASK | ChatCachedRAG(engine=engine, temperature=1.0) | StrOutputParser() | llm
    assert CachedRetriever(retriever=retriever(), llm=chain).llm.engine is engine


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (OTHER, "FakeListChatModel has none in it"),
        (OTHER.with_retry(), "RunnableRetry has none in it"),
        ("smollm2", "str has none in it"),
        (None, "NoneType has none in it"),
        (OTHER.with_fallbacks([OTHER]), "RunnableWithFallbacks has none in it"),
    ],
)
def test_what_has_no_such_model_is_refused(wrong, said):
    with pytest.raises(ValueError, match=rf"{said}; give the ChatCachedRAG or CachedRAGLLM"):
        CachedRetriever(retriever=retriever(), llm=wrong)
    with pytest.raises(ConfigError, match=rf"{said}; give the ChatCachedRAG or CachedRAGLLM"):
        CachedRAGVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=6)), wrong)


def test_two_models_are_one_too_many(llm):
    other = ChatCachedRAG(engine=Engine(tiny_model("qwen2"), NEW_PROMPTS))
    chain = ASK | llm | StrOutputParser() | other
    with pytest.raises(ValueError, match=r"has 2 models in it \(llama, qwen2\); give the"):
        CachedRetriever(retriever=retriever(), llm=chain)
