"""CachedRetriever, CachedVectorStore and the ingestion pipeline: KV keeps step with nodes."""

from __future__ import annotations

import asyncio
import copy
import pickle

import pytest
from conftest import CHUNKS, tiny_model
from llama_index.core import Document, MockEmbedding, Settings, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import (
    MetadataFilter,
    MetadataFilters,
    SimpleVectorStore,
    VectorStoreQuery,
)
from llama_index.llms.cached_rag import CachedRAGLLM, module_text
from llama_index.postprocessor.cached_rag import CachedPostprocessor
from llama_index.response_synthesizers.cached_rag import CachedSynthesizer
from llama_index.retrievers.cached_rag import CachedRetriever
from llama_index.vector_stores.cached_rag import CachedVectorStore
from pydantic import BaseModel

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.kv.tiers import Prefetcher


@pytest.fixture(autouse=True)
def embeddings(monkeypatch):
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(4))


@pytest.fixture
def llm(engine):
    return CachedRAGLLM(engine=engine, max_tokens=4)


def has_kv(llm, text):
    library = llm.loaded_engine().library
    module = library.table.get(text)
    if module is None:
        return False
    return any(library.shelf.holds(behind, module.token_ids) for behind in library.encoded_after())


def nodes():
    return [
        TextNode(text=chunk, id_=f"n{i}", metadata={"page": i}) for i, chunk in enumerate(CHUNKS)
    ]


class Page(BaseModel):
    """A page."""

    number: int


class Everything(BaseRetriever):
    def _retrieve(self, query_bundle):
        return [NodeWithScore(node=node, score=1.0) for node in nodes()]


# Retriever ---------------------------------------------------------------------------------------


def test_a_retriever_returns_what_the_one_inside_returns(llm):
    index = VectorStoreIndex(nodes())
    inner = index.as_retriever(similarity_top_k=2)
    cached = CachedRetriever(inner, llm)
    ids = [node.node_id for node in inner.retrieve("copper")]
    assert [node.node_id for node in cached.retrieve("copper")] == ids
    assert [n.node_id for n in asyncio.run(cached.aretrieve("copper"))] == ids
    assert cached.callback_manager is inner.callback_manager
    with pytest.raises(ValueError, match="'sometimes'"):
        CachedRetriever(inner, llm, encode="sometimes")


class Late(Everything):
    def __init__(self):  # as retrievers do that LlamaIndex gives a callback manager when asked
        self.late = True


def test_a_retriever_that_does_not_call_its_bases_constructor_is_wrapped(llm):
    cached = CachedRetriever(Late(), llm)
    assert len(cached.retrieve("copper")) == len(CHUNKS)
    assert cached.callback_manager is Settings.callback_manager


@pytest.mark.parametrize(
    ("encode", "known", "held"),
    [
        ("eager", True, True),
        ("background", True, False),
        ("off", False, False),
    ],
)
def test_nodes_become_modules_with_and_without_metadata(llm, encode, known, held):
    CachedRetriever(Everything(), llm, encode=encode).retrieve("copper")
    shown = module_text(nodes()[0])
    assert shown == f"page: 0\n\n{CHUNKS[0]}"
    table = llm.loaded_engine().library.table
    assert (table.get(shown) is not None) is known
    assert (table.get(CHUNKS[0]) is not None) is known
    assert has_kv(llm, shown) is held


def test_kv_on_disk_is_fetched_ahead(tmp_path, monkeypatch):
    store = StoreConfig(path=str(tmp_path))
    with Engine(tiny_model("llama"), store) as engine:
        CachedRAGLLM(engine=engine).encode_nodes(nodes())
    with Engine(tiny_model("llama"), store) as engine:
        fetched = []
        monkeypatch.setattr(Prefetcher, "start", lambda _, key, fetch: fetched.append(key))
        CachedRetriever(Everything(), CachedRAGLLM(engine=engine)).retrieve("copper")
        assert len(fetched) == 3


# Vector store ------------------------------------------------------------------------------------


def make_index(llm, documents=(), **options):
    store = CachedVectorStore(SimpleVectorStore(), llm, **options)
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex.from_documents(list(documents), storage_context=context)


def documents():
    return [Document(text=chunk, id_=f"d{i}") for i, chunk in enumerate(CHUNKS)]


