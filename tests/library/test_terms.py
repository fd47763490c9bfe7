"""How long KV of texts is kept: pinned against eviction, and forgotten when its time is over."""

from __future__ import annotations

import json
import time
from contextlib import closing, suppress

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, ask, tiny_model
from typer.testing import CliRunner

from cached_rag import CachedRAG, ConfigError, Engine, StoreConfig
from cached_rag.cli.main import app
from cached_rag.errors import StoreFullError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.tiers import MemoryStore

OTHERS = [
    f"Text number {n} is about the {n * 7}th of many things, and about no other." for n in range(12)
]
A_CHUNKS_BYTES = 42_000


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set forward by hand."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def settings(kind, tmp_path, **more):
    """A store that has room for a few chunks, in memory or on disk."""
    if kind == "memory":
        return StoreConfig(memory_bytes=8 * A_CHUNKS_BYTES, sequence_bytes=0, **more)
    return StoreConfig(
        path=str(tmp_path / "kv"), disk_bytes=8 * A_CHUNKS_BYTES, sequence_bytes=0, **more
    )


def held(engine, texts):
    """Which of these texts have KV where it is kept longest."""
    store, library = engine.library.shelf.store.tiers[-1], engine.library
    records = [library.table.get(text) for text in texts]
    return [
        text
        for text, record in zip(texts, records, strict=True)
        if record is not None and any(key in store for key in library._keys([record]))
    ]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_pinned_texts_stay_and_others_leave(kind, tmp_path):
    with Engine(tiny_model("llama"), settings(kind, tmp_path)) as engine:
        engine.hold(CHUNKS[:1], pinned=True)  # before there is KV
        engine.encode(CHUNKS[:2])
        engine.hold(CHUNKS[1:2], pinned=True)  # and behind it
        engine.encode(CHUNKS[2:])
        for text in OTHERS:
            engine.encode([text])
        assert held(engine, CHUNKS) == CHUNKS[:2]  # control: the third was pushed out
        engine.hold(CHUNKS[:1])  # as others again
        for text in OTHERS:
            engine.encode([f"{text} Said anew."])
        assert held(engine, CHUNKS) == CHUNKS[1:2]


def test_pins_outlive_the_process(tmp_path):
    config = settings("disk", tmp_path)
    with Engine(tiny_model("llama"), config) as engine:
        engine.encode(CHUNKS[:1])
        engine.hold(CHUNKS[:1], pinned=True)
    with Engine(tiny_model("llama"), config) as engine:
        for text in OTHERS:
            engine.encode([text])
        assert held(engine, CHUNKS[:1]) == CHUNKS[:1]
        engine.forget(CHUNKS[:1])  # deletion knows no pins
        assert held(engine, CHUNKS[:1]) == []
        assert engine.library.known.terms == {}


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_all_pinned_is_an_error_that_says_so_and_nothing_pinned_is_lost(kind, tmp_path):
    with Engine(tiny_model("llama"), settings(kind, tmp_path, pinned=True)) as engine:
        for text in OTHERS:
            with suppress(StoreFullError):
                engine.encode([text])
        with pytest.raises(StoreFullError, match="pinned KV takes"):
            engine.encode(OTHERS[-1:])
        kept = held(engine, OTHERS)
        assert 3 < len(kept) < len(OTHERS)
        assert kept == OTHERS[: len(kept)]
        assert engine.generate(ask(*OTHERS), max_tokens=1).report.modules_hit == len(kept)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_text_whose_time_is_over_is_forgotten(kind, tmp_path, clock):
    with Engine(tiny_model("llama"), settings(kind, tmp_path)) as engine:
        engine.encode(CHUNKS)
        engine.hold(CHUNKS[:1], ttl_seconds=60)
        engine.hold(CHUNKS[1:2], pinned=True, ttl_seconds=600)
        clock(59)
        assert engine.generate(ask(*CHUNKS), max_tokens=1).report.modules_hit == 3
        clock(2)
        assert engine.generate(ask(*CHUNKS), max_tokens=1).report.modules_hit == 2
        assert held(engine, CHUNKS) == CHUNKS[1:]
        clock(600)
        engine.library.refresh()
        assert held(engine, CHUNKS) == CHUNKS[2:]


