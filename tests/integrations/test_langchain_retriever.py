"""CachedRetriever: the retriever inside stays as it is, and the model learns its documents."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest
from conftest import CHUNKS, tiny_model
from langchain_cached_rag import CachedRetriever, ChatCachedRAG
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    ConfigurableField,
    RunnableBranch,
    RunnableLambda,
    RunnablePassthrough,
)
from langchain_core.vectorstores import InMemoryVectorStore

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.kv.tiers import Prefetcher

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "You answer from the documents."),
        ("human", "{context}\n\nQuestion: {question}"),
        MessagesPlaceholder("history", optional=True),
    ]
)


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=4)


@pytest.fixture
def inner():
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=6))
    store.add_documents([Document(c, id=str(i), metadata={"n": i}) for i, c in enumerate(CHUNKS)])
    return store.as_retriever(search_kwargs={"k": 2})


def held(llm, text):
    """What a text's KV was encoded behind, if it has any."""
    library = llm.engine.library
    module = library.table.get(text)
    return module and [
        b for b in library.encoded_after() if library.shelf.holds(b, module.token_ids)
    ]


def test_a_model_that_is_asked_something_else_warns_of_nothing(llm, inner, caplog):
    documents = CachedRetriever(retriever=inner, llm=llm).invoke("copper")
    llm.engine.encode([one.page_content for one in documents])
    answer = llm.invoke("Write a haiku")
    assert answer.response_metadata["cached_rag"]["notes"] == []
    assert "retrieved" not in caplog.text
    changed = llm.invoke("\n".join(one.page_content.lower() for one in documents))
    (note,) = changed.response_metadata["cached_rag"]["notes"]
    assert "none of the 2 texts that were retrieved before is in this prompt" in note


def test_it_returns_what_the_retriever_inside_returns(llm, inner):
    cached = CachedRetriever(retriever=inner, llm=llm)
    assert cached.invoke("copper") == inner.invoke("copper")
    assert len(cached.invoke("copper")) == 2
    assert asyncio.run(cached.ainvoke("copper")) == inner.invoke("copper")
    assert cached.batch(["a", "b"]) == inner.batch(["a", "b"])
    kept = {"filter": lambda document: document.metadata["n"] == 2}
    assert cached.invoke("copper", **kept) == inner.invoke("copper", **kept)
    assert len(cached.invoke("copper", k=3)) == 3
    assert len(CachedRetriever(retriever=inner, llm=llm, k=1).invoke("copper")) == 1


def test_a_retriever_that_knows_no_k_is_cut(llm):
    class Everything(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document(chunk) for chunk in CHUNKS]

    cached = CachedRetriever(retriever=Everything(), llm=llm)
    assert len(cached.invoke("x")) == 3
    assert len(cached.invoke("x", k=1)) == 1


def test_what_takes_no_k_is_only_cut(llm, inner):
    seen = []

    def every(query):
        return [Document(chunk) for chunk in CHUNKS]

    def some(query, k=2):
        seen.append(k)
        return every(query)[:k]

    either = inner.configurable_alternatives(ConfigurableField("w"), b=RunnableLambda(every))
    for inside in (
        *(RunnableLambda(every), RunnableLambda(str.lower) | inner, inner | (lambda found: found)),
        *(RunnableLambda(some), inner.with_retry(), inner.with_fallbacks([RunnableLambda(every)])),
        *(either, RunnableBranch((bool, inner), RunnableLambda(every))),
        RunnablePassthrough() | inner,
    ):
        assert len(CachedRetriever(retriever=inside, llm=llm, k=1).invoke("x")) == 1
        assert len(CachedRetriever(retriever=inside, llm=llm).invoke("x", k=1)) == 1
    assert seen == [1, 1]
    configured = inner.configurable_fields(search_kwargs=ConfigurableField("s"))
    for inside in (
        *(inner, inner.with_retry(), inner.with_fallbacks([inner]), RunnableLambda(some)),
        configured,
    ):
        assert len(CachedRetriever(retriever=inside, llm=llm, k=3).invoke("x")) == 3


