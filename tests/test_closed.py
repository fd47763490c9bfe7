"""Whatever is asked after `close` is told so, and what to do."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, tiny_model
from test_rag import WordEmbedding

from cached_rag import CachedRAG, ClosedError, Engine, Schema, StoreConfig

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