def test_an_index_and_its_kv_keep_step(llm):
    index = make_index(llm, documents())
    assert all(has_kv(llm, chunk) for chunk in CHUNKS)
    index.insert(Document(text=CHUNKS[0], id_="copy"))
    index.delete_ref_doc("d0", delete_from_docstore=True)
    assert has_kv(llm, CHUNKS[0])  # the copy still needs it
    index.delete_ref_doc("copy", delete_from_docstore=True)
    assert not has_kv(llm, CHUNKS[0])
    changed = "Another text altogether, and long enough to be a module of its own."
    index.update_ref_doc(Document(text=changed, id_="d1"))
    assert has_kv(llm, changed)
    assert not has_kv(llm, CHUNKS[1])
    again = "Yet another text, of which nobody has ever heard before today."
    done = index.refresh_ref_docs([Document(text=again, id_="d1"), documents()[2]])
    assert done == [True, False]
    assert [has_kv(llm, text) for text in (changed, again, CHUNKS[2])] == [False, True, True]


def test_a_node_that_fits_no_context_keeps_no_other_from_being_encoded(llm, caplog):
    make_index(llm).insert_nodes([*nodes(), TextNode(text="long " * 900)])
    assert all(has_kv(llm, module_text(node)) for node in nodes())
    assert "stays without KV" in caplog.text


def test_a_store_without_room_keeps_no_node_from_being_found(caplog, tmp_path):
    store = StoreConfig(str(tmp_path), disk_bytes=1 << 12)
    with Engine(tiny_model("llama"), store) as engine:
        index = make_index(CachedRAGLLM(engine=engine))
        index.insert_nodes(nodes())
        assert len(index.as_retriever(similarity_top_k=9).retrieve("Who?")) == len(nodes())
        assert "stay without KV until an answer has used them" in caplog.text
        assert engine.library.table.get(module_text(nodes()[0])) is not None


def test_a_store_that_cannot_be_used_keeps_no_node_from_being_found(caplog, tmp_path):
    (tmp_path / "catalog.sqlite").write_text("no database, but text that is long enough " * 9)
    with Engine(tiny_model("llama"), StoreConfig(str(tmp_path))) as engine:
        index = make_index(CachedRAGLLM(engine=engine))
        index.insert_nodes(nodes())
        assert len(index.as_retriever(similarity_top_k=9).retrieve("Who?")) == len(nodes())
        assert "stay without KV until an answer has used them" in caplog.text
        assert engine.library.table.get(module_text(nodes()[0])) is not None


def test_an_index_can_be_changed_asynchronously_and_by_node(llm, caplog):
    async def main():
        index = make_index(llm)
        await index.ainsert(documents()[0])
        await index.ainsert_nodes(nodes()[1:])
        return index

    index = asyncio.run(main())
    assert has_kv(llm, CHUNKS[0])
    assert all(has_kv(llm, module_text(node)) for node in nodes()[1:])
    index.delete_nodes(["n1"])
    assert not has_kv(llm, module_text(nodes()[1]))
    page = MetadataFilters(filters=[MetadataFilter(key="page", value=2)])
    index.vector_store.delete_nodes(filters=page)
    assert "SimpleVectorStore cannot say which nodes it deletes" in caplog.text
    assert has_kv(llm, module_text(nodes()[2]))
    for delete in (index.vector_store.delete_nodes, index.vector_store.adelete_nodes):
        caplog.clear()
        made = delete()  # of all, by this store
        asyncio.run(made) if made is not None else None
        assert "their KV is kept until clear()" in caplog.text
    index.vector_store.clear()
    assert not has_kv(llm, CHUNKS[0])


def test_any_vector_store_works(llm):
    faiss_store = pytest.importorskip("llama_index.vector_stores.faiss")
    import faiss

    inner = faiss_store.FaissVectorStore(faiss_index=faiss.IndexFlatL2(4))
    context = StorageContext.from_defaults(vector_store=CachedVectorStore(inner, llm))
    index = VectorStoreIndex(nodes(), storage_context=context)
    assert all(has_kv(llm, module_text(node)) for node in nodes())
    assert len(index.as_retriever(similarity_top_k=3).retrieve("copper")) == 3


