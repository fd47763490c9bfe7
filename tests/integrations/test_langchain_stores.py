"""CachedRAGVectorStore around real stores on disk, closed and opened again.

Chroma brings thirty packages along, so it is no dependency of the tests: `pip install
langchain-chroma` to have it tried, too.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conftest import CHUNKS, tiny_model
from langchain_cached_rag import CachedRAGVectorStore, ChatCachedRAG
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from cached_rag import ConfigError, Engine, StoreConfig

pytestmark = pytest.mark.slow

FAKE = DeterministicFakeEmbedding(size=6)
IDS = [str(UUID(int=number)) for number in range(1, 4)]
CHANGED = "Another text altogether, and long enough to be a module."


@dataclass(frozen=True)
class Kind:
    """A kind of store.

    Attributes:
        open: a store in a folder, which holds what was saved there.
        save: brings to disk what is not there by itself.
        close: lets others open the folder.
        recent: a filter in the store's own form, for years after 1900.
        replaces: adding an id that is there replaces the document; else it is deleted first.
    """

    open: Callable[[Path], Any]
    recent: Callable[[], Any]
    save: Callable[[Any, Path], object] = lambda store, folder: None
    close: Callable[[Any], object] = lambda store: None
    replaces: bool = True


def open_qdrant(folder):
    from langchain_qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(folder))
    if not client.collection_exists("documents"):
        size = models.VectorParams(size=6, distance=models.Distance.COSINE)
        client.create_collection("documents", vectors_config=size)
    return QdrantVectorStore(client, "documents", FAKE)


def recent_in_qdrant():
    from qdrant_client import models

    after = models.FieldCondition(key="metadata.year", range=models.Range(gt=1900))
    return models.Filter(must=[after])


def open_faiss(folder):
    import faiss
    from langchain_community.docstore.in_memory import InMemoryDocstore
    from langchain_community.vectorstores import FAISS

    if (folder / "index.faiss").exists():
        return FAISS.load_local(str(folder), FAKE, allow_dangerous_deserialization=True)
    return FAISS(FAKE, faiss.IndexFlatL2(6), InMemoryDocstore(), {})


def open_lancedb(folder):
    import lancedb
    from langchain_community.vectorstores import LanceDB

    return LanceDB(lancedb.connect(str(folder)), FAKE, mode="append")


def open_chroma(folder):
    chroma = pytest.importorskip("langchain_chroma")
    return chroma.Chroma("documents", FAKE, persist_directory=str(folder))


KINDS = {
    "qdrant": Kind(open_qdrant, recent_in_qdrant, close=lambda store: store.client.close()),
    "faiss": Kind(
        open_faiss,
        lambda: {"year": {"$gt": 1900}},
        save=lambda store, folder: store.save_local(str(folder)),
        replaces=False,
    ),
    "lancedb": Kind(open_lancedb, lambda: "metadata.year > 1900", replaces=False),
    "chroma": Kind(open_chroma, lambda: {"year": {"$gt": 1900}}),
}


class Session:
    """What one process has: a model with its KV, and a store around one that is on disk."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.engine = Engine(tiny_model("llama"), StoreConfig(path=str(folder / "kv")))
        self.inner = kind.open(folder / "store")
        llm = ChatCachedRAG(engine=self.engine, max_tokens=4, method="reuse")
        ledger = folder / "ledger.sqlite"
        self.store = CachedRAGVectorStore(self.inner, llm, ledger=ledger)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kind.save(self.inner, self.folder / "store")
        self.kind.close(self.inner)
        self.store.close()
        self.engine.close()
        gc.collect()

    def has_kv(self, text):
        library = self.engine.library
        module = library.table.get(text)
        behinds = library.encoded_after() if module else ()
        return any(library.shelf.holds(behind, module.token_ids) for behind in behinds)

    def held(self):
        return [self.has_kv(chunk) for chunk in CHUNKS]

    def found(self, **options):
        return {d.page_content for d in self.store.similarity_search("copper", k=9, **options)}

    def replace(self, text, name):
        if not self.kind.replaces:
            self.store.delete([name])
        self.store.add_documents([Document(text, id=name, metadata={"year": 1950})])


