"""Names to models: what cannot be found or used says so."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, NEW_PROMPTS, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from cached_rag import ConfigError, Engine, load_model, wrap_model
from cached_rag.backends.machine import parse_dtype
from cached_rag.backends.resolve import file_digest, resolve
from cached_rag.errors import ModelError, ModelNotFoundError


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-such-owner/no-such-model", "Give a Hugging Face id"),
        ("./nowhere", "no model folder"),
        ("weights.gguf", "no GGUF file"),
        ("smollm2-135n", "did you mean 'smollm2-135m'"),
        ("SmolLM2-135M", "did you mean 'smollm2-135m'"),
    ],
)
def test_unknown_models_say_what_to_give_instead(name, reason):
    with pytest.raises(ModelNotFoundError, match=reason):
        load_model(name)


def test_a_folder_without_configuration_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json; a model folder needs one$"):
        resolve(str(tmp_path))
    (tmp_path / "q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"path of a GGUF file in it: q4\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"give it as adapter="):
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
    kept = list((tmp_path / "cache" / "digests").iterdir())
    assert len(kept) == 2
    second = file_digest(file)
    for memo in kept:
        memo.write_text("[]")  # damaged
    assert file_digest(file) == second


@pytest.mark.parametrize("keeps_ctime", [True, False])
def test_other_weights_of_equal_size_and_time_have_another_digest(
    tmp_path, monkeypatch, keeps_ctime
):
    """One byte where the time of change is kept; else other weights, by what is sampled."""
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(bytes(1_000_000))
    before = file.stat()
    if not keeps_ctime:
        stat, names = type(file).stat, ("st_size", "st_mtime_ns", "st_mode", "st_ino", "st_dev")
        kept = SimpleNamespace(st_ctime_ns=0, **{name: getattr(before, name) for name in names})
        monkeypatch.setattr(
            type(file), "stat", lambda path, **o: kept if path == file else stat(path, **o)
        )
    first = file_digest(file)
    with file.open("r+b") as opened:  # the same inode
        opened.seek(5000)
        opened.write(b"x" if keeps_ctime else b"x" * 995_000)
    after = before
    while keeps_ctime and after.st_ctime_ns == before.st_ctime_ns:  # until its clock has ticked
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert file_digest(file) != first


def test_yarn_stretches_the_context_beyond_what_its_config_says():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 600}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rope["rope_theta"] = 10_000.0
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **sizes, rope_parameters=rope)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model = wrap_model(plain, tiny_tokenizer(), name="yarn", revision="1")
    with Engine(model, NEW_PROMPTS) as engine:
        assert engine.model.context_length == 256
        long = "Why is copper green? " * 12
        ids = engine.tokenization.tokenize(engine.tokenization.template.render(long)).ids
        assert 64 < len(ids) < 240
        answer = engine.generate(long, method="full", max_tokens=4, ignore_eos=True, drafts=False)
        wanted = plain.generate(
            torch.tensor([ids]), max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
        assert list(answer.token_ids) == wanted[0, len(ids) :].tolist()


def test_defaults_of_a_model_that_are_not_followed_are_said(caplog):
    config = AutoConfig.for_model("llama", **FAMILIES["llama"][1])
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wrap_model(plain, tiny_tokenizer(), name="plain", revision="1")
    assert caplog.text == ""
    plain.generation_config.no_repeat_ngram_size = 2
    wrap_model(plain, tiny_tokenizer(), name="plain", revision="1")
    assert "plain asks for {'no_repeat_ngram_size': 2} in its generation_config" in caplog.text
    plain.generation_config.repetition_penalty = 2
    assert wrap_model(plain, tiny_tokenizer(), name="x", revision="1").repetition_penalty == 2.0
    for wrong in (-1.0, "x", [1]):
        plain.generation_config.repetition_penalty = wrong
        with pytest.raises(ModelError, match=r"repetition_penalty of .* number above 0"):
            wrap_model(plain, tiny_tokenizer(), name="plain", revision="1")