def test_the_retriever_inside_gets_the_whole_configuration(llm, inner):
    field = ConfigurableField(id="search_kwargs")
    configured = inner.configurable_fields(search_kwargs=field)
    cached = CachedRetriever(retriever=configured, llm=llm)
    kept = {"filter": lambda document: document.metadata["n"] == 2}
    names, run = [], uuid4()

    class Named(BaseCallbackHandler):
        def on_retriever_start(self, *_, run_id, name, tags, metadata, **__):
            names.append((name, run_id == run, tags.count("mine"), metadata["by"]))

    config = {"configurable": {"search_kwargs": kept}, "tags": ["mine"], "metadata": {"by": "me"}}
    config |= {"run_name": "outer", "run_id": run, "callbacks": [Named()]}
    (found,) = cached.invoke("x", config)
    assert found.metadata["n"] == 2
    assert [name for name, *_ in names] == ["outer", "VectorStoreRetriever"]
    assert [rest for _, *rest in names] == [[False, 1, "me"]] * 2
    assert asyncio.run(cached.ainvoke("x", config)) == [found]
    assert cached.batch(["x"], config) == [[found]]
    assert list(cached.stream("x", config)) == [[found]]


@pytest.mark.parametrize("progress", [True, False, None])
def test_a_bar_is_a_setting(llm, inner, progress):
    cached = CachedRetriever(retriever=inner, llm=llm, encode="eager", progress=progress)
    assert len(cached.invoke("copper")) == 2


@pytest.mark.parametrize("encode", ["eager", "background"])
def test_half_a_surrogate_pair_does_not_break_retrieval(llm, encode, caplog):
    texts = [CHUNKS[0], f"{CHUNKS[1]} \ud800", CHUNKS[2]]
    inside = RunnableLambda(lambda _: [Document(text) for text in texts])
    found = CachedRetriever(retriever=inside, llm=llm, encode=encode).invoke("copper")
    assert [document.page_content for document in found] == texts
    assert [held(llm, text) is not None for text in texts] == [True, False, True]
    assert "stay without KV: 1" in caplog.text


def test_callbacks_see_both_retrievers(llm, inner):
    class Seen(BaseCallbackHandler):
        def __init__(self):
            self.ends = []

        def on_retriever_end(self, documents, *, run_id, parent_run_id=None, **_):
            self.ends.append((run_id, parent_run_id, len(documents)))

    seen = Seen()
    CachedRetriever(retriever=inner, llm=llm).invoke("copper", config={"callbacks": [seen]})
    (_, parent, inside), (outer, none, outside) = seen.ends
    assert (inside, outside) == (2, 2)
    assert parent == outer
    assert none is None


@pytest.mark.parametrize("is_async", [False, True])
def test_eager_encodes_before_returning(llm, inner, is_async):
    cached = CachedRetriever(retriever=inner, llm=llm, encode="eager", prompt=PROMPT)
    found = asyncio.run(cached.ainvoke("copper")) if is_async else cached.invoke("copper")
    (head,) = {behind.prefix_ids for behind in held(llm, found[0].page_content)}
    assert len(head) > 5
    messages = PROMPT.format_messages(context=found[0].page_content, question="Why?")
    report = llm.invoke(messages).response_metadata["cached_rag"]
    assert (report["modules_hit"], report["modules_missed"]) == (1, 0)
    assert report["cached_tokens"] >= len(head)


def test_eager_says_how_far_it_is(llm, inner):
    heard = []
    options = {"encode": "eager", "progress": lambda *counts: heard.append(counts)}
    CachedRetriever(retriever=inner, llm=llm, **options).invoke("copper")
    assert heard[-1][0] == heard[-1][1] > 20


def test_a_document_that_fits_no_context_does_not_break_retrieval(llm, caplog):
    texts = [CHUNKS[0], "word " * 3000, CHUNKS[1]]

    class Long(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document(text) for text in texts]

    found = CachedRetriever(retriever=Long(), llm=llm, encode="eager").invoke("copper")
    assert [document.page_content for document in found] == texts
    assert held(llm, CHUNKS[0])
    assert held(llm, CHUNKS[1])
    assert "stays without KV" in caplog.text