@pytest.fixture(params=KINDS)
def session(request, tmp_path):
    def begun():
        return Session(KINDS[request.param], tmp_path)

    with begun() as first:
        made = [
            Document(chunk, id=name, metadata={"year": 1900 + number})
            for number, (chunk, name) in enumerate(zip(CHUNKS, IDS, strict=True))
        ]
        assert first.store.add_documents(made) == IDS
        assert first.held() == [True] * 3
    return begun


def test_what_was_added_is_found_and_reused(session):
    with session() as later:
        retriever = later.store.as_retriever(search_kwargs={"k": 3})
        texts = [document.page_content for document in retriever.invoke("copper")]
        assert set(texts) == set(CHUNKS)
        answer = later.engine.generate("\n\n".join([*texts, "Why?"]), method="reuse", max_tokens=2)
        assert (answer.report.modules_hit, answer.report.modules_missed) == (3, 0)


def test_filters_are_the_stores_own(session):
    with session() as later:
        recent = later.kind.recent()
        assert later.found(filter=recent) == set(CHUNKS[1:])
        options = {"k": 9, "filter": recent}
        documents = later.store.as_retriever(search_kwargs=options).invoke("copper")
        assert {document.metadata["year"] for document in documents} == {1901, 1902}
        scored = later.store.similarity_search_with_score("copper", k=9, filter=recent)
        assert scored == later.inner.similarity_search_with_score("copper", k=9, filter=recent)
        assert {document.page_content for document, _ in scored} == set(CHUNKS[1:])


def test_what_a_later_process_deletes_is_forgotten(session):
    with session() as later:
        later.store.delete(IDS[:1])
        assert later.held() == [False, True, True]
        assert later.found() == set(CHUNKS[1:])
    with session() as last:
        assert last.held() == [False, True, True]
        assert last.found() == set(CHUNKS[1:])


def test_what_a_later_process_replaces_is_forgotten(session):
    with session() as later:
        later.replace(CHANGED, IDS[1])
        assert later.held() == [True, False, True]
        assert later.has_kv(CHANGED)
        assert later.found() == {CHUNKS[0], CHUNKS[2], CHANGED}
    with session() as last:
        last.store.delete(IDS[1:2])
        assert not last.has_kv(CHANGED)
        assert last.found() == {CHUNKS[0], CHUNKS[2]}


@pytest.mark.parametrize("session", ["faiss"], indirect=True)
@pytest.mark.parametrize(
    "add",
    [
        lambda store, texts, ids: store.add_texts(texts, ids=ids),
        lambda store, texts, ids: asyncio.run(store.aadd_texts(texts, ids=ids)),
    ],
    ids=["sync", "async"],
)
def test_what_cannot_be_replaced_is_refused_before_anything_is_written(session, add):
    with session() as later:
        texts, ids = [CHANGED, f"{CHANGED} And more."], [IDS[1], "new"]
        said = rf"has 1 of these ids \({IDS[1]}\).*delete them first"
        with pytest.raises(ConfigError, match=said):
            add(later.store, texts, ids)
        assert later.found() == set(CHUNKS)
        assert later.held() == [True] * 3
        assert not later.has_kv(texts[1])
        later.store.delete(ids[:1])
        later.store.add_texts(texts, ids=ids)
        assert later.found() == {CHUNKS[0], CHUNKS[2], *texts}


def test_a_text_that_two_documents_have_is_kept_for_the_other(session):
    other = str(UUID(int=9))
    with session() as later:
        later.store.add_texts(CHUNKS[:1], [{"year": 1950}], ids=[other])
    with session() as last:
        last.store.delete(IDS[:1])
        assert last.held() == [True] * 3
        last.store.delete([other])
        assert last.held() == [False, True, True]
