"""Indexes that are saved: KV is there for whoever loads them, and goes with the texts."""

from __future__ import annotations

import subprocess
import sys

import faiss
import pytest
from conftest import CHUNKS, tiny_model
from llama_index.core import (
    Document,
    MockEmbedding,
    Settings,
    StorageContext,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.cached_rag import CachedRAGLLM
from llama_index.vector_stores.cached_rag import CachedVectorStore
from llama_index.vector_stores.faiss import FaissMapVectorStore, FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient
from test_llama_index_engines import Recording, unclosed  # noqa: F401
from test_llama_index_stores import has_kv

from cached_rag import Engine, StoreConfig

pytestmark = pytest.mark.slow

CHANGED = "Another text altogether, and long enough to be a module of its own."
STORES = {
    "simple": (SimpleVectorStore, SimpleVectorStore.from_persist_dir),
    "faiss": (
        lambda: FaissVectorStore(faiss_index=faiss.IndexFlatL2(4)),
        FaissVectorStore.from_persist_dir,
    ),
    "faiss map": (
        lambda: FaissMapVectorStore(faiss_index=faiss.IndexIDMap2(faiss.IndexFlatL2(4))),
        FaissMapVectorStore.from_persist_dir,
    ),
}


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(4))


class Process:
    """What a process has of an index: its own engine, and what lies on disk."""

    def __init__(self, folder, kind="simple"):
        self.folder = folder
        self.engine = Engine(
            tiny_model("llama"), StoreConfig(path=str(folder / "kv"), sequence_bytes=0)
        )
        self.llm = Recording(engine=self.engine, max_tokens=4, method="reuse")
        new, saved = STORES[kind]
        is_saved = (folder / "index").exists()
        inner = saved(str(folder / "index")) if is_saved else new()
        store = CachedVectorStore(inner, self.llm, ledger=folder / "nodes.sqlite")
        where = {"persist_dir": str(folder / "index")} if is_saved else {}
        context = StorageContext.from_defaults(vector_store=store, **where)
        self.index = (
            load_index_from_storage(context)
            if is_saved
            else VectorStoreIndex.from_documents(documents(), storage_context=context)
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.index.storage_context.persist(self.folder / "index")
        self.engine.close()

    def hits(self, **options):
        self.index.as_query_engine(llm=self.llm, similarity_top_k=3, **options).query("Why?")
        return [(report.modules_hit, report.modules_missed) for report in self.llm.reports()]

    def have_kv(self, *texts):
        return [has_kv(self.llm, text) for text in texts]


def documents():
    return [Document(text=chunk, id_=f"d{i}") for i, chunk in enumerate(CHUNKS)]


@pytest.mark.parametrize("kind", STORES)
def test_a_loaded_index_has_its_kv(tmp_path, kind):
    with Process(tmp_path, kind) as first:
        assert first.hits() == [(3, 0)]
    with Process(tmp_path, kind) as second:
        assert second.hits() == [(3, 0)]
        second.index.insert(Document(text=CHANGED, id_="d3"))
    with Process(tmp_path, kind) as third:
        assert third.have_kv(CHANGED) == [True]


def test_a_loaded_index_forgets_what_it_no_longer_has(tmp_path):
    with Process(tmp_path) as process:
        assert process.have_kv(*CHUNKS) == [True] * 3
    with Process(tmp_path) as process:
        done = process.index.refresh_ref_docs([Document(text=CHANGED, id_="d0"), *documents()[1:]])
        assert done == [True, False, False]
        assert process.have_kv(CHUNKS[0], CHANGED) == [False, True]
    with Process(tmp_path) as process:
        assert process.have_kv(CHUNKS[0], CHANGED) == [False, True]
        process.index.update_ref_doc(Document(text=CHUNKS[0], id_="d0"))
        assert process.have_kv(CHUNKS[0], CHANGED) == [True, False]
        process.index.delete_ref_doc("d1", delete_from_docstore=True)
    with Process(tmp_path) as process:
        assert process.have_kv(*CHUNKS) == [True, False, True]
        assert process.hits() == [(2, 0)]


def test_what_a_store_cannot_delete_keeps_its_kv(tmp_path):
    with Process(tmp_path, "faiss") as process, pytest.raises(NotImplementedError):
        process.index.delete_ref_doc("d1")
    with Process(tmp_path, "faiss") as process:
        assert process.hits() == [(3, 0)]


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning")
def test_a_store_that_keeps_texts_itself(tmp_path):
    def query_and(change, is_new=False):
        client = QdrantClient(path=str(tmp_path / "qdrant"))
        engine = Engine(tiny_model("llama"), StoreConfig(path=str(tmp_path / "kv")))
        llm = Recording(engine=engine, max_tokens=4, method="reuse")
        ledger = tmp_path / "nodes.sqlite"
        store = CachedVectorStore(QdrantVectorStore("nodes", client=client), llm, ledger=ledger)
        index = VectorStoreIndex.from_vector_store(store)
        for document in documents() if is_new else ():
            index.insert(document)
        index.as_query_engine(llm=llm, similarity_top_k=3).query("Why?")
        change(index)
        held = [has_kv(llm, text) for text in (*CHUNKS, CHANGED)]
        engine.close()
        client.close()
        return [report.modules_hit for report in llm.reports()], held

    def update(index):
        index.update_ref_doc(Document(text=CHANGED, id_="d0"))

    def delete(index):
        index.delete_ref_doc("d1")

    assert query_and(lambda _: None, is_new=True) == ([3], [True, True, True, False])
    assert query_and(update) == ([3], [False, True, True, True])
    assert query_and(delete) == ([3], [False, False, True, True])
    assert query_and(lambda _: None) == ([2], [False, False, True, True])


CODE = """
import json, sys
from llama_index.core import MockEmbedding, Settings, StorageContext, load_index_from_storage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.cached_rag import CachedRAGLLM, CacheReportHandler
from llama_index.llms.cached_rag import CachedRAGLLM
from llama_index.vector_stores.cached_rag import CachedVectorStore

model, kv, ledger, saved = sys.argv[1:]
Settings.embed_model = MockEmbedding(4)
how = {"dtype": "float32", "device": "cpu", "max_tokens": 4, "method": "fast"}
Settings.llm = CachedRAGLLM(model=model, store=kv, **how)
store = CachedVectorStore(SimpleVectorStore.from_persist_dir(saved), Settings.llm, ledger=ledger)
context = StorageContext.from_defaults(vector_store=store, persist_dir=saved)
get_dispatcher().add_event_handler(reports := CacheReportHandler())
load_index_from_storage(context).as_query_engine(similarity_top_k=3).query("Why?")
print(json.dumps([report.modules_hit for report in reports.reports]))
"""


@pytest.mark.real  # a new process, which imports all of LlamaIndex
def test_another_process_has_the_kv(tmp_path, model_folder):
    places = [str(tmp_path / name) for name in ("kv", "nodes.sqlite", "index")]
    llm = CachedRAGLLM(model=model_folder, store=places[0], dtype="float32", device="cpu")
    store = CachedVectorStore(SimpleVectorStore(), llm, ledger=places[1])
    context = StorageContext.from_defaults(vector_store=store)
    VectorStoreIndex.from_documents(documents(), storage_context=context)
    context.persist(places[2])
    command = [sys.executable, "-c", CODE, model_folder, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[3]"
