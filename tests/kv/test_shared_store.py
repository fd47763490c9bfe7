"""Engines on several machines share a remote store: one encodes, the others answer with its KV."""

from __future__ import annotations

import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNKS, tiny_model
from indexes import WordEmbedding
from servers import Proxy, redis_server

from cached_rag import CachedRAG, ConfigError, Engine, Schema, StoreConfig
from cached_rag.backends.machine import Profile
from cached_rag.engine.resources import refusal
from cached_rag.errors import StoreError
from cached_rag.kv import remote, transports
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.remote import Link
from cached_rag.pml import Import

pytestmark = pytest.mark.slow

MODEL = "llama"
HEAD = [{"role": "system", "content": "Answer from the texts."}, {"role": "user", "content": "X"}]
PROMPT = [HEAD[0], {"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat turns green?"}]
SLOW = Profile(1.0, 0.0)  # a machine that computes one token a second


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = redis_server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def _slow(monkeypatch):
    """Loading is always faster than computing, unless a test says otherwise."""
    monkeypatch.setattr("cached_rag.engine.resources.profile_of", lambda _: SLOW)


@pytest.fixture
def machine(server, request):
    """Makes engines that keep KV in their own memory, and in the server's database of this test."""
    number, made = hash(request.node.name) % 15, []
    import redis

    redis.Redis(port=server.port, db=number).flushdb()

    def make(port=server.port, **options) -> Engine:
        options.setdefault("sequence_bytes", 0)
        store = StoreConfig(remote=f"redis://127.0.0.1:{port}/{number}", **options)
        made.append(Engine(tiny_model(MODEL), store))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_what_one_encodes_another_answers_with(machine):
    here, there = machine(), machine()
    summary = here.encode(CHUNKS, here.head(HEAD, "X"), context=None)
    assert (summary.encoded, summary.unsent) == (3, 0)
    there.register(CHUNKS)
    answer = there.generate(PROMPT, max_tokens=8)
    assert answer.report.modules_hit == 3
    assert not answer.report.notes
    assert {part.origin.tier for part in answer.trace.parts if part.origin} == {"remote"}
    again = there.generate(PROMPT, max_tokens=8)
    assert {part.origin.tier for part in again.trace.parts if part.origin} == {"memory"}
    assert answer.text == again.text == here.generate(PROMPT, max_tokens=8).text
    assert there.encode(CHUNKS, here.head(HEAD, "X"), context=None).present == 3


def test_full_recompute_with_kv_from_elsewhere_is_full_prefill(machine):
    machine().encode(CHUNKS, context=None)
    there = machine()
    there.register(CHUNKS)
    everything = there.prefill(PROMPT, method="cacheblend", recompute_ratio=1.0)
    assert everything.report.modules_hit == 3
    logits = everything.logits.clone()
    everything.release()
    full = there.prefill(PROMPT, method="full")
    assert (logits - full.logits).abs().max() <= 1e-4
    full.release()


def test_a_tenant_sees_only_its_own(machine):
    machine(namespace="a").encode(CHUNKS, context=None)
    other = machine(namespace="b")
    other.register(CHUNKS)
    assert other.generate(PROMPT, max_tokens=1).report.modules_hit == 0


def test_what_is_only_here_is_sent_when_it_is_encoded_again(machine, tmp_path):
    with Engine(tiny_model(MODEL), StoreConfig(path=str(tmp_path))) as alone:
        alone.encode(CHUNKS, context=None)
    here, there = machine(path=str(tmp_path)), machine()
    assert here.encode(CHUNKS, context=None).present == 3
    there.register(CHUNKS)
    assert there.generate(PROMPT, max_tokens=1).report.modules_hit == 3


def test_heads_are_told_again_to_a_store_that_has_not_got_them(tmp_path):
    def engine(**options):
        return Engine(tiny_model(MODEL), StoreConfig(sequence_bytes=0, **options))

    def hits():
        with engine(remote=far) as there:
            there.register(CHUNKS)
            return there.generate(PROMPT, max_tokens=1).report.modules_hit

    far = f"file://{tmp_path}/far"
    with engine(path=str(tmp_path / "kv")) as alone:
        alone.encode(CHUNKS, alone.head(HEAD, "X"))
    with engine(path=str(tmp_path / "kv"), remote=far) as here:
        assert here.encode(CHUNKS, here.head(HEAD, "X")).present == 3
        assert hits() == 3
        shutil.rmtree(tmp_path / "far")
        here.encode(CHUNKS, here.head(HEAD, "X"))
        assert hits() == 3


