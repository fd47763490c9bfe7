"""CachedRAGVectorStore around real stores: their searches, and KV that comes and goes."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from conftest import CHUNKS, tiny_model
from langchain_cached_rag import CachedRAGVectorStore, ChatCachedRAG, SentenceTransformerEmbeddings
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore
from qdrant_client import QdrantClient, models

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.kv.tiers import Prefetcher

FAKE = DeterministicFakeEmbedding(size=6)
IDS = [str(UUID(int=number)) for number in range(1, 4)]
CHANGED = "Another text altogether, and long enough to be a module."


class ConstantEmbeddings(Embeddings):
    """Some that take any text."""

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text):
        return [1.0, 2.0]


class Silent(InMemoryVectorStore):
    """One of the stores that cannot say what they hold."""

    def get_by_ids(self, ids, /):
        raise NotImplementedError


class Emptied(InMemoryVectorStore):
    """One of the stores that delete everything where no ids are given."""

    def delete(self, ids=None, **kwargs):
        super().delete(list(self.store) if ids is None else ids)


def qdrant():
    client = QdrantClient(":memory:")
    size = models.VectorParams(size=6, distance=models.Distance.COSINE)
    client.create_collection("documents", vectors_config=size)
    return QdrantVectorStore(client, "documents", FAKE)


STORES = {"memory": lambda: InMemoryVectorStore(FAKE), "qdrant": qdrant}


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=4)


@pytest.fixture(params=STORES)
def inner(request):
    return STORES[request.param]()


@pytest.fixture
def store(inner, llm):
    store = CachedRAGVectorStore(inner, llm)
    yield store
    store.close()


def documents():
    return [
        Document(chunk, id=name, metadata={"year": 1900 + number})
        for number, (chunk, name) in enumerate(zip(CHUNKS, IDS, strict=True))
    ]


def has_kv(llm, text):
    library = llm.engine.library
    module = library.table.get(text)
    if module is None:
        return False
    return any(library.shelf.holds(behind, module.token_ids) for behind in library.encoded_after())


def starts(llm):
    """Where the KV of each chunk begins."""
    library = llm.engine.library
    (behind,) = library.encoded_after()
    return [library.shelf.fetch(behind, library.table.get(one).token_ids).start for one in CHUNKS]


def held(llm):
    return [has_kv(llm, chunk) for chunk in CHUNKS]


def test_searches_are_those_of_the_store_inside(store, inner):
    store.add_documents(documents())
    vector = FAKE.embed_query("copper")
    searches = {
        "similarity_search": "copper",
        "similarity_search_with_score": "copper",
        "similarity_search_by_vector": vector,
        "max_marginal_relevance_search": "copper",
        "max_marginal_relevance_search_by_vector": vector,
    }
    for name, query in searches.items():
        expected = getattr(inner, name)(query, k=2)
        assert len(expected) == 2
        assert getattr(store, name)(query, k=2) == expected
        assert asyncio.run(getattr(store, f"a{name}")(query, k=2)) == expected
    assert store.get_by_ids(IDS[:1]) == inner.get_by_ids(IDS[:1])
    assert asyncio.run(store.aget_by_ids(IDS[:1])) == inner.get_by_ids(IDS[:1])
    assert store.embeddings is FAKE
    retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 2})
    assert retriever.invoke("copper") == inner.max_marginal_relevance_search("copper", k=2)


@pytest.mark.parametrize("inner", ["qdrant"], indirect=True)  # the one in memory has no such scores
def test_relevance_scores_are_those_of_the_store_inside(store, inner):
    store.add_documents(documents())
    expected = inner.similarity_search_with_relevance_scores("copper", k=3)
    assert store.similarity_search_with_relevance_scores("copper", k=3) == expected
    found = asyncio.run(store.asimilarity_search_with_relevance_scores("copper", k=3))
    assert found == expected
    (best, _), *_, (_, worst) = expected
    options = {"k": 3, "score_threshold": worst + 1e-6}
    retriever = store.as_retriever(search_type="similarity_score_threshold", search_kwargs=options)
    assert best in retriever.invoke("copper")
    assert len(retriever.invoke("copper")) == 2


def test_what_a_search_finds_is_fetched_ahead(tmp_path, inner, monkeypatch):
    config = StoreConfig(path=str(tmp_path))
    with Engine(tiny_model("llama"), config) as engine:
        CachedRAGVectorStore(inner, ChatCachedRAG(engine=engine)).add_documents(documents())
    with Engine(tiny_model("llama"), config) as engine:
        fetched = []
        monkeypatch.setattr(Prefetcher, "start", lambda _, key, fetch: fetched.append(key))
        store = CachedRAGVectorStore(inner, ChatCachedRAG(engine=engine))
        store.similarity_search_with_score("copper", k=2)
        assert len(fetched) == 2
        asyncio.run(store.asimilarity_search("copper", k=3))
        assert len(fetched) == 5


@pytest.mark.parametrize(
    ("inner", "wanted"),
    [
        ("memory", lambda document: document.metadata["year"] > 1900),
        (
            "qdrant",
            models.Filter(
                must=[models.FieldCondition(key="metadata.year", range=models.Range(gt=1900))]
            ),
        ),
    ],
    indirect=["inner"],
)
def test_filters_are_those_of_the_store_inside(store, wanted):
    store.add_documents(documents())
    found = store.similarity_search("copper", k=3, filter=wanted)
    assert {document.metadata["year"] for document in found} == {1901, 1902}
    retriever = store.as_retriever(search_kwargs={"k": 3, "filter": wanted})
    assert {document.metadata["year"] for document in retriever.invoke("copper")} == {1901, 1902}


def test_texts_of_one_source_are_encoded_behind_each_other(store, llm):
    sources = ["a.txt", "a.txt", None]
    texts = [
        Document(chunk, metadata={} if source is None else {"source": source})
        for chunk, source in zip(CHUNKS, sources, strict=True)
    ]
    store.add_documents(texts)
    first, second, alone = starts(llm)
    assert first == alone < second


def test_adding_prefills_and_deleting_forgets(store, llm):
    assert store.add_documents(documents()) == IDS
    assert held(llm) == [True] * 3
    (copy,) = store.add_texts([f"{CHUNKS[0]}\n"])
    store.delete(IDS[:1])
    assert held(llm) == [True] * 3  # the copy still needs it
    store.delete([copy, IDS[1]])
    assert held(llm) == [False, False, True]
    assert len(store.similarity_search("copper", k=9)) == 1


def test_a_replaced_document_is_encoded_anew(store, llm):
    store.add_documents(documents())
    store.add_texts([CHANGED, CHUNKS[2]], ids=[IDS[1], IDS[2]])
    assert held(llm) == [True, False, True]
    assert has_kv(llm, CHANGED)
    (found,) = store.get_by_ids(IDS[1:2])
    assert found.page_content == CHANGED


def test_documents_change_asynchronously(store, llm):
    async def main():
        assert await store.aadd_documents(documents()) == IDS
        assert held(llm) == [True] * 3
        await store.aadd_texts([CHANGED], ids=IDS[:1])
        assert held(llm) == [False, True, True]
        await store.adelete(IDS[1:2])

    asyncio.run(main())
    assert held(llm) == [False, False, True]
    assert has_kv(llm, CHANGED)


class Asynchronous(InMemoryVectorStore):
    """A store whose client is an asynchronous one."""

    is_open = has_ids = True

    async def aget_by_ids(self, ids, /):
        if not self.is_open:
            raise NotImplementedError
        found = [self.store[name] for name in ids if name in self.store]
        kept = {"id": None} if not self.has_ids else {}
        return [Document(**{"page_content": one["text"], "id": one["id"], **kept}) for one in found]

    async def adelete(self, ids=None, **kwargs):
        InMemoryVectorStore.delete(self, ids)

    def get_by_ids(self, ids, /):
        raise AssertionError("the client is asynchronous")

    delete = add_documents = get_by_ids


@pytest.mark.parametrize("kept", [{}, {"has_ids": False}, {"is_open": False}], ids=str)
def test_a_store_with_an_asynchronous_client_is_asked_by_it(llm, kept):
    inner = Asynchronous(FAKE)
    vars(inner).update(kept)

    async def main():
        store = CachedRAGVectorStore(inner, llm)
        await store.aadd_documents(documents())
        if inner.is_open:  # a later process asks it
            store.close()
            store = CachedRAGVectorStore(inner, llm)
        await store.aadd_texts([CHANGED], ids=IDS[:1])
        await store.adelete(IDS[1:2])
        store.close()

    asyncio.run(main())
    assert held(llm) == [False, False, True]
    assert has_kv(llm, CHANGED)


def test_an_id_in_its_other_spelling_means_the_same_document(llm):
    store = CachedRAGVectorStore(qdrant(), llm)
    store.add_documents(
        [Document(chunk, id=UUID(n).hex) for chunk, n in zip(CHUNKS, IDS, strict=True)]
    )
    store.add_texts([CHANGED], ids=IDS[:1])
    assert held(llm) == [False, True, True]
    store.delete(IDS[:2])
    assert not has_kv(llm, CHANGED)
    assert held(llm) == [False, False, True]
    store.close()


@pytest.mark.parametrize(("encode", "known"), [("background", True), ("off", False)])
def test_encoding_can_be_left_for_later(llm, encode, known):
    store = CachedRAGVectorStore.from_documents(documents(), FAKE, llm=llm, encode=encode)
    assert not has_kv(llm, CHUNKS[0])
    assert (llm.engine.library.table.get(CHUNKS[0]) is not None) is known
    store.close()


def test_a_later_process_asks_the_store_inside(inner, llm):
    CachedRAGVectorStore(inner, llm).add_documents(documents())
    later = CachedRAGVectorStore(inner, llm)
    later.delete(IDS[:1])
    later.add_texts([CHANGED], ids=IDS[1:2])
    assert held(llm) == [False, False, True]


def test_a_later_process_asks_the_ledger(llm, tmp_path):
    inner = Silent(FAKE)
    for change in (
        lambda store: store.add_documents(documents()),
        lambda store: store.delete(IDS[:1]),
        lambda store: store.add_texts([CHANGED], ids=IDS[1:2]),
    ):
        store = CachedRAGVectorStore(inner, llm, ledger=tmp_path / "ledger.sqlite")
        change(store)
        store.close()
    assert held(llm) == [False, False, True]
    assert CHUNKS[0].encode() not in (tmp_path / "ledger.sqlite").read_bytes()


@pytest.mark.parametrize(
    ("kind", "left"), [(InMemoryVectorStore, True), (Emptied, False), (Silent, True)]
)
def test_deleting_without_ids_forgets_what_was_deleted(kind, left, llm, caplog):
    store = CachedRAGVectorStore(kind(FAKE), llm)
    store.add_documents(documents())
    store.delete()
    assert held(llm) == [left] * 3
    assert ("Silent cannot say which documents it deleted" in caplog.text) is (kind is Silent)
    store.close()


def test_what_cannot_be_deleted_keeps_its_kv(llm):
    class Failing(InMemoryVectorStore):
        def delete(self, ids=None, **kwargs):
            raise OSError("the network is away")

    store = CachedRAGVectorStore(Failing(FAKE), llm)
    store.add_documents(documents())
    with pytest.raises(OSError, match="network"):
        store.delete(IDS)
    assert held(llm) == [True] * 3
    store.close()


def test_the_store_inside_is_saved_and_loaded_as_ever(llm, tmp_path):
    store = CachedRAGVectorStore(InMemoryVectorStore(FAKE), llm, ledger=tmp_path / "ledger.sqlite")
    store.add_documents(documents())
    store.vector_store.dump(str(tmp_path / "documents.json"))
    store.close()
    loaded = InMemoryVectorStore.load(str(tmp_path / "documents.json"), FAKE)
    store = CachedRAGVectorStore(loaded, llm, ledger=tmp_path / "ledger.sqlite")
    assert store.get_by_ids([IDS[2], IDS[0]]) == [documents()[2], documents()[0]]
    store.delete(IDS[:1])
    assert held(llm) == [False, True, True]
    store.close()


def test_a_store_of_any_class_is_made_from_texts(llm):
    options = {"location": ":memory:", "collection_name": "documents"}
    store = CachedRAGVectorStore.from_texts(
        CHUNKS, FAKE, [{"n": i} for i in range(3)], llm=llm, vector_store=QdrantVectorStore,
        store_options=options,
    )  # fmt: skip
    assert isinstance(store.vector_store, QdrantVectorStore)
    assert held(llm) == [True] * 3
    found = store.similarity_search("copper", k=9)
    assert {document.metadata["n"] for document in found} == {0, 1, 2}
    store.delete([document.metadata["_id"] for document in found])
    assert held(llm) == [False] * 3
    with pytest.raises(TypeError, match="colection"):
        CachedRAGVectorStore.from_texts(CHUNKS, FAKE, llm=llm, colection="documents")
    store.close()


@pytest.mark.parametrize("encode", ["eager", "background", "off"])
def test_half_a_surrogate_pair_costs_the_other_documents_nothing(llm, encode, caplog):
    half = f"\ud800 {CHANGED}"
    inner = InMemoryVectorStore(ConstantEmbeddings())
    store = CachedRAGVectorStore(inner, llm, encode=encode)
    store.add_texts([CHUNKS[0], CHUNKS[1]], ids=IDS[:2])
    store.add_texts([half, CHUNKS[2]], ids=IDS[1:])
    assert store.get_by_ids(IDS[1:2])[0].page_content == half
    assert held(llm) == ([True, False, True] if encode == "eager" else [False] * 3)
    known = [llm.engine.library.table.get(chunk) is not None for chunk in CHUNKS]
    assert known == [encode != "off", False, encode != "off"]
    assert ("stay without KV: 1" in caplog.text) is (encode != "off")
    assert len(store.similarity_search("copper", k=3)) == 3
    store.delete(IDS)
    assert held(llm) == [False] * 3
    assert len(inner.store) == 0
    store.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_of_documents_with_one_id_the_last_is_learned(llm, is_async):
    store = CachedRAGVectorStore(InMemoryVectorStore(FAKE), llm)
    twice = [Document(chunk, id=IDS[0]) for chunk in CHUNKS[:2]]
    asyncio.run(store.aadd_documents(twice)) if is_async else store.add_documents(twice)
    assert held(llm) == [False, True, False]
    store.delete(IDS[:1])
    assert held(llm) == [False] * 3
    store.close()


def test_what_cannot_be_wrapped_is_refused(llm):
    with pytest.raises(ConfigError, match="DeterministicFakeEmbedding is no vector store"):
        CachedRAGVectorStore(FAKE, llm)
    with pytest.raises(ConfigError, match=r"'eager', 'background', 'off'.*'sometimes'"):
        CachedRAGVectorStore(InMemoryVectorStore(FAKE), llm, encode="sometimes")
    with pytest.raises(ConfigError, match=r"PromptTemplate.*not 'a \{context\}'"):
        CachedRAGVectorStore(InMemoryVectorStore(FAKE), llm, prompt="a {context}")


def test_embeddings_take_the_model_by_either_name():
    for given in ({"model": "some/model"}, {"model_name": "some/model"}):
        made = SentenceTransformerEmbeddings(**given, device="cpu")
        assert made.model == made._embedder.name == "some/model"


def test_a_store_is_made_from_documents_asynchronously(llm):
    made = CachedRAGVectorStore.afrom_documents(documents(), FAKE, llm=llm)
    store = asyncio.run(made)
    assert store.get_by_ids(IDS) == documents()
    assert held(llm) == [True] * 3
    store.close()


def test_langchains_indexing_keeps_kv_in_step(llm):
    store = CachedRAGVectorStore(InMemoryVectorStore(FAKE), llm)
    records = InMemoryRecordManager("test")
    records.create_schema()

    def run(texts, cleanup="full"):
        docs = [Document(text, metadata={"source": name}) for name, text in texts.items()]
        options = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        return index(docs, records, store, **options)

    done = run({"a": CHUNKS[0], "b": CHUNKS[1]})
    assert done["num_added"] == 2
    encoded = llm.engine.library.shelf.store.nbytes
    assert run({"a": CHUNKS[0], "b": CHUNKS[1]})["num_skipped"] == 2
    assert llm.engine.library.shelf.store.nbytes == encoded
    done = run({"a": CHUNKS[2], "b": CHUNKS[1]})  # a is updated
    assert (done["num_added"], done["num_deleted"]) == (1, 1)
    assert held(llm) == [False, True, True]
    assert run({})["num_deleted"] == 2
    assert held(llm) == [False] * 3
    store.close()


def test_encoding_says_how_far_it_is(llm, inner):
    heard = []
    store = CachedRAGVectorStore(inner, llm, progress=lambda *counts: heard.append(counts))
    store.add_documents(documents())
    assert heard[0][0] == 0
    assert heard[-1][0] == heard[-1][1] > 20
    count = len(heard)
    store.add_documents(documents())  # which have KV
    assert len(heard) == count
    store.close()


@pytest.mark.parametrize(("progress", "is_drawn"), [(True, True), (False, False), (None, False)])
def test_its_bar_can_be_switched_on_and_off(llm, inner, progress, is_drawn, capsys, monkeypatch):
    monkeypatch.setattr("cached_rag.rag.progress._DELAY_S", 1e-9)
    store = CachedRAGVectorStore(inner, llm, progress=progress)
    store.add_documents(documents())
    assert ("prefilling: 100%" in capsys.readouterr().err) is is_drawn
    store.close()


def test_one_document_that_is_too_long_does_not_cost_the_others_their_batches(
    llm, monkeypatch, caplog
):
    texts = [f"Number {number}. {CHUNKS[0]}" for number in range(32)]
    texts[5] = "word " * 3000
    calls = []
    encode = Engine.encode
    monkeypatch.setattr(Engine, "encode", lambda *a, **k: calls.append(1) or encode(*a, **k))
    store = CachedRAGVectorStore(InMemoryVectorStore(FAKE), llm)
    store.add_texts(texts)
    assert [has_kv(llm, text) for text in texts].count(False) == 1
    assert len(calls) < 16
    assert caplog.text.count("stays without KV") == 1
    store.close()
