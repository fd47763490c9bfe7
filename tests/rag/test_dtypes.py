"""An index that was encoded in one dtype, asked in another: it says so, mends itself, is pruned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import CHUNKS, tiny_model
from indexes import WordEmbedding

from cached_rag import CachedRAG, ConfigError, Engine, StoreConfig
from cached_rag.kv import holdings

QUESTION = "Why does copper turn green in the air?"


@pytest.fixture
def opened(tmp_path):
    made = []

    def open_it(dtype, **options):
        store = StoreConfig(path=str(tmp_path / "index" / "kv"), **options)
        engine = Engine(tiny_model("llama", dtype), store)
        made.append(CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding()))
        return made[-1]

    yield open_it
    for rag in made:
        rag.close()
        rag.engine.close()


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, chunk in zip("abc", CHUNKS, strict=True):
        (folder / f"{name}.txt").write_text(chunk)
    return folder


def reported(rag):
    return rag.ask(QUESTION, k=2, max_tokens=2).report


def test_another_dtype_is_noticed_and_mended_in_the_background(opened, docs):
    first = opened(torch.bfloat16)
    first.ingest(docs, progress=False)
    assert reported(first).notes == []
    behinds = set(first.engine.library.encoded_after())
    rag = opened(torch.float32)
    report = reported(rag)
    assert (report.modules_hit, report.modules_missed) == (0, 2)
    (note,) = report.notes
    assert "made by llama in bfloat16; this engine is llama in float32: 2 texts" in note
    assert "in the background" in note
    assert "cached-rag ingest" in note
    rag.engine.write_back.drain()
    report = reported(rag)
    assert (report.modules_hit, report.modules_missed, report.notes) == (2, 0, [])
    assert (
        set(rag.engine.library.encoded_after()) == behinds
    )  # as an ingestion would have encoded them
    assert rag.ingest(docs, progress=False).encoded == 1
    assert reported(first).modules_hit == 2


def test_only_what_was_asked_for_is_registered(opened, docs, monkeypatch):
    opened(torch.bfloat16).ingest(docs, progress=False)
    rag = opened(torch.float32, write_back=False)
    assert len(rag.engine.library.table) == 0
    (note,) = reported(rag).notes
    assert "in the background" not in note
    assert len(rag.engine.library.table) == 2
    monkeypatch.setattr(Engine, "register", lambda *_: pytest.fail("known already"))
    assert "harvest" in str(reported(rag).notes)  # known, and not encoded


def test_chunks_that_an_interrupted_ingestion_left_are_encoded_too(opened, docs, monkeypatch):
    rag = opened(torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "encode", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rag.ingest(docs, progress=False)
    report = reported(rag)
    assert (report.modules_missed, report.notes) == (2, [])
    rag.engine.write_back.drain()
    assert reported(rag).modules_hit == 2


def test_a_deleted_document_goes_in_every_dtype(opened, docs):
    rag = None
    for dtype in (torch.float32, torch.bfloat16):
        rag = opened(dtype)
        rag.ingest(docs, progress=False)
    disk = rag.engine.library.shelf.disk
    assert len(disk) == 14  # a prefix, and three chunks behind two contexts
    assert rag.delete("docs/a.txt").kvs == 4
    assert len(disk) == 10
    (docs / "b.txt").write_text("Something else stands here now, which is not about copper at all.")
    rag.ingest(docs / "b.txt", progress=False)
    assert len(disk) == 8  # of the old text four out, of the new one two in


def test_what_no_dtype_wanted_can_use_is_found_and_dropped(opened, docs, tmp_path):
    opened(torch.bfloat16).ingest(docs, progress=False)
    rag = opened(torch.float32)
    rag.ingest(docs, progress=False)
    folder, disk = tmp_path / "index" / "kv", rag.engine.library.shelf.disk
    before = disk.nbytes
    (other,) = holdings.unused(folder, "llama", ["float32"])
    assert (other.maker.name, other.maker.dtype, len(other.keys)) == ("llama", "bfloat16", 7)
    assert holdings.unused(folder, "llama", ["float32", "bfloat16"]) == []
    with pytest.raises(ConfigError, match=r"no KV of llama in float16 .* it has llama in bfloat16"):
        holdings.unused(folder, "llama", ["float16"])
    holdings.drop(folder, other)
    assert disk.nbytes == before - other.nbytes
    assert holdings.unused(folder, "llama", ["float32"]) == []
    assert reported(rag).modules_hit == 2


def test_other_weights_of_the_same_name_are_told_apart(opened, docs, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        opened(dtype).ingest(docs, progress=False)
    changed = replace(tiny_model("llama"), fingerprint="of other weights")
    folder = tmp_path / "index" / "kv"
    with Engine(changed, StoreConfig(path=str(folder))) as engine:
        rag = CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding())
        (note,) = reported(rag).notes
        assert "llama in float32 (other weights)" in note
        assert note.count("other weights") == 1
        (old,) = holdings.unused(folder, "llama", ["float32", "bfloat16"])
        assert (old.maker.model, len(old.keys)) == (tiny_model("llama").fingerprint, 7)
        rag.close()
    opened(torch.float32)  # back again: now that one is the latest
    (new,) = holdings.unused(folder, "llama", ["float32", "bfloat16"])
    assert new.maker.model == "of other weights"