def test_what_comes_from_there_is_kept_on_disk(machine, tmp_path):
    machine().encode(CHUNKS, context=None)
    there = machine(path=str(tmp_path))
    there.register(CHUNKS)
    there.generate(PROMPT, max_tokens=1)
    there.close()
    with Engine(tiny_model(MODEL), StoreConfig(path=str(tmp_path))) as later:
        assert later.generate(PROMPT, max_tokens=1).report.modules_hit == 3


def test_what_does_not_fit_into_memory_is_kept_on_disk_all_the_same(machine, tmp_path):
    machine().encode(CHUNKS, context=None)
    there = machine(path=str(tmp_path), memory_bytes=1, write_back=False)
    there.register(CHUNKS)
    there.generate(PROMPT, max_tokens=1)
    there.library.shelf._to_disk.drain()
    assert len(there.library.shelf.disk) >= 3


def test_prefetch_brings_it_before_the_prompt(machine, monkeypatch):
    machine().encode(CHUNKS, context=None)
    there = machine()
    there.register(CHUNKS)
    there.library.listen()
    there.prefetch(CHUNKS)
    there.library.shelf._prefetcher.close()
    monkeypatch.setattr(there.library.shelf, "bring", lambda *_: pytest.fail("asked again"))
    assert all(
        there.library.shelf.holds(there.library.encoded_after()[0], chunk.token_ids)
        for chunk in there.library.table
    )


def test_a_server_that_is_gone_costs_a_note_and_no_answer(machine, server):
    machine().encode(CHUNKS, context=None)
    there, alone = machine(), Engine(tiny_model(MODEL), StoreConfig(sequence_bytes=0))
    there.register(CHUNKS)
    server.kill()
    try:
        answer = there.generate(PROMPT, max_tokens=8)
    finally:
        server.start()
    assert "cannot be used now" in answer.report.notes[0]
    assert answer.report.modules_hit == 0
    assert answer.text == alone.generate(PROMPT, max_tokens=8, method="full").text
    alone.close()


def test_a_damaged_value_costs_a_note_and_no_answer(machine, server):
    import redis

    machine().encode(CHUNKS, context=None)
    for number in range(15):
        client = redis.Redis(port=server.port, db=number)
        for name in client.keys("*.raw"):
            value = bytearray(client.get(name))
            value[-9] ^= 1
            client.set(name, bytes(value))
    there = machine()
    there.register(CHUNKS)
    answer = there.generate(PROMPT, max_tokens=8)
    assert "damaged or foreign" in answer.report.notes[0]
    assert answer.report.modules_hit == 0
    assert answer.text == there.generate(PROMPT, max_tokens=8, method="full").text


def test_kv_of_other_sizes_is_not_used(machine):
    """Without `signing_key` anybody who can write there can sign, so sizes are checked, too."""
    here = machine()
    here.encode(CHUNKS[:1], context=None)
    (chunk,) = here.library.table
    behind = here.library.encoded_after()[0]
    narrow = torch.zeros(1, 2, len(chunk.token_ids), 4)
    wrong = ModuleKV(chunk.token_ids, 0, narrow, narrow.clone())
    here.library.shelf.remote.offer("", here.library.shelf.key(behind, chunk.token_ids), wrong)
    assert here.library.shelf.remote.drain() == 0
    there = machine()
    there.register(CHUNKS)
    report = there.generate(PROMPT, max_tokens=1).report
    assert "has not this model's sizes" in " ".join(report.notes)
    assert report.modules_hit == 0


def test_what_is_forgotten_is_gone_there_too(machine):
    here = machine()
    here.encode(CHUNKS, here.head(HEAD, "X"), context=None)
    assert here.forget(CHUNKS[:1]) == 1
    there = machine()
    there.register(CHUNKS)
    assert there.generate(PROMPT, max_tokens=1).report.modules_hit == 2


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_cannot_be_deleted_there_is_deleted_later(
    machine, server, tmp_path, monkeypatch, on_disk
):
    monkeypatch.setattr(transports, "_FIRST_S", 0.1)
    here = machine(path=str(tmp_path) if on_disk else None)
    here.encode(CHUNKS, context=None)
    server.kill()
    try:
        with pytest.raises(StoreError, match="may still be there"):
            here.forget(CHUNKS)
        held = [kv for tier in here.library.shelf.memory for kv in tier.held.values()]
        assert sum(kv.seq_len for kv in held) <= 1  # that of BOS
    finally:
        server.start()
    there = machine()
    there.register(CHUNKS)
    assert there.generate(PROMPT, max_tokens=1).report.modules_hit == 3  # it was not
    if on_disk:
        here.close()
        machine(path=str(tmp_path))
    else:
        while here.library.shelf.remote.pause_s:
            pass
        here.forget(CHUNKS)
    there = machine()
    there.register(CHUNKS)
    assert there.generate(PROMPT, max_tokens=1).report.modules_hit == 0


