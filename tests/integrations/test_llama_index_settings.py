"""What a CachedRAGLLM is loaded by: copies, assignments, pickles, saved settings."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model, tiny_tokenizer
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.cached_rag import CachedRAGLLM
from pydantic import ValidationError

from cached_rag import CachedRAG, ConfigError, Engine, wrap_model

KEY = "0123456789abcdef"
ASKED = f"{CHUNKS[0]}\n\nWhy?"


@pytest.fixture
def loads(monkeypatch):
    found = []

    def load(name, backend, **options):
        found.append(name)
        decoder = tiny_model("llama").decoder.model
        return wrap_model(decoder, tiny_tokenizer(), name=name, revision=name)

    monkeypatch.setattr("cached_rag.engine.engine.load_backend", load)
    return found


def cached(llm):
    return llm.complete(ASKED).raw["cached_rag"]["cached_tokens"]


@pytest.mark.parametrize("assigned", [False, True])
def test_tenants_share_no_kv_however_they_are_made(loads, assigned):
    ann = CachedRAGLLM(model="a", namespace="ann", max_tokens=1, sequence_bytes=0)
    ann.encode(CHUNKS)
    assert cached(ann) > 0
    if assigned:
        bob = ann
        bob.namespace = "bob"
    else:
        bob = ann.model_copy(update={"namespace": "bob"})
    assert bob.loaded_engine().library.namespace == "bob"
    assert cached(bob) == 0


def test_a_copy_with_another_model_answers_with_it(loads):
    one = CachedRAGLLM(model="a", max_tokens=1)
    one.complete("x")
    other = one.model_copy(update={"model": "b"})
    assert other.complete("x").raw["model"] == other.loaded_engine().model.name == "b"
    assert other.messages_to_prompt.llm is other
    assert one.loaded_engine().model.name == "a"
    again = one.model_copy(update={"max_tokens": 2})
    assert again.loaded_engine() is one.loaded_engine()
    assert loads == ["a", "b"]


def test_settings_of_an_engine_that_was_given_are_its_own(engine, tmp_path):
    llm = CachedRAGLLM(engine=engine, max_tokens=1)
    assert llm.model_copy(update={"max_tokens": 2}).loaded_engine() is engine
    with pytest.raises(ConfigError, match="namespace='bob' was set, and the engine that was given"):
        llm.model_copy(update={"namespace": "bob"}).complete("x")
    with pytest.raises(ConfigError, match="codec, model: the engine that was given"):
        llm.model_copy(update={"model": "b", "codec": "int8"}).complete("x")
    with CachedRAG.open(tmp_path, engine=engine) as rag:
        of_index = CachedRAGLLM(engine=rag, max_tokens=1)
        assert of_index.metadata.model_name == rag.settings["model"] == "llama"
        assert of_index.loaded_engine() is engine
    with pytest.raises(ValidationError, match="an instance of Engine"):
        CachedRAGLLM(engine=engine.model)


def test_a_given_engine_is_of_its_own_namespace(engine, tmp_path):
    with CachedRAG.open(tmp_path, engine=engine) as rag:
        for given in (engine, rag):
            bob = CachedRAGLLM(engine=given, namespace="bob", max_tokens=1)
            with pytest.raises(ConfigError, match=r"give engine.tenant\('bob'\)"):
                bob.complete("x")
    with engine.tenant("bob") as tenant:
        for llm in (CachedRAGLLM(engine=tenant), CachedRAGLLM(engine=tenant, namespace="bob")):
            assert llm.loaded_engine() is tenant
            assert llm.to_dict()["namespace"] == pickle.loads(pickle.dumps(llm)).namespace == "bob"


def test_what_a_given_engine_has_already_is_refused(engine):
    with pytest.raises(ConfigError, match="codec, dtype, store: the engine that was given"):
        CachedRAGLLM(engine=engine, store="kv", codec="int8", dtype="float32")


def test_a_setting_of_the_store_is_a_field(loads):
    llm = CachedRAGLLM(model="a", first_exact=True)
    assert llm.loaded_engine().settings.first_exact
    with pytest.raises(ConfigError, match="no number of seconds"):
        CachedRAGLLM(model="a", remote_timeout=0)


def test_deep_copies_share_the_engine(loads, engine):
    llm = CachedRAGLLM(model="a", max_tokens=1, model_kwargs={"a": [1]})
    llm.complete("x")
    for one in (copy.deepcopy(llm), llm.model_copy(deep=True)):
        assert one.loaded_engine() is llm.loaded_engine()
        assert one.model_kwargs is not llm.model_kwargs
        assert one.messages_to_prompt.llm is one
    other = llm.model_copy(update={"model": "b"}, deep=True)
    assert other.complete("x").raw["model"] == other.messages_to_prompt.llm.model == "b"
    given = CachedRAGLLM(engine=engine)
    assert copy.deepcopy(given).loaded_engine() is engine
    assert given.model_copy(update={"max_tokens": 2}, deep=True).loaded_engine() is engine


def test_pickling_leaves_an_llm_as_it_was(loads, caplog):
    llm = CachedRAGLLM(model="a", namespace="ann", max_tokens=3, signing_key=KEY)
    asked = [ChatMessage(content="x")]
    prompt, engine = llm.messages_to_prompt(asked), llm.loaded_engine()
    back = pickle.loads(pickle.dumps(llm))
    assert llm.messages_to_prompt(asked) == back.messages_to_prompt(asked) == prompt
    assert llm.loaded_engine() is engine
    assert (back.model, back.namespace, back.max_tokens) == ("a", "ann", 3)
    assert back.signing_key.get_secret_value() == KEY
    assert not caplog.records  # nothing was left out that another process lacks
    own = CachedRAGLLM(model="a", messages_to_prompt=str)
    assert pickle.loads(pickle.dumps(own)).messages_to_prompt is str


def test_pickling_says_that_a_given_engine_stays(caplog):
    pickle.dumps(CachedRAGLLM(engine=Engine(tiny_model("llama"), NEW_PROMPTS)))
    assert "an engine is not pickled: elsewhere 'llama' is loaded by name" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("signing_key", KEY),
        ("remote", f"redis://ann:{KEY}@store:6379"),
        ("model_kwargs", {"token": KEY, "subfolder": "a"}),
    ],
)
def test_saved_settings_never_have_a_secret(name, value):
    llm = CachedRAGLLM(model="a", **{name: value})
    saved = llm.to_json()
    assert KEY not in saved + repr(llm) + str(llm.to_dict())
    with pytest.raises(ValueError, match=rf"saved without secrets, as {name} is or has one"):
        CachedRAGLLM.from_json(saved)
    back = CachedRAGLLM.from_dict(json.loads(saved), **{name: value})
    assert getattr(back, name) == getattr(llm, name)
    for open_ in (
        {"remote": "redis://store:6379"},
        {"model_kwargs": {"subfolder": "a"}},
        {"model_kwargs": {"token": False}},
        {"model_kwargs": {"token": None}},
    ):
        assert CachedRAGLLM.from_json(CachedRAGLLM(model="a", **open_).to_json())
    assert CachedRAGLLM.from_json(CachedRAGLLM(model="a").to_json()).signing_key is None
