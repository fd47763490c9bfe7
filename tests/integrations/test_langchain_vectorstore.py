"""CachedRAGVectorStore: search, filters, saving, and KV that comes and goes with documents."""

from __future__ import annotations

import asyncio
import datetime

import numpy as np
import pytest
from conftest import CHUNKS
from langchain_cached_rag import CachedRAGVectorStore, ChatCachedRAG
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore

FAKE = DeterministicFakeEmbedding(size=6)


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=4)


@pytest.fixture
def store(llm):
    store = CachedRAGVectorStore(FAKE, llm=llm)
    yield store
    store.close()


def documents():
    return [
        Document(chunk, id=f"d{number}", metadata={"year": 1900 + number, "lang": "en"})
        for number, chunk in enumerate(CHUNKS)
    ]


def has_kv(llm, text):
    library = llm.engine.library
    module = library.table.get(text)
    if module is None:
        return False
    return any(library.holds(behind, module.token_ids) for behind in library.behinds())


def test_search_agrees_with_plain_cosine_similarity(store):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdef "), 40)) for _ in range(50)]
    store.add_texts(texts)
    twin = InMemoryVectorStore(FAKE)
    twin.add_texts(texts)
    for query in ("abc", "fed", texts[3]):
        ours = store.similarity_search_with_score(query, k=5)
        theirs = twin.similarity_search_with_score(query, k=5)
        assert [d.page_content for d, _ in ours] == [d.page_content for d, _ in theirs]
        assert np.allclose([s for _, s in ours], [s for _, s in theirs], atol=1e-5)
        ranked = store.max_marginal_relevance_search(query, k=4, fetch_k=10, lambda_mult=0.3)
        expected = twin.max_marginal_relevance_search(query, k=4, fetch_k=10, lambda_mult=0.3)
        assert [d.page_content for d in ranked] == [d.page_content for d in expected]
    (same, score), *_ = store.similarity_search_with_score(texts[3], k=1)
    assert same.page_content == texts[3]
    assert score == pytest.approx(1)
    relevances = [s for _, s in store.similarity_search_with_relevance_scores("abc", k=50)]
    assert all(0 <= value <= 1 for value in relevances)
    by_vector = store.similarity_search_by_vector(FAKE.embed_query("abc"), k=2)
    assert by_vector == store.similarity_search("abc", k=2)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"year": 1901}, {"d1"}),
        ({"year": {"$gte": 1901}}, {"d1", "d2"}),
        ({"year": {"$gt": 1900, "$lt": 1902}, "lang": "en"}, {"d1"}),
        ({"year": {"$in": [1900, 1902]}}, {"d0", "d2"}),
        ({"year": {"$nin": [1900, 1902]}}, {"d1"}),
        ({"author": {"$ne": "x"}}, {"d0", "d1", "d2"}),
        ({"author": {"$gt": 1}}, set()),
        ({"lang": "de"}, set()),
        ({"lang": {"$gt": 3}}, set()),  # values that do not compare
        (lambda metadata: metadata["year"] % 2 == 0, {"d0", "d2"}),
    ],
)
def test_filters(store, wanted, found):
    store.add_documents(documents())
    hits = store.similarity_search("copper", k=3, filter=wanted)
    assert {document.id for document in hits} == found
    retriever = store.as_retriever(search_kwargs={"k": 3, "filter": wanted})
    assert {document.id for document in retriever.invoke("copper")} == found
    spread = store.max_marginal_relevance_search("copper", k=3, filter=wanted)
    assert {document.id for document in spread} == found


def test_a_bad_filter_is_named(store):
    store.add_documents(documents())
    with pytest.raises(ValueError, match=r"unknown operators \['\$about'\]"):
        store.similarity_search("copper", filter={"year": {"$about": 1900}})


def test_adding_precomputes_and_deleting_drops(store, llm):
    store.add_documents(documents())
    assert all(has_kv(llm, chunk) for chunk in CHUNKS)
    store.add_texts([f"{CHUNKS[0]}\n"], ids=["copy"])
    store.delete(["d0"])
    assert has_kv(llm, CHUNKS[0])  # the copy still needs it
    store.delete(["copy", "d1"])
    assert not has_kv(llm, CHUNKS[0])
    assert not has_kv(llm, CHUNKS[1])
    assert has_kv(llm, CHUNKS[2])
    replaced = Document("Another text altogether, and long enough to be a module.", id="d2")
    store.add_documents([replaced])
    assert not has_kv(llm, CHUNKS[2])
    assert has_kv(llm, replaced.page_content)
    store.delete()
    assert store.similarity_search("copper") == []
    assert len(llm.engine.library.table) == 0