def test_kv_is_computed_where_that_is_faster(machine, server, monkeypatch):
    fast = Profile(1e-6, 0.0)
    monkeypatch.setattr("cached_rag.engine.resources.profile_of", lambda _: fast)
    texts = [f"{number} {' '.join(CHUNKS)}" for number in range(3)]
    machine().encode(texts, context=None)
    proxy = Proxy(server.port)
    there = machine(proxy.port)
    there.register(texts)
    assert (
        there.generate("\n\n".join(texts), max_tokens=1).report.modules_hit == 3
    )  # nothing is known yet
    other = "\n\n".join(reversed(texts))
    library = there.library
    for chunk in library.table:
        for behind in library.encoded_after():
            library.shelf.delete(library.shelf.key(behind, chunk.token_ids))
    report = there.generate(other, max_tokens=1).report
    assert report.modules_hit == 0
    assert "so it is computed" in report.notes[0]
    monkeypatch.setattr("cached_rag.kv.remote._FRESH_S", 0.0)  # one is tried again, not all
    assert there.generate(f"{other}\n\n", max_tokens=1).report.modules_hit == 1
    proxy.close()


def test_the_decision_follows_the_times():
    profile, link = Profile(1e-3, 0.0), Link()
    assert not refusal(profile, link, 1000)  # nothing is known
    link.note(0, 0.1)
    link.note(1000, 0.6)  # half a second for 1000 tokens
    assert not refusal(profile, link, 1000)
    assert "600 ms from the remote store, and 500 ms" in refusal(Profile(0.5e-3, 0.0), link, 1000)


def test_modules_of_schemas_are_shared(machine):
    schema = Schema.from_string(f'<schema name="s"><module name="a">{CHUNKS[0]}</module></schema>')
    prompt = schema.prompt(Import("a"), "What is it?")
    here, there = machine(), machine()
    first = here.generate(prompt, max_tokens=4)
    assert first.report.modules_missed == 1
    here.library.shelf.remote.drain()
    second = there.generate(prompt, max_tokens=4)
    assert second.report.modules_missed == 0
    assert second.text == first.text


def test_settings():
    with pytest.raises(ConfigError, match="signing_key"):
        StoreConfig(remote="redis://x", signing_key="short")
    with pytest.raises(ConfigError, match="remote_timeout"):
        StoreConfig(remote_timeout=0)
    with pytest.raises(ConfigError, match="no address"):
        Engine(tiny_model(MODEL), StoreConfig(remote="nfs://host"))
    assert "secret" not in repr(StoreConfig(remote="redis://u:secret@h", signing_key="secret" * 4))


def test_the_settings_of_both_integrations_reach_the_store(monkeypatch):
    from langchain_cached_rag import ChatCachedRAG
    from llama_index.llms.cached_rag import CachedRAGLLM

    given = []

    def shared(*_, store, **__):
        given.append(store)
        return SimpleNamespace(library=SimpleNamespace(namespace=""))

    monkeypatch.setattr(Engine, "shared", shared)
    address, secret = "redis://u:password@h", "0123456789abcdef"
    models = [
        ChatCachedRAG(model="none", remote=address, signing_key=secret),
        CachedRAGLLM(model="none", remote=address, signing_key=secret),
    ]
    for model in models:
        model.loaded_engine()
        assert "password" not in repr(model)
        assert secret not in repr(model)
    assert [(store.remote, store.signing_key) for store in given] == [(address, secret)] * 2
    other = ChatCachedRAG(model="none", remote=address, signing_key=secret + "x")
    assert other.engine_key != models[0].engine_key


def test_ingestion_says_what_it_could_not_send(server, tmp_path, monkeypatch):
    monkeypatch.setattr(transports, "_FIRST_S", 0.1)
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.3)
    (tmp_path / "docs").mkdir()
    for number, chunk in enumerate(CHUNKS):
        (tmp_path / "docs" / f"{number}.txt").write_text(chunk)
    store = StoreConfig(
        path=str(tmp_path / "index" / "kv"), remote=f"redis://127.0.0.1:{server.port}/15"
    )
    with (
        Engine(tiny_model(MODEL), store) as engine,
        CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding()) as rag,
    ):
        server.kill()
        try:
            summary = rag.ingest(tmp_path / "docs", progress=False)
        finally:
            server.start()
        assert (summary.encoded, summary.unsent >= 3) == (3, True)
        while engine.library.shelf.remote.pause_s:
            time.sleep(0.1)
        again = rag.ingest(tmp_path / "docs", progress=False)
        assert (again.encoded, again.unsent) == (0, 0)
        keys = {
            engine.library.shelf.key(engine.library.encoded_after()[0], c.token_ids)
            for c in engine.library.table
        }
        assert engine.library.shelf.remote.holds("", keys) == keys


