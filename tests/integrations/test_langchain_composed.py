"""CachedRetriever around and inside LangChain's composed retrievers: what is found is reused."""

from __future__ import annotations

import asyncio

import pytest
from conftest import CHUNKS
from langchain_cached_rag import CachedRetriever, CacheReportHandler, ChatCachedRAG
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MergerRetriever,
    MultiQueryRetriever,
    MultiVectorRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import (
    CrossEncoderReranker,
    DocumentCompressorPipeline,
    LLMChainExtractor,
)
from langchain_core.cross_encoders import BaseCrossEncoder
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "You answer briefly."), ("human", "{context}\n\nQuestion: {question}")]
)
FAKE = DeterministicFakeEmbedding(size=6)
OTHERS = [f"{chunk} So it is said." for chunk in CHUNKS]
LONG = [f"{chunk} {other} {chunk}" for chunk, other in zip(CHUNKS, CHUNKS[::-1], strict=True)]
WORDS = "zyxwvuts"


class ByLength(BaseCrossEncoder):
    """Ranks short texts first; no model to download."""

    def score(self, text_pairs):
        return [-len(text) for _, text in text_pairs]


class Extracting(ChatCachedRAG):
    """Reads the prompts as it should, but its extracts are certain: the first words, and one new.

    What a random model says would be no extract. Each of its answers differs from those before.
    """

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        result = super()._generate(messages, stop, run_manager, **kwargs)
        (text,) = [text for text in LONG if text in messages[0].text]
        made.append(f"{text[:90]} {WORDS[len(made)] * 40}")
        message = result.generations[0].message.model_copy(update={"content": made[-1]})
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(self, *args, **kwargs):
        return await asyncio.to_thread(self._generate, *args, **kwargs)


made: list[str] = []


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=4, method="reuse")


@pytest.fixture
def extractor(engine):
    made.clear()
    return LLMChainExtractor.from_llm(Extracting(engine=engine, max_tokens=2, method="reuse"))


def over(texts, k=2):
    store = InMemoryVectorStore(FAKE)
    store.add_documents([Document(text, id=str(i)) for i, text in enumerate(texts)])
    return store.as_retriever(search_kwargs={"k": k})


def cached(llm, retriever):
    return CachedRetriever(retriever=retriever, llm=llm)


def reranked(base):
    splitter = CharacterTextSplitter(separator=". ", chunk_size=90, chunk_overlap=0)
    pipeline = [splitter, CrossEncoderReranker(model=ByLength(), top_n=2)]
    return ContextualCompressionRetriever(
        base_compressor=DocumentCompressorPipeline(transformers=pipeline), base_retriever=base
    )


def parents():
    splitter = CharacterTextSplitter(separator=" ", chunk_size=30, chunk_overlap=0)
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(FAKE), docstore=InMemoryStore(), child_splitter=splitter
    )
    retriever.add_documents([Document(chunk) for chunk in CHUNKS])
    return retriever


def summarised():
    store, documents = InMemoryVectorStore(FAKE), InMemoryStore()
    documents.mset([(str(i), Document(chunk)) for i, chunk in enumerate(CHUNKS)])
    store.add_texts(["light", "copper", "pole"], [{"doc_id": str(i)} for i in range(3)])
    return MultiVectorRetriever(vectorstore=store, docstore=documents)


def windows():
    """A sentence is searched, and what stands around it is given to the model."""
    store = InMemoryVectorStore(FAKE)
    for number, chunk in enumerate(CHUNKS):
        around = " ".join(CHUNKS[max(0, number - 1) : number + 2])
        store.add_texts([chunk], [{"window": around}])
    widen = RunnableLambda(lambda found: [Document(one.metadata["window"]) for one in found])
    return store.as_retriever(search_kwargs={"k": 1}) | widen


