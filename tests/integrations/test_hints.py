"""Who comes from another class is told what its settings are called here."""

from __future__ import annotations

import re
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
from langchain_cached_rag import CachedRAGLLM as StringModel
from langchain_cached_rag import ChatCachedRAG
from llama_index.llms.cached_rag import CachedRAGLLM

from cached_rag import CachedRAG, ConfigError, Engine, GenerationConfig, options, wrap_model

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
MODELS = [ChatCachedRAG, StringModel, CachedRAGLLM]
OLLAMA = ("num_ctx", "num_predict", "keep_alive", "repeat_penalty", "num_gpu", "num_thread")
PIPELINE = ("model_id", "task", "pipeline_kwargs", "pipeline", "device_map")
LLAMA_CPP = ("model_path", "n_ctx", "n_gpu_layers", "n_threads", "n_batch")


@pytest.mark.parametrize("model", MODELS, ids=["chat", "strings", "llama_index"])
@pytest.mark.parametrize("name", [*OLLAMA, *PIPELINE, *LLAMA_CPP, "request_timeout"])
def test_a_setting_of_another_class_is_refused_with_a_hint_and_no_list(model, name):
    with pytest.raises(ValueError, match=f"unknown setting {name!r}: ") as refused:
        model(**{name: 1})
    assert options.HINTS[name] in str(refused.value)
    assert "settings are" not in str(refused.value)


def test_llama_index_says_it_of_what_langchain_takes_for_hosted_models():
    for name in ("base_url", "api_key", "timeout"):
        with pytest.raises(ConfigError, match=f"{name!r}: the model runs in this process"):
            CachedRAGLLM(**{name: "x"})
        ChatCachedRAG(**{name: "x"})
    assert CachedRAGLLM(context_window=64).context_window == 64


@pytest.mark.parametrize("model", MODELS, ids=["chat", "strings", "llama_index"])
def test_a_misspelt_setting_is_told_the_nearest_and_an_unheard_of_one_the_list(model):
    with pytest.raises(ValueError, match=r"'temprature': did you mean temperature\?"):
        model(temprature=1)
    with pytest.raises(ValueError, match=r"unknown setting 'xyz'; settings are .*max_tokens"):
        model(xyz=1)
    with pytest.raises(ConfigError, match=r"'namspace': did you mean namespace\?"):
        model().model_copy(update={"namspace": "bob"})


def test_a_misspelt_model_is_told_so(tmp_path):
    for make in (partial(CachedRAG.open, tmp_path), Engine.load):
        with pytest.raises(ConfigError, match=r"'modle': did you mean model\?"):
            make(modle="smollm2-135m")


def test_the_call_that_a_hint_names_has_all_that_it_needs():
    for name, one in signature(wrap_model).parameters.items():
        assert one.default is not one.empty or name in options.HINTS["pipeline"]


def test_a_call_says_the_same():
    with pytest.raises(ConfigError, match="'num_predict': use max_tokens=; 'tempratur': did you"):
        GenerationConfig().replace(num_predict=1, tempratur=0)


def test_the_page_has_every_hint_and_its_code_runs():
    for name in options.HINTS.keys() - {"max_model_len", "max_completion_tokens", "api_base"}:
        assert re.search(rf"\b{name}\b", PAGE), name
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        made = {}
        exec(block, made)
        assert made["llm"].temperature in (0.0, 0.2)
