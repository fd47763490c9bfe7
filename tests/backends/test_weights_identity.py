"""KV never outlives the weights that made it: a model is known by what it computes with."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch
from conftest import CHUNKS
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM

from cached_rag import Engine
from cached_rag.backends.resolve import cache_dir
from cached_rag.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
CPU = {"dtype": "float32", "device": "cpu"}
ASK = f"{CHUNKS[0]}\n\nWho lit the lamp?"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CODE = """
from torch import nn
from transformers import LlamaForCausalLM
from .own_sizes import FACTOR, Sizes
class Head(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * FACTOR
class Own(LlamaForCausalLM):
    config_class = Sizes
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
"""
SIZES = """
from transformers import LlamaConfig
class Sizes(LlamaConfig):
    model_type = "own"
"""


def logits(engine):
    done = engine.prefill(ASK, method="full", max_tokens=1)
    done.release()
    return done.logits.clone()


def load(folder, **options):
    return Engine.load(str(folder), **CPU, **options)


def known(folder, **options):
    with load(folder, **options) as engine:
        return engine.model.fingerprint


@pytest.fixture
def folder(tmp_path, model_folder):
    return shutil.copytree(model_folder, tmp_path / "model")


def negated(path):
    """Other weights in a file of the same size."""
    tensors = load_file(path)
    save_file({name: -values for name, values in tensors.items()}, path, metadata={"format": "pt"})


def index_to(folder, place):
    names = load_file(folder / place)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, place)})
    )


@pytest.mark.parametrize("place", ["shards/a.safetensors", "../elsewhere/a.safetensors"])
def test_weights_are_told_apart_wherever_an_index_names_them(folder, place):
    (folder / place).parent.mkdir()
    (folder / WEIGHTS).rename(folder / place)
    index_to(folder, place)
    before = known(folder)
    assert known(folder) == before
    negated(folder / place)
    assert known(folder) != before


def test_weights_are_told_apart_if_the_index_names_other_ones(folder):
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    negated(folder / "b.safetensors")
    index_to(folder, "a.safetensors")
    before = known(folder)
    index_to(folder, "b.safetensors")
    assert known(folder) != before


def test_weights_are_told_apart_in_a_subfolder(folder):
    shutil.copytree(folder, folder / "inner")
    before = known(folder, model_kwargs={"subfolder": "inner"})
    negated(folder / "inner" / WEIGHTS)
    assert known(folder, model_kwargs={"subfolder": "inner"}) != before


def test_pickled_weights_are_told_apart(folder):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    before = known(folder)
    torch.save({name: -values for name, values in tensors.items()}, folder / "pytorch_model.bin")
    assert known(folder) != before


def test_a_file_that_loading_does_not_read_changes_nothing(folder):
    before = known(folder)
    save_file({"other": torch.ones(3)}, folder / "training_state.safetensors")
    (folder / "README.md").write_text("A model.")
    assert known(folder) == before


def test_an_adapter_among_a_models_files_is_refused(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    with pytest.raises(ModelError, match=r"adapter_config\.json is among .*adapter="):
        load(folder)


def test_code_that_comes_with_a_model_is_part_of_what_it_is(folder, monkeypatch):
    """Also code that its code imports, which no configuration names."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own.Own", "AutoConfig": "own_sizes.Sizes"}
    config |= {"architectures": ["Own"], "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(config))
    found = []
    for factor in (1.0, 3.0):
        (folder / "own.py").write_text(CODE)
        (folder / "own_sizes.py").write_text(f"{SIZES}FACTOR = {factor}\n")
        with load(folder, model_kwargs={"trust_remote_code": True}) as engine:
            found.append((engine.model.fingerprint, logits(engine)))
    (first, one), (second, other) = found
    assert not torch.allclose(one, other)
    assert first != second
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("the terminal is asked"))
    with pytest.raises(ModelError, match=r'model_kwargs={"trust_remote_code": True}'):
        load(folder)


def test_what_is_written_over_a_models_file_does_not_change_a_running_model(folder):
    """`dtype` is the file's: else transformers would have copied the weights."""
    with load(folder) as engine:
        before = logits(engine)
        data = (folder / WEIGHTS).read_bytes()
        with (folder / WEIGHTS).open("r+b") as file:  # in place: the same file for who mapped it
            file.seek(len(data) // 2)
            file.write(bytes(len(data) // 4))
        assert torch.equal(logits(engine), before)
        os.truncate(folder / WEIGHTS, 0)  # would end a process that reads it by a map
        assert torch.equal(logits(engine), before)


@pytest.mark.parametrize("backend", ["transformers", "llama.cpp"])
def test_a_running_gguf_does_not_change_with_its_file(tmp_path, backend):
    file = write_gguf(tmp_path / "tiny.gguf")
    with Engine.load(str(file), backend=backend, device="cpu") as engine:
        before = logits(engine)
        os.truncate(file, 0)
        assert torch.equal(logits(engine), before)


@pytest.mark.parametrize(
    ("backend", "kind"), [("transformers", "models"), ("llama.cpp", "tokenizers")]
)
def test_what_was_made_of_a_gguf_is_made_anew_if_it_is_damaged(
    tmp_path, monkeypatch, caplog, backend, kind
):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf")
    with Engine.load(str(file), backend=backend, device="cpu") as engine:
        before = logits(engine)
    found = (cache_dir() / kind).rglob("*.*")
    largest = max(found, key=lambda path: path.stat().st_size if path.is_file() else 0)
    times = largest.stat()
    with largest.open("r+b") as opened:
        opened.seek(times.st_size // 2)
        opened.write(bytes(4096))
    os.utime(largest, ns=(times.st_atime_ns, times.st_mtime_ns))
    with (
        caplog.at_level(logging.WARNING),
        Engine.load(str(file), backend=backend, device="cpu") as engine,
    ):
        assert torch.equal(logits(engine), before)
    assert "is damaged, and is made anew" in caplog.text


def test_two_files_of_the_same_weights_share_kv(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert known(folder) == known(tmp_path / "copy")