def test_background_encodes_after_the_first_answer(llm, inner):
    cached = CachedRetriever(retriever=inner, llm=llm)
    (document, *_) = cached.invoke("copper")
    assert held(llm, document.page_content) == []
    messages = PROMPT.format_messages(context=document.page_content, question="Why?")
    first = llm.invoke(messages)
    assert first.usage_metadata["input_token_details"]["cache_creation"] > 0
    llm.engine.write_back.drain()
    assert len(held(llm, document.page_content)) == 1
    assert llm.invoke(messages).response_metadata["cached_rag"]["modules_hit"] == 1


def test_off_leaves_the_model_alone(llm, inner):
    (document, *_) = CachedRetriever(retriever=inner, llm=llm, encode="off").invoke("copper")
    assert held(llm, document.page_content) is None


def test_kv_on_disk_is_fetched_ahead(inner, tmp_path, monkeypatch):
    store = StoreConfig(path=str(tmp_path))
    with Engine(tiny_model("llama"), store) as engine:
        engine.encode(CHUNKS, context=None)
    with Engine(tiny_model("llama"), store) as engine:
        fetched = []
        monkeypatch.setattr(Prefetcher, "start", lambda _, key, fetch: fetched.append(key))
        CachedRetriever(retriever=inner, llm=ChatCachedRAG(engine=engine)).invoke("copper")
        assert len(fetched) == 2


def test_bad_settings_are_refused(llm, inner):
    with pytest.raises(ValueError, match="sometimes"):
        CachedRetriever(retriever=inner, llm=llm, encode="sometimes")
    with pytest.raises(ValueError, match="llm"):
        CachedRetriever(retriever=inner, llm="smollm2")
    with pytest.raises(ValueError, match="prefetch"):
        CachedRetriever(retriever=inner, llm=llm, prefetch=True)
    said = r"InMemoryVectorStore is no retriever; .* store\.as_retriever\(\)"
    with pytest.raises(ValueError, match=said):
        CachedRetriever(retriever=inner.vectorstore, llm=llm)


@pytest.mark.parametrize(("found", "kind"), [(None, "NoneType"), (["a"], "str"), ("ab", "str")])
def test_what_is_no_list_of_documents_is_refused(llm, found, kind):
    retriever = CachedRetriever(retriever=RunnableLambda(lambda _: found), llm=llm)
    for ask in (retriever.invoke, lambda q: asyncio.run(retriever.ainvoke(q))):
        with pytest.raises(ConfigError, match=f"a {kind} is what the retriever returned"):
            ask("Who?")


def test_documents_come_in_the_order_of_an_earlier_prompt(inner):
    """And so a model that can reuse nothing but beginnings reuses them."""
    first, *others = [Document(text) for text in CHUNKS]
    with Engine(tiny_model("qwen3_5"), StoreConfig(memory_bytes=1 << 30)) as engine:
        llm = ChatCachedRAG(engine=engine, max_tokens=2)
        found = RunnableLambda(lambda _: [*others, first])
        plain, ordered = (
            CachedRetriever(retriever=found, llm=llm, reorder=reorder) for reorder in (False, True)
        )
        assert ordered.invoke("copper") == plain.invoke("copper") == [*others, first]

        def asked(documents, question):
            text = "\n\n".join(one.page_content for one in documents)
            return llm.invoke(PROMPT.invoke({"context": text, "question": question}))

        asked([first, *others], "What turns green?")
        asked([first, *others], "Who lit the lamp?")  # from now on its beginning is kept
        assert plain.invoke("copper") == [*others, first]
        again = asyncio.run(ordered.ainvoke("copper"))
        assert again == ordered.invoke("copper") == [first, *others]
        report = asked(again, "Who went to the pole?").response_metadata["cached_rag"]
        assert report["cached_tokens"] > 0.5 * report["prompt_tokens"]