@pytest.mark.parametrize(("encode", "known"), [("background", True), ("off", False)])
def test_precomputing_can_be_left_for_later(llm, encode, known):
    store = CachedRAGVectorStore.from_documents(documents(), FAKE, llm=llm, encode=encode)
    assert not has_kv(llm, CHUNKS[0])
    assert (llm.engine.library.table.get(CHUNKS[0]) is not None) is known
    store.close()


def test_what_is_saved_is_loaded(store, llm, tmp_path):
    store.add_documents(documents())
    store.save_local(tmp_path / "saved")
    store.delete()
    loaded = CachedRAGVectorStore.load_local(tmp_path / "saved", FAKE, llm=llm)
    assert loaded.get_by_ids(["d2", "d0", "gone"]) == [documents()[2], documents()[0]]
    assert len(loaded.similarity_search("copper")) == 3
    loaded.close()
    with pytest.raises(FileNotFoundError, match="save_local"):
        CachedRAGVectorStore.load_local(tmp_path, FAKE)


def test_a_folder_is_shared_and_lasts(llm, tmp_path):
    one = CachedRAGVectorStore(FAKE, llm=llm, path=tmp_path)
    two = CachedRAGVectorStore(FAKE, llm=llm, path=tmp_path)
    assert two.similarity_search("copper") == []
    one.add_documents(documents())
    assert len(two.similarity_search("copper")) == 3
    two.delete(["d0"])
    assert len(one.similarity_search("copper")) == 2
    one.close()
    two.close()


def test_what_cannot_be_kept_is_refused_and_nothing_is_lost(store, llm):
    store.add_documents(documents())
    dated = Document("A text with a date that JSON does not have.", metadata={"at": datetime.date})
    with pytest.raises(ValueError, match="metadata of document"):
        store.add_documents([dated])

    class Wider(Embeddings):
        def embed_documents(self, texts):
            return [[1.0] * 7 for _ in texts]

        def embed_query(self, text):
            return [1.0] * 7

    store._embedding = Wider()
    for use in (lambda: store.add_texts(["x"]), lambda: store.similarity_search("x")):
        with pytest.raises(ValueError, match="6 dimensions, this embedding's 7"):
            use()
    store._embedding = FAKE
    assert len(store.similarity_search("copper", k=9)) == 3


def test_async_and_constructors(llm):
    async def main():
        store = await CachedRAGVectorStore.afrom_texts(CHUNKS, FAKE, [{"n": i} for i in range(3)])
        found = await store.asimilarity_search("copper", k=2)
        assert await store.adelete([found[0].id])
        return store, await store.asimilarity_search("copper", k=9)

    store, left = asyncio.run(main())
    assert len(left) == 2
    assert {"n"} == set(left[0].metadata)
    assert store.embeddings is FAKE
    store.close()


def test_langchains_indexing_keeps_kv_in_step(store, llm):
    records = InMemoryRecordManager("test")
    records.create_schema()

    def run(texts, cleanup="full"):
        docs = [Document(text, metadata={"source": name}) for name, text in texts.items()]
        options = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        return index(docs, records, store, **options)

    done = run({"a": CHUNKS[0], "b": CHUNKS[1]})
    assert done["num_added"] == 2
    encoded = llm.engine.library.store.nbytes
    assert run({"a": CHUNKS[0], "b": CHUNKS[1]})["num_skipped"] == 2
    assert llm.engine.library.store.nbytes == encoded
    done = run({"a": CHUNKS[2], "b": CHUNKS[1]})  # a is updated
    assert (done["num_added"], done["num_deleted"]) == (1, 1)
    assert [has_kv(llm, chunk) for chunk in CHUNKS] == [False, True, True]
    assert run({})["num_deleted"] == 2
    assert not any(has_kv(llm, chunk) for chunk in CHUNKS)
