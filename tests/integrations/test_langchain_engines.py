"""The engine behind LangChain's models: shared by copies, kept apart by settings, never copied."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace

import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from langchain_cached_rag import CachedRAGLLM, ChatCachedRAG
from langchain_cached_rag.settings import unwrapped
from langchain_core.load import dumps
from langchain_core.runnables import ConfigurableField

from cached_rag import ConfigError, Engine

pytestmark = pytest.mark.slow

QUESTION = f"{CHUNKS[0]}\n\nWhy?"


@pytest.fixture
def engine():
    return Engine(tiny_model("llama"), NEW_PROMPTS)


@pytest.fixture
def loads(monkeypatch):
    """The names of models, as they are loaded; all are tiny."""
    names = []

    def load(name, backend, **options):
        names.append(name)
        return tiny_model("llama")

    monkeypatch.setattr("cached_rag.engine.engine.load_backend", load)
    return names


def cached(llm):
    return llm.invoke(QUESTION).response_metadata["cached_rag"]["cached_tokens"]


def test_copies_with_other_settings_have_other_engines(loads, tmp_path):
    ann = ChatCachedRAG(model="tiny", namespace="ann", max_tokens=2, sequence_bytes=0)
    ann.encode(CHUNKS)
    assert cached(ann) > 0
    bob = ann.model_copy(update={"namespace": "bob"})
    assert bob.loaded_engine().library.namespace == "bob"
    assert cached(bob) == 0
    on_disk = ann.model_copy(update={"store": str(tmp_path)})
    assert on_disk.loaded_engine().settings.path == str(tmp_path)
    on_disk.loaded_engine().close()
    assert ann.loaded_engine().library.namespace == "ann"
    ann.namespace = "carol"
    assert ann.loaded_engine().library.namespace == "carol"
    assert cached(ann) == 0
    assert ann.loaded_engine("other").library.namespace == "carol"


def test_copies_with_the_same_settings_load_once(loads):
    llm = CachedRAGLLM(model="tiny", max_tokens=2)
    llm.namespace = "ann"
    llm.invoke("Hello", temperature=0.5)  # by a copy
    llm.invoke("Hello", seed=1)
    assert copy.copy(llm).loaded_engine() is llm.loaded_engine()
    assert loads == ["tiny"]


@pytest.mark.parametrize("kind", [ChatCachedRAG, CachedRAGLLM])
def test_calls_with_configured_fields_load_once(loads, kind):
    name = f"configured {kind.__name__}"  # an engine of another test may not be collected yet
    llm = kind(model=name, max_tokens=2)
    asked = llm.configurable_fields(temperature=ConfigurableField(id="heat"))
    for heat in (0.1, 0.2):
        asked.invoke("Hello", {"configurable": {"heat": heat}})
        gc.collect()
    assert loads == [name]
    llm.loaded_engine().close()
    again = kind(model=name, max_tokens=2)
    assert again.loaded_engine() is not llm.loaded_engine()
    assert again.invoke("Hello")
    del llm, asked, again
    gc.collect()
    assert kind(model=name).loaded_engine()
    assert loads == [name] * 3  # nothing holds what nobody has


def test_a_given_engine_is_of_its_own_namespace(engine):
    given = ChatCachedRAG(engine=engine)
    for bob in (ChatCachedRAG(engine=engine, namespace="bob"), given.model_copy()):
        bob.namespace = "bob"
        with pytest.raises(ConfigError, match=r"engine.tenant\('bob'\)"):
            bob.invoke("Hello")
    tenant = engine.tenant("bob")
    assert ChatCachedRAG(engine=tenant, namespace="bob").loaded_engine() is tenant
    tenant.close()


@pytest.mark.parametrize("kind", [ChatCachedRAG, CachedRAGLLM])
def test_what_a_given_engine_has_already_is_refused(engine, kind):
    with pytest.raises(ValueError, match="codec, dtype, store: the engine that was given"):
        kind(engine=engine, store="kv", codec="int8", dtype="float32")


def test_a_setting_of_the_store_is_a_field(loads):
    llm = ChatCachedRAG(model="tiny", first_exact=True, memory_bytes=1 << 20)
    assert llm.loaded_engine().settings.first_exact
    assert llm.loaded_engine().settings.memory_bytes == 1 << 20
    with pytest.raises(ValueError, match="no number of seconds"):
        ChatCachedRAG(model="tiny", remote_timeout=0)
    assert "first token" in ChatCachedRAG.model_fields["audit_rate"].description


@pytest.mark.parametrize("kind", [ChatCachedRAG, CachedRAGLLM])
def test_models_are_copied_and_pickled_before_and_after_they_are_used(loads, engine, kind):
    llm = kind(model="tiny", max_tokens=2, model_kwargs={"a": [1]})
    for _ in range(2):
        assert copy.deepcopy(llm).model_kwargs is not llm.model_kwargs
        assert pickle.loads(pickle.dumps(llm)).engine_key == llm.engine_key
        llm.invoke("Hello")
    for other in (copy.deepcopy(llm), llm.model_copy(deep=True)):
        assert other.loaded_engine() is llm.loaded_engine()
    assert pickle.loads(pickle.dumps(llm)).invoke("Hello")
    given = kind(engine=engine)
    assert copy.deepcopy([given, given])[1].engine is engine
    with pytest.raises(ConfigError, match="give it model="):
        pickle.dumps(given)


@pytest.mark.parametrize("kind", [ChatCachedRAG, CachedRAGLLM])
def test_a_call_of_another_model_stays_with_the_tenant_of_the_engine(loads, engine, kind):
    for tenant in ("ann", "bob"):
        llm = kind(engine=engine.tenant(tenant), max_tokens=2)
        assert llm.loaded_engine("other").library.namespace == tenant
        assert unwrapped(llm.bind(model="other")).namespace == tenant
    moved = llm.model_copy(update={"engine": engine.tenant("ann")})
    assert moved.loaded_engine().library.namespace == "ann"
    assert llm.model_copy(update={"engine": engine}).loaded_engine().library.namespace == ""


@pytest.mark.parametrize("kind", [ChatCachedRAG, CachedRAGLLM])
def test_tokens_of_a_hub_are_in_no_repr_and_no_key_of_a_cache(kind):
    llm = kind(model="tiny", model_kwargs={"token": "hf_secret", "subfolder": "a"})
    assert "hf_secret" not in repr(llm) + str(llm._identifying_params) + dumps(llm)
    assert llm._identifying_params["model_kwargs"] == {"subfolder": "a"}


def test_copies_of_another_model_have_its_context_length(monkeypatch):
    sizes = {"small": "llama", "large": "qwen2"}
    monkeypatch.setattr(
        "cached_rag.engine.engine.load_backend",
        lambda name, backend, **_: replace(
            tiny_model(sizes[name]), context_length=512 if name == "small" else 1024
        ),
    )
    large = ChatCachedRAG(model="large", max_tokens=2)
    if getattr(large, "profile", None) is None:
        pytest.skip("langchain-core has none before 1.1")
    small = large.model_copy(update={"model": "small"})
    for llm, length in ((small, 512), (large, 1024)):
        llm.invoke("Hello")
        assert (llm.profile["name"], llm.profile["max_input_tokens"]) == (llm.model_name, length)
    assert small.profile["max_input_tokens"] == 512


def test_the_context_length_of_a_given_engine_is_known_at_once(engine):
    llm = ChatCachedRAG(engine=engine)
    profile = getattr(llm, "profile", None)  # langchain-core has none before 1.1
    assert profile is None or profile["max_input_tokens"] == 1024