def test_a_copy_with_other_white_space_keeps_the_kv(llm):
    store = CachedVectorStore(SimpleVectorStore(), llm)
    texts = {"plain": CHUNKS[0], "padded": f"{CHUNKS[0]}\n"}
    store.add([TextNode(text=t, id_=name, embedding=[1.0] * 4) for name, t in texts.items()])
    store.delete_nodes(["padded"])
    assert has_kv(llm, CHUNKS[0])
    store.delete_nodes(["plain"])
    assert not has_kv(llm, CHUNKS[0])


def test_what_was_encoded_without_metadata_is_forgotten_too(llm):
    index = make_index(llm)
    index.insert_nodes(nodes())
    llm.encode(CHUNKS)  # as citations, which show no metadata, have it done
    index.delete_nodes(["n0"])
    assert [has_kv(llm, chunk) for chunk in CHUNKS] == [False, True, True]
    index.insert(Document(text=CHUNKS[1], id_="copy"))
    index.delete_nodes(["n1"])
    assert has_kv(llm, CHUNKS[1])  # the copy still needs it
    index.vector_store.clear()
    assert not any(map(has_kv, [llm] * 3, CHUNKS))


def test_of_two_nodes_with_one_id_the_last_one_counts(llm):
    store = CachedVectorStore(SimpleVectorStore(), llm)
    store.add([TextNode(text=text, id_="same", embedding=[1.0] * 4) for text in CHUNKS[:2]])
    assert [has_kv(llm, text) for text in CHUNKS[:2]] == [False, True]
    store.delete_nodes(["same"])
    assert not has_kv(llm, CHUNKS[1])


def test_a_structured_llm_reads_with_the_one_inside(llm):
    asked = llm.as_structured_llm(Page)
    store = CachedVectorStore(SimpleVectorStore(), asked)
    store.add([TextNode(text=CHUNKS[0], embedding=[1.0] * 4)])
    assert has_kv(llm, CHUNKS[0])
    CachedRetriever(Everything(), asked, encode="eager").retrieve("copper")
    assert has_kv(llm, module_text(nodes()[1]))
    found = [NodeWithScore(node=TextNode(text=CHUNKS[2]))]
    CachedPostprocessor(asked, encode="eager").postprocess_nodes(found)
    assert has_kv(llm, CHUNKS[2])
    synthesizer = CachedSynthesizer(asked)
    assert synthesizer._llm is asked
    assert synthesizer._prompt_helper.context_window == llm.metadata.context_window
    with pytest.raises(ConfigError, match="a MockLLM keeps no KV; give the CachedRAGLLM"):
        CachedRetriever(Everything(), MockLLM())


def test_what_is_of_another_kind_is_refused_before_it_is_used(llm):
    index = make_index(llm)
    with pytest.raises(
        ConfigError, match=r"a VectorStoreIndex is no retriever; .*as_retriever\(\)"
    ):
        CachedRetriever(index, llm)
    with pytest.raises(ConfigError, match="a str is no node; for texts use encode"):
        llm.encode_nodes([CHUNKS[0]])
    for make in (
        lambda **given: CachedRetriever(index.as_retriever(), llm, **given),
        lambda **given: CachedPostprocessor(llm, **given),
        lambda **given: CachedVectorStore(SimpleVectorStore(), llm, **given),
    ):
        make(prompt=PromptTemplate("a {context_str}"))
        with pytest.raises(ConfigError, match=r"PromptTemplate.*not 'a \{context_str\}'"):
            make(prompt="a {context_str}")


def test_background_leaves_encoding_for_later(llm):
    make_index(llm, documents(), encode="background")
    assert not has_kv(llm, CHUNKS[0])
    assert llm.loaded_engine().library.table.get(CHUNKS[0]) is not None


def test_a_later_process_forgets_what_it_deletes(llm, tmp_path):
    ledger = str(tmp_path / "nodes.sqlite")
    make_index(llm, documents(), ledger=ledger).storage_context.persist(tmp_path / "index")
    inner = SimpleVectorStore.from_persist_dir(tmp_path / "index")
    store = CachedVectorStore(inner, llm, ledger=ledger)
    store.delete("d2")
    assert not has_kv(llm, CHUNKS[2])
    assert has_kv(llm, CHUNKS[1])


