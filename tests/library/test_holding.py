"""How long KV of texts is kept: pinned against eviction, and deleted when its time is over."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from conftest import CHUNKS, NEW_PROMPTS, ask, tiny_model
from typer.testing import CliRunner

from cached_rag import CachedRAG, ConfigError, Engine, StoreConfig
from cached_rag.cli.main import app
from cached_rag.errors import StoreFullError
from cached_rag.kv.disk import DiskStore
from cached_rag.library.matching import EncodedAfter

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
    engine.library.refresh()
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
        assert engine.hold(CHUNKS, pinned=True) == 0  # there is nothing yet
        engine.encode(CHUNKS)
        assert engine.hold(CHUNKS[:2], pinned=True) == 2
        for text in OTHERS:
            engine.encode([text])
        assert held(engine, CHUNKS) == CHUNKS[:2]  # control: the third was pushed out
        engine.hold(CHUNKS[:1], pinned=False)
        for text in OTHERS:
            engine.encode([f"{text} Said anew."])
        assert held(engine, CHUNKS) == CHUNKS[1:2]


def test_pins_outlive_the_process_and_not_their_text(tmp_path):
    config = settings("disk", tmp_path)
    with Engine(tiny_model("llama"), config) as engine:
        engine.encode(CHUNKS[:1])
        engine.hold(CHUNKS[:1], pinned=True)
    with Engine(tiny_model("llama"), config) as engine:
        for text in OTHERS:
            engine.encode([text])
        assert held(engine, CHUNKS[:1]) == CHUNKS[:1]
        engine.forget(CHUNKS[:1])
        assert held(engine, CHUNKS[:1]) == []


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_pins_take_half_and_leave_the_rest_to_others(kind, tmp_path):
    model = tiny_model("llama")
    with Engine(model, settings(kind, tmp_path)) as engine, engine.tenant("other") as other:
        engine.encode(OTHERS[:8])
        with pytest.raises(StoreFullError, match="pinned KV may take"):
            engine.hold(OTHERS[:8], pinned=True)
        other.encode(CHUNKS)
        assert held(other, CHUNKS) == CHUNKS


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_pins_whose_time_is_over_leave_their_share_to_others(kind, tmp_path, clock):
    with Engine(tiny_model("llama"), settings(kind, tmp_path)) as engine:
        engine.encode(OTHERS[:6])
        assert engine.hold(OTHERS[:3], pinned=True, ttl_seconds=60) == 3
        clock(61)
        assert engine.hold(OTHERS[3:6], pinned=True) == 3


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_kv_whose_time_is_over_is_gone_and_comes_anew(kind, tmp_path, clock):
    with Engine(tiny_model("llama"), replace(settings(kind, tmp_path), write_back=False)) as engine:
        engine.encode(CHUNKS)
        engine.hold(CHUNKS[:2], ttl_seconds=60)
        engine.hold(CHUNKS[1:2], ttl_seconds=math.inf)
        clock(59)
        assert engine.generate(ask(*CHUNKS), max_tokens=1).report.modules_hit == 3
        clock(2)
        assert held(engine, CHUNKS) == CHUNKS[1:]
        assert engine.generate(ask(*CHUNKS), max_tokens=1).report.modules_hit == 2
        assert engine.hold(CHUNKS[:1], ttl_seconds=math.inf) == 0  # too late
        before = engine.library.shelf.store.nbytes
        engine.encode([OTHERS[0]])
        after = engine.library.shelf.store.nbytes
        engine.encode([OTHERS[1]])
        assert after < before + (engine.library.shelf.store.nbytes - after)  # and its bytes
        assert engine.encode(CHUNKS).encoded == 1
        assert held(engine, CHUNKS) == CHUNKS
        clock(1e9)
        assert held(engine, CHUNKS) == CHUNKS  # what is new lives for ever


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_setting_says_how_long_all_of_it_lives(kind, tmp_path, clock):
    config = settings(kind, tmp_path, ttl_seconds=100)
    with Engine(tiny_model("llama"), config) as engine:
        engine.register(CHUNKS[:2])
        engine.generate(ask(*CHUNKS[:2]), max_tokens=1)
        engine.write_back.drain()
        assert held(engine, CHUNKS[:2]) == CHUNKS[:2]  # encoded in the background, too
        engine.hold(CHUNKS[:1], ttl_seconds=1000)
        clock(101)
        assert held(engine, CHUNKS[:2]) == CHUNKS[:1]


def test_kv_has_its_end_from_the_moment_it_is_kept(tmp_path, monkeypatch):
    put = DiskStore.put

    def put_then_killed(*given):
        put(*given)
        raise KeyboardInterrupt

    with Engine(tiny_model("llama"), settings("disk", tmp_path, ttl_seconds=100)) as engine:
        _, kv, _ = engine.prompt_kv(CHUNKS[0])
        monkeypatch.setattr(DiskStore, "put", put_then_killed)
        with pytest.raises(KeyboardInterrupt):
            engine.library.put(EncodedAfter(()), kv)
        shelf = engine.library.shelf
        assert shelf.disk.ends(shelf.key(EncodedAfter(()), kv.token_ids)) < time.time() + 101


def test_a_copy_in_memory_ends_with_its_file(tmp_path, clock):
    config = replace(settings("disk", tmp_path), write_back=False)
    with Engine(tiny_model("llama"), config) as engine:
        engine.encode(CHUNKS)
        engine.hold(CHUNKS[:1], ttl_seconds=60)
    with Engine(tiny_model("llama"), config) as engine:
        assert engine.generate(ask(*CHUNKS), max_tokens=1).report.modules_hit == 3  # in memory now
        assert len(engine.library.shelf.memory[0].held) >= 3
        clock(61)
        assert engine.generate(ask(*CHUNKS), max_tokens=1).report.modules_hit == 2
        assert engine.encode(CHUNKS).encoded == 1


def test_pins_of_who_had_more_room_give_way(tmp_path):
    with Engine(
        tiny_model("llama"), replace(settings("disk", tmp_path), disk_bytes=None)
    ) as engine:
        engine.encode(OTHERS[:8])
        assert engine.hold(OTHERS[:8], pinned=True) == 8
    with Engine(tiny_model("llama"), settings("disk", tmp_path)) as engine:
        engine.encode(CHUNKS)
        assert held(engine, CHUNKS) == CHUNKS
        assert 0 < len(held(engine, OTHERS[:8])) < 8


def test_prune_takes_what_is_over_and_pins_last(tmp_path, clock):
    with Engine(tiny_model("llama"), settings("disk", tmp_path)) as engine:
        engine.encode(CHUNKS)
        engine.hold(CHUNKS[:1], ttl_seconds=60)
        engine.hold(CHUNKS[1:2], pinned=True)
        disk = engine.library.shelf.disk
        clock(61)
        assert disk.prune()[0] == 1
        assert held(engine, CHUNKS) == CHUNKS[1:]
        assert disk.prune(A_CHUNKS_BYTES // 2)[0] >= 1
        assert held(engine, CHUNKS) == CHUNKS[1:2]
        assert disk.prune(0)[0] >= 1
        assert held(engine, CHUNKS) == []


def test_times_that_are_none_are_refused():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        for wrong in (0, -1, math.nan):
            with pytest.raises(ConfigError, match="time to live"):
                engine.hold(CHUNKS, ttl_seconds=wrong)
    for wrong in ({"ttl_seconds": -1}, {"ttl_seconds": 1, "remote": "redis://localhost:1/0"}):
        with pytest.raises(ConfigError, match="ttl_seconds"):
            StoreConfig(**wrong)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_index_refuses_what_its_engine_would(tmp_path, model_folder, is_loaded):
    (tmp_path / "a.txt").write_text(CHUNKS[0])
    path = tmp_path / "index"
    with CachedRAG.open(path, model_folder, dtype="float32") as rag:
        rag.ingest(tmp_path / "a.txt")
        (name,), size = rag.documents(), rag.engine.library.shelf.store.nbytes
    for options, asked, error in (
        ({"remote": f"file://{tmp_path}/far"}, {"ttl_seconds": 60}, ConfigError),
        ({"disk_bytes": size // 4}, {"pinned": True}, StoreFullError),
    ):
        with CachedRAG.open(path, model_folder, dtype="float32", **options) as rag:
            if is_loaded:
                assert rag.engine
            with pytest.raises(error, match=r"remote store|pinned KV may take"):
                rag.hold(name.source, **asked)


def test_documents_of_an_index(tmp_path, model_folder, clock):
    docs, texts = tmp_path / "docs", [text * 3 for text in CHUNKS[:2]]
    docs.mkdir()
    for name, text in zip("ab", texts, strict=True):
        (docs / f"{name}.txt").write_text(text)
    path, run = str(tmp_path / "index"), CliRunner().invoke
    with CachedRAG.open(path, model_folder, dtype="float32") as rag:
        rag.ingest(docs)
        assert rag.hold("docs/a.txt", ttl_seconds=60) == 2  # two encodings
    told = run(app, ["hold", "docs/b.txt", "--index", path, "--pinned"])
    assert (told.exit_code, "2 KVs" in told.output) == (0, True), told.output
    assert run(app, ["hold", "docs/c.txt", "--index", path, "--pinned"]).exit_code
    clock(61)
    with CachedRAG.open(path, model_folder, dtype="float32") as rag:
        assert held(rag.engine, texts) == texts[1:]
        assert len(rag.documents()) == 2
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        other = CachedRAG.open(str(tmp_path / "other"), engine=engine)
        other.ingest(docs)
        assert other.hold("docs/a.txt", pinned=True) == 2  # where the engine keeps it
        other.close()