def test_each_call_counts_what_it_could_not_send_or_compare(monkeypatch):
    monkeypatch.setattr(transports, "_FIRST_S", 60.0)
    store = StoreConfig(remote="redis://127.0.0.1:1/0", sequence_bytes=0, finish_seconds=0)
    with Engine(tiny_model(MODEL), store) as engine, engine.tenant("other") as other:
        assert engine.encode(CHUNKS, context=None).unsent == 4  # with that of BOS
        assert engine.encode(CHUNKS, context=None).unsent == 3
        tier, (kv, *_) = engine.library.shelf.remote, engine.library.shelf.memory[0].held.values()
        tier.offer("", "of another call", kv)
        assert other.encode(CHUNKS, context=None).unsent == 4
        assert tier.drain() == 1


def test_a_deletion_that_failed_there_survives_commands_without_the_store(
    machine, server, tmp_path
):
    """Whoever opens the folder without the remote store must not forget what is to go there."""
    here = machine(path=str(tmp_path))
    here.encode(CHUNKS, context=None)
    server.kill()
    try:
        with pytest.raises(StoreError, match="may still be there"):
            here.forget(CHUNKS[:1])
        here.close()
        with Engine(tiny_model(MODEL), StoreConfig(path=str(tmp_path))) as alone:
            assert alone.forget(CHUNKS[1:2]) == 1
    finally:
        server.start()
    machine(path=str(tmp_path))
    there = machine()
    there.register(CHUNKS)
    assert there.generate(PROMPT, max_tokens=1).report.modules_hit == 1


def test_deleting_something_else_finishes_what_failed(machine, server, tmp_path):
    here = machine(path=str(tmp_path))
    here.encode(CHUNKS, context=None)
    server.kill()
    try:
        with pytest.raises(StoreError):
            here.forget(CHUNKS[:1])
    finally:
        server.start()
    while here.library.shelf.remote.pause_s:
        time.sleep(0.05)
    assert here.forget(CHUNKS[1:2]) == 1
    there = machine()
    there.register(CHUNKS)
    assert there.generate(PROMPT, max_tokens=1).report.modules_hit == 1


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_deleted_while_it_is_brought_does_not_come_back(
    machine, tmp_path, monkeypatch, on_disk
):
    machine().encode(CHUNKS, context=None)
    there = machine(path=str(tmp_path) if on_disk else None)
    there.register(CHUNKS)
    fetch = there.library.shelf.remote.fetch

    def late(namespace, wanted):
        answer = fetch(namespace, wanted)
        assert answer[0] or not wanted
        there.forget(CHUNKS)
        return answer

    monkeypatch.setattr(there.library.shelf.remote, "fetch", late)
    there.generate(PROMPT, max_tokens=1)
    there.library.shelf._to_disk.drain()
    lengths = {len(there.tokenization.literal(chunk).ids) for chunk in CHUNKS}
    for tier in there.library.shelf.memory:
        assert not [kv for kv in tier.held.values() if kv.seq_len in lengths]
    if on_disk:
        assert all(size < 20_000 for size in there.library.shelf.disk.sizes().values())


def test_a_spoilt_list_of_heads_costs_a_note(machine, server):
    import redis

    machine().encode(CHUNKS, context=None)
    for number in range(15):
        client = redis.Redis(port=server.port, db=number)
        for name in client.keys("*.heads"):
            client.set(name, b"spoilt")
    there = machine()
    there.register(CHUNKS)
    report = there.generate(PROMPT, max_tokens=1).report
    assert "damaged or foreign" in report.notes[0]
    assert report.modules_hit == 3  # what stands behind no head is found without the list
    assert there.generate(PROMPT, max_tokens=1).report.notes == []


def test_kv_that_was_rounded_elsewhere_is_not_exact_without_a_disk_either(tmp_path):
    model, head = tiny_model("llama"), "Answer from the texts. "
    options = {"remote": f"file://{tmp_path}", "codec": "int8", "write_back": False}
    store = StoreConfig(keeps_repaired=False, **options)
    text = " ".join(CHUNKS * 2)
    with Engine(model, store) as engine:
        engine.encode([text], prefix=head, context=None)
    with Engine(model, store) as engine:
        engine.register([text])
        prompt = f"{head}{text} Which of these turns green?"
        request = engine.prefill(prompt, method="prefix", max_tokens=2)
        assert request.report.cached_tokens > 50
        assert request.held.exact_length == 0
        request.release()
        engine.generate(prompt, method="prefix", max_tokens=2)
        assert engine.generate(prompt, method="full", max_tokens=2).report.kept_tokens == 0
