"""Whatever is asked after `close` is told so, and what to do."""

from __future__ import annotations

import threading
import time

import pytest
from conftest import CHUNKS, tiny_model
from doubles import Recording
from indexes import WordEmbedding

from cached_rag import CachedRAG, Engine, Schema, StoreConfig
from cached_rag.errors import ClosedError

SCHEMA = '<schema name="s"><module name="m">A module about the keeper of a lamp.</module></schema>'
ASKED = {
    "ask": lambda rag: rag.ask("copper?"),
    "stream": lambda rag: rag.stream("copper?"),
    "search": lambda rag: rag.search("copper?"),
    "ingest": lambda rag: rag.ingest(".", progress=False),
    "delete": lambda rag: rag.delete("docs/a.txt"),
    "documents": lambda rag: rag.documents(),
}
DONE = {
    "generate": lambda engine: engine.generate("copper?"),
    "batch": lambda engine: engine.generate_batch(["copper?"]),
    "prefill": lambda engine: engine.prefill("copper?"),
    "encode": lambda engine: engine.encode(CHUNKS, context=None),
    "register": lambda engine: engine.register(CHUNKS),
    "prefetch": lambda engine: engine.prefetch(CHUNKS),
    "forget": lambda engine: engine.forget(CHUNKS),
    "schema": lambda engine: Schema.from_string(SCHEMA).encode(engine),
}


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_closed_index(what, is_loaded, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(CHUNKS[1])
    store = StoreConfig(path=str(tmp_path / "index" / "kv"))
    rag = CachedRAG.open(
        tmp_path / "index", engine=Engine(tiny_model("llama"), store), embedding=WordEmbedding()
    )
    rag.ingest(tmp_path / "docs", progress=False)
    rag.close()
    if not is_loaded:
        monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("a model was loaded"))
        rag = CachedRAG.open(tmp_path / "index", embedding=WordEmbedding())
        rag.close()
    rag.close()  # again changes nothing
    with pytest.raises(ClosedError, match="was closed; open"):
        ASKED[what](rag)


@pytest.mark.parametrize("what", DONE)
@pytest.mark.parametrize("path", [None, "kv"])
def test_a_closed_engine(what, path, tmp_path):
    engine = Engine(tiny_model("llama"), StoreConfig(path=path and str(tmp_path / path)))
    engine.encode(CHUNKS[:1], context=None)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError, match=r"llama.* was closed; make another"):
        DONE[what](engine)


def test_a_closed_tenant_leaves_the_others_open():
    engine = Engine(tiny_model("llama"), StoreConfig())
    tenant = engine.tenant("one")
    tenant.close()
    with pytest.raises(ClosedError):
        tenant.generate("copper?", max_tokens=2)
    assert engine.generate("copper?", max_tokens=2).token_ids


class Slow(Recording):
    """Tells when it begins to prefill, and waits until it may go on."""

    def __init__(self, model):
        super().__init__(model)
        self.began, self.goes_on = threading.Event(), threading.Event()

    def prefill(self, *args, **options):
        self.began.set()
        assert self.goes_on.wait(60)
        return self.model.prefill(*args, **options)


def test_closing_ends_an_answer_that_is_just_being_prefilled():
    slow, found = Slow(tiny_model("llama")), []
    engine = Engine(slow, StoreConfig(write_back=False))
    ask = lambda: found.append(engine.generate("Who?", max_tokens=400, ignore_eos=True))  # noqa: E731
    asking = threading.Thread(target=ask)
    asking.start()
    assert slow.began.wait(60)
    engine.close(finish_seconds=0.1)
    slow.goes_on.set()
    asking.join(60)
    assert found[0].finish_reason == "cancelled"
    assert len(found[0].token_ids) < 10


def test_what_an_answer_leaves_is_kept_when_its_engine_is_closed_elsewhere(tmp_path):
    settings = StoreConfig(tmp_path, sequence_bytes=1 << 24)
    engine = Engine(tiny_model("llama"), settings)
    stream = engine.stream("Who keeps the lamp?" * 30, max_tokens=400, ignore_eos=True)
    asking = threading.Thread(target=lambda: list(stream))
    asking.start()
    while len(stream.token_ids) < 9:
        time.sleep(0.01)
    engine.close()
    asking.join(60)
    assert stream.finish_reason == "cancelled"
    with Engine(tiny_model("llama"), settings) as again:
        assert again.generate("Who keeps the lamp?" * 30, max_tokens=2).report.kept_tokens > 9


def test_closing_a_tenants_engine_ends_its_answers_and_no_others():
    with Engine(tiny_model("llama"), StoreConfig(write_back=False)) as engine:
        tenant = engine.tenant("a")
        options = {"max_tokens": 50, "ignore_eos": True}
        streams = [one.stream("Who keeps the lamp?", **options) for one in (engine, tenant)]
        for stream in streams:
            next(stream)
        tenant.close()
        assert [len(stream.result().token_ids) == 50 for stream in streams] == [True, False]
        assert streams[1].finish_reason == "cancelled"


def test_a_stream_that_is_begun_after_closing_says_so():
    engine = Engine(tiny_model("llama"), StoreConfig(write_back=False))
    stream = engine.stream("Who?")
    engine.close()
    with pytest.raises(ClosedError):
        stream.result()
