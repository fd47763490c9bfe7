"""What models of frameworks have in common: settings, the engine behind them, texts."""

from __future__ import annotations

import pickle

import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from langchain_cached_rag import CachedRAGLLM as StringModel
from langchain_cached_rag import ChatCachedRAG
from llama_index.llms.cached_rag import CachedRAGLLM

from cached_rag import CachedRAG, ConfigError, Engine
from cached_rag.spi import (
    CALL_SETTINGS,
    GENERATION_SETTINGS,
    FrameworkModel,
    Learner,
    call_options,
    new_call_id,
)


class Plain(FrameworkModel):
    name: str = "tiny"

    @property
    def _named(self):
        return self.name

    def encode(self, texts):
        return self.loaded_engine().encode(texts)


@pytest.fixture
def engine():
    return Engine(tiny_model("llama"), NEW_PROMPTS)


def test_settings_become_those_of_an_answer():
    llm = Plain(max_tokens=3, stop="END")
    config = llm.answer_config({"temperature": 0.5, "max_tokens": None, "timeout": 3})
    assert (config.max_tokens, config.temperature, config.stop) == (3, 0.5, ("END",))
    assert set(GENERATION_SETTINGS) <= Plain.model_fields.keys()
    assert CALL_SETTINGS.isdisjoint(Plain.model_fields)
    with pytest.raises(ConfigError, match="did you mean max_tokens"):
        Plain(max_token=3)
    assert call_options({"seed": None, "max_tokens": None}) == {"seed": None}


def test_copies_share_an_engine_that_was_given(engine):
    llm = Plain(engine=engine, name="llama")
    for copied in (llm.model_copy(update={"max_tokens": 2}, deep=True), llm.model_copy()):
        assert copied.loaded_engine() is engine
    Learner(llm, "eager").learn(CHUNKS)
    assert engine.encode(CHUNKS).encoded == 0
    with pytest.raises(ConfigError, match="codec, model: the engine that was given"):
        Plain(engine=engine, name="other", codec="int8")
    assert pickle.loads(pickle.dumps(llm)).engine is None
    assert new_call_id() != new_call_id()


def test_an_index_is_of_the_tenant_of_its_engine(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "cached_rag.engine.engine.load_backend", lambda *_, **__: tiny_model("llama")
    )
    bob = engine.tenant("bob")
    assigned = ChatCachedRAG(model="llama", max_tokens=2)
    assigned.engine = bob
    with CachedRAG.open(tmp_path, engine=bob) as rag:
        for llm in (assigned, ChatCachedRAG(engine=rag), CachedRAGLLM(engine=rag)):
            assert llm.loaded_engine("other").library.namespace == "bob"
            assert llm.model_dump()["namespace"] == "bob"
            assert llm.engine_key == ChatCachedRAG(engine=bob).engine_key
    assigned.engine = None
    assert assigned.loaded_engine().library.namespace == "bob"
    with CachedRAG.open(tmp_path / "new", "no-such-model") as unloaded:
        assert ChatCachedRAG(engine=unloaded).loaded_engine("other").library.namespace == ""
        assert unloaded.loaded is None


def test_texts_are_held_and_forgotten(engine):
    llm = Plain(engine=engine, name="llama")
    llm.encode(CHUNKS)
    assert llm.hold(CHUNKS[:2], pinned=True) == 2
    llm.forget(CHUNKS[:1])
    assert llm.hold(CHUNKS[:2], ttl_seconds=3600) == 1


@pytest.mark.parametrize("asked", ["encode", "register", "prefetch", "order", "forget", "hold"])
def test_a_text_that_is_no_list_is_not_taken_for_its_letters(engine, asked):
    models = [Plain(engine=engine, name="llama")]
    models += [kind(engine=engine) for kind in (ChatCachedRAG, StringModel, CachedRAGLLM)]
    for llm in models:
        with pytest.raises(ConfigError, match=r"give a single one as a list, \[text\]"):
            getattr(llm, asked)(CHUNKS[0])
        getattr(llm, asked)(iter(CHUNKS))