COMPOSED = {
    "around an ensemble": lambda llm: cached(
        llm, EnsembleRetriever(retrievers=[over(CHUNKS), over(OTHERS)], weights=[0.5, 0.5])
    ),
    "in an ensemble": lambda llm: EnsembleRetriever(
        retrievers=[cached(llm, over(CHUNKS)), over(OTHERS[:1])], weights=[0.5, 0.5]
    ),
    "around a merger": lambda llm: cached(llm, MergerRetriever(retrievers=[over(CHUNKS)])),
    "around several queries": lambda llm: cached(
        llm, MultiQueryRetriever.from_llm(over(CHUNKS), llm, include_original=True)
    ),
    "in several queries": lambda llm: MultiQueryRetriever.from_llm(
        cached(llm, over(CHUNKS)), llm, include_original=True
    ),
    "around parents": lambda llm: cached(llm, parents()),
    "around summaries": lambda llm: cached(llm, summarised()),
    "around windows": lambda llm: cached(llm, windows()),
    "around pieces, reranked": lambda llm: cached(llm, reranked(over(LONG))),
    "in a reranker": lambda llm: ContextualCompressionRetriever(
        base_compressor=CrossEncoderReranker(model=ByLength(), top_n=1),
        base_retriever=cached(llm, over(CHUNKS)),
    ),
    "around retries": lambda llm: cached(llm, over(CHUNKS).with_retry()),
}


def join(documents):
    return "\n\n".join(document.page_content for document in documents)


def ask(llm, retriever, question, *, is_async=False):
    """The report on an answer, once all that was missed is encoded."""
    chain = {"context": retriever | join, "question": RunnablePassthrough()} | PROMPT | llm
    handler = CacheReportHandler()
    config = {"callbacks": [handler]}
    if is_async:
        asyncio.run(chain.ainvoke(question, config))
    else:
        chain.invoke(question, config)
    llm.engine.write_back.drain()
    return handler.reports


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", COMPOSED)
def test_what_was_found_before_is_reused(llm, name, is_async):
    retriever = COMPOSED[name](llm)
    first = ask(llm, retriever, "What turned green?", is_async=is_async)[-1]
    second = ask(llm, retriever, "What turned green?", is_async=is_async)[-1]
    assert first.modules_hit == 0
    assert first.modules_missed > 0
    assert second.modules_hit >= first.modules_missed
    assert second.modules_missed == 0
    assert second.cached_tokens > 10


def chunks(llm):
    return {record.length for record in llm.engine.library.table}


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_model_extracts_becomes_no_chunk(llm, extractor, is_async):
    retriever = ContextualCompressionRetriever(
        base_compressor=extractor, base_retriever=cached(llm, over(LONG, k=3))
    )
    for question in ("What turned green?", "Who reached the pole?"):
        reports = ask(llm, retriever, question, is_async=is_async)
    assert len(set(made)) == 6  # else nothing is tested
    assert chunks(llm) == {len(text) for text in LONG}
    *extractions, _ = reports
    assert [(one.modules_hit, one.modules_missed) for one in extractions] == [(1, 0)] * 3
    assert all(one.cached_tokens > 50 for one in extractions)
    behinds = llm.engine.library.encoded_after()
    assert all(len(behind.prefix_ids) < 5 for behind in behinds)  # no question among them


def test_what_was_extracted_is_reused_where_it_is_long(llm, extractor, monkeypatch):
    monkeypatch.setattr("cached_rag.library.handed_over.RUN", 16)
    monkeypatch.setattr("cached_rag.library.handed_over._BLOCK", 8)
    retriever = ContextualCompressionRetriever(
        base_compressor=extractor, base_retriever=cached(llm, over(LONG, k=1))
    )
    for _ in range(3):
        _, answer = ask(llm, retriever, "What turned green?")
    assert answer.cached_tokens > 16
    assert answer.notes == []


def test_what_a_model_chose_is_a_chunk(llm, engine):
    """A model that asked for documents, or put them in order, has written none of them."""

    class Asking(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            config = {"callbacks": run_manager.get_child()}
            found = over(CHUNKS).invoke(query, config)
            llm.invoke(f"Which is best?\n{join(found)}", config)
            return found[::-1]

    ask(llm, cached(llm, Asking()), "What turned green?")
    report = ask(llm, cached(llm, Asking()), "What turned green?")[-1]
    assert (report.modules_hit, report.modules_missed) == (2, 0)


def test_what_cannot_be_encoded_is_heard_of(llm, monkeypatch):
    """An error of the store is no detail."""

    def full(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(type(llm), "encode", full)
    with pytest.raises(OSError, match="the disk is full"):
        CachedRetriever(retriever=over(LONG), llm=llm, encode="eager").invoke("What turned green?")