def test_time_to_live_as_a_setting_begins_anew_with_each_encoding(tmp_path, clock):
    config = settings("disk", tmp_path, ttl_seconds=100)
    with Engine(tiny_model("llama"), config) as engine:
        engine.encode(CHUNKS)
        clock(90)
        engine.encode(CHUNKS[:1])
    clock(20)
    with Engine(tiny_model("llama"), config) as engine:
        engine.generate("What now?", max_tokens=1)
        assert held(engine, CHUNKS) == CHUNKS[:1]


def test_another_process_says_how_long(tmp_path, clock):
    config = settings("disk", tmp_path)
    with Engine(tiny_model("llama"), config) as one, Engine(tiny_model("llama"), config) as other:
        one.encode(CHUNKS)
        other.hold(CHUNKS[:2], ttl_seconds=60)
        clock(61)
        assert one.generate(ask(*CHUNKS), max_tokens=1).report.modules_hit == 1


def test_a_removal_that_fails_is_tried_again_and_answers_go_on(
    tmp_path, clock, monkeypatch, caplog
):
    config = settings("disk", tmp_path)
    with Engine(tiny_model("llama"), config) as engine:
        engine.encode(CHUNKS)
        engine.hold(CHUNKS[:1], ttl_seconds=60)
        clock(61)
        with monkeypatch.context() as patched:
            patched.setattr("cached_rag.kv.database.PATIENCE_S", 0.05)
            blocker = engine.library._catalog.database
            with closing(type(blocker)(blocker.path, "")) as others, others.transaction():
                assert engine.generate(ask(*CHUNKS), max_tokens=1).text is not None
    with Engine(tiny_model("llama"), config) as engine:
        engine.generate("What now?", max_tokens=1)
        assert held(engine, CHUNKS) == CHUNKS[1:]


@pytest.mark.parametrize("store", [MemoryStore(1 << 20), None])
def test_a_store_pins_by_key(store, tmp_path):
    values = torch.zeros(1, 1, 1, 64)
    with closing(DiskStore(tmp_path, max_bytes=1 << 20)) as disk:
        kept = store or disk
        kept.put("a" * 40, ModuleKV((1,), 0, values, values.clone()))
        kept.pin(["a" * 40, "b" * 40], pinned=True)
        kept.put(
            "a" * 40, ModuleKV((1,), 0, values + 1, values.clone())
        )  # replaced, and pinned as before
        found = kept.get("a" * 40, (1,))
        assert torch.equal(found.keys, values + 1)
        if store is None:
            assert disk.prune(0) == (0, 0)
            kept.pin(["a" * 40], pinned=False)
            assert disk.prune(0)[0] == 1


def test_times_that_are_none_are_refused():
    with (
        Engine(tiny_model("llama"), NEW_PROMPTS) as engine,
        pytest.raises(ConfigError, match="time"),
    ):
        engine.hold(CHUNKS, ttl_seconds=0)
    with pytest.raises(ConfigError, match="ttl_seconds"):
        StoreConfig(ttl_seconds=-1)


def test_documents_of_an_index(tmp_path, model_folder, clock):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in zip("ab", CHUNKS, strict=False):
        (docs / f"{name}.txt").write_text(text * 3)
    path = str(tmp_path / "index")
    with CachedRAG.open(path, model_folder, dtype="float32") as rag:
        rag.ingest(docs)
        rag.hold("docs/a.txt", ttl_seconds=60)
        assert len(held(rag.engine, [CHUNKS[0] * 3, CHUNKS[1] * 3])) == 2
    clock(61)
    run = CliRunner().invoke
    told = run(app, ["hold", "docs/b.txt", "--index", path, "--pinned"])
    assert told.exit_code == 0, told.output
    assert "pinned" in told.output
    with CachedRAG.open(path, model_folder, dtype="float32") as rag:
        rag.engine.library.refresh()
        assert held(rag.engine, [CHUNKS[0] * 3, CHUNKS[1] * 3]) == [CHUNKS[1] * 3]
        assert [term.pinned for term in rag.engine.library.known.terms.values()] == [True]
        assert len(rag.documents()) == 2
    stats = run(app, ["store", "stats", "--index", path, "--json"])
    assert json.loads(stats.stdout)