def test_an_index_can_be_copied(llm):
    index = make_index(llm, documents())
    copied = copy.deepcopy(index)
    found = copied.as_retriever(similarity_top_k=1).retrieve("copper")
    assert found[0].text in CHUNKS
    copied.delete_ref_doc("d0")
    assert not has_kv(llm, CHUNKS[0])
    assert len(index.as_retriever(similarity_top_k=3).retrieve("copper")) == 3


def test_a_pickled_store_knows_its_nodes(llm, tmp_path, monkeypatch):
    store = make_index(llm, documents(), ledger=tmp_path / "nodes.sqlite").vector_store
    engine = llm.loaded_engine()
    monkeypatch.setattr(CachedRAGLLM, "loaded_engine", lambda _: engine)  # else, by its name
    back = pickle.loads(pickle.dumps(store))
    asked = VectorStoreQuery(query_embedding=[0.5] * 4, similarity_top_k=3)
    assert sorted(back.query(asked).ids) == sorted(store.query(asked).ids)
    back.delete("d2")
    assert not has_kv(llm, CHUNKS[2])
    assert has_kv(llm, CHUNKS[1])


def test_a_store_that_cannot_be_pickled_says_so_and_stays_as_it_was(llm):
    store = make_index(llm, documents()).vector_store
    with pytest.raises(ConfigError, match="in memory cannot be pickled"):
        pickle.dumps(store)
    store.delete("d2")
    assert not has_kv(llm, CHUNKS[2])


# Ingestion ---------------------------------------------------------------------------------------


def test_a_pipelines_cache_skips_no_kv(llm):
    def run(engine_llm, cache=None):
        store = CachedVectorStore(SimpleVectorStore(), engine_llm)
        parts = [SentenceSplitter(chunk_size=128, chunk_overlap=0), MockEmbedding(4)]
        pipeline = IngestionPipeline(transformations=parts, vector_store=store)
        if cache is not None:
            pipeline.cache = cache
        pipeline.run(documents=documents())
        return pipeline.cache

    cache = run(llm)
    assert all(has_kv(llm, chunk) for chunk in CHUNKS)
    fresh = CachedRAGLLM(engine=Engine(tiny_model("llama")), max_tokens=4)
    run(fresh, cache)  # every transformation comes from the cache
    assert all(has_kv(fresh, chunk) for chunk in CHUNKS)


def test_a_pipeline_that_updates_keeps_kv_in_step(llm):
    store, docstore = CachedVectorStore(SimpleVectorStore(), llm), SimpleDocumentStore()
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), MockEmbedding(4)],
        vector_store=store,
        docstore=docstore,
    )
    pipeline.run(documents=documents())
    changed = "Another text altogether, and long enough to be a module of its own."
    pipeline.run(documents=[Document(text=changed, id_="d0"), *documents()[1:]])
    assert [has_kv(llm, text) for text in (CHUNKS[0], changed, CHUNKS[1])] == [False, True, True]


def test_what_a_pipeline_returns_is_encoded_also_from_its_cache(llm):
    pipeline = IngestionPipeline(transformations=[SentenceSplitter()])
    pipeline.run(documents=documents())
    again = pipeline.run(documents=documents())  # from the cache: no transformation is called
    assert llm.encode_nodes(again).encoded == 3
    assert all(has_kv(llm, chunk) for chunk in CHUNKS)


def test_half_a_surrogate_pair_costs_the_other_nodes_nothing(llm, caplog):
    odd = [TextNode(text=f"{CHUNKS[1]} \ud800", id_="odd"), nodes()[0]]
    store = CachedVectorStore(SimpleVectorStore(stores_text=True), llm, encode="eager")
    for node in odd:
        node.embedding = [0.5] * 4
    assert store.add(odd) == ["odd", "n0"]
    assert has_kv(llm, module_text(odd[1]))
    assert "1, as half of a surrogate pair" in caplog.text
    CachedRetriever(_Found(odd), llm).retrieve("copper")  # as they come from the store


class _Found(BaseRetriever):
    def __init__(self, found):
        super().__init__()
        self._found = found

    def _retrieve(self, query_bundle):
        return [NodeWithScore(node=node, score=1.0) for node in self._found]
