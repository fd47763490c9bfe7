"""Names to models: what cannot be found or used says so."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from cached_rag import ConfigError, ModelError, ModelNotFoundError, load_model, wrap_model
from cached_rag.backends.resolve import file_digest, resolve
from cached_rag.backends.transformers.loading import parse_dtype


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-such-owner/no-such-model", "Give a Hugging Face id"),
        ("./nowhere", "no model folder"),
        ("weights.gguf", "no GGUF file"),
    ],
)
def test_unknown_models_say_what_to_give_instead(name, reason):
    with pytest.raises(ModelNotFoundError, match=reason):
        load_model(name)


def test_a_folder_without_configuration_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_models_with_recurrent_layers_are_refused():
    sizes = {"vocab_size": 240, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))
    with pytest.raises(ModelError):
        wrap_model(model, tiny_tokenizer(), name="mamba", revision="x")


def test_slow_tokenizers_are_refused():
    slow = type("Slow", (), {"is_fast": False})()
    with pytest.raises(ModelError, match="fast tokenizer"):
        wrap_model(tiny_model("llama").decoder.model, slow, name="x", revision="x")


@pytest.mark.parametrize("dtype", ["int8", "float99", torch.int64])
def test_bad_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="is not one of"):
        parse_dtype(dtype)


def test_fingerprints_tell_models_and_settings_apart():
    found = {tiny_model(family).fingerprint for family in FAMILIES}
    assert len(found) == len(FAMILIES)


def test_digests_follow_content_and_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    first = file_digest(file)
    assert file_digest(file) == first
    file.write_bytes(b"three")
    assert file_digest(file) != first
    assert len(list((tmp_path / "cache" / "digests").iterdir())) == 2
