"""Model files that are broken, or made to break who reads them: one kind of error, and no work."""

from __future__ import annotations

import json
import pickle
import shutil
import struct

import pytest
import torch
from conftest import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf

from cached_rag import load_model
from cached_rag.backends.llama_cpp.loading import load_llama_cpp
from cached_rag.backends.transformers.loading import load_tokenizer
from cached_rag.backends.untrusted import check_counts, judged
from cached_rag.errors import ModelError


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    tiny_model("llama").decoder.model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(sound, tmp_path / "model")


CONFIGS = {
    "layers": {"num_hidden_layers": 10**9},
    "layers as a float": {"num_hidden_layers": 1e9},
    "labels": {"num_labels": 10**9},
    "layers inside": {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
    "layers of images": {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 10**9}},
    "experts": {"model_type": "mixtral", "num_local_experts": 10**9},
    "layers of GPT-2": {"model_type": "gpt2", "n_layer": 10**9},
    "width": {"hidden_size": 10**9},
    "width beyond 64 bits": {"hidden_size": 10**30},
    "vocabulary": {"vocab_size": 10**12},
    "no heads": {"num_attention_heads": 0},
    "negative": {"vocab_size": -1, "hidden_size": -64},
    "words": {"hidden_size": "wide", "num_hidden_layers": "many"},
    "nothing": {"hidden_size": None},
    "lists": {"num_hidden_layers": [4], "rope_parameters": []},
    "no such activation": {"hidden_act": "none such"},
    "no such kind": {"model_type": ["llama"]},
    "no such rotation": {"rope_parameters": {"rope_type": "none such", "rope_theta": "x"}},
    "no such dtype": {"dtype": "float7"},
}


@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_of_other_numbers_is_a_model_error(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError):
        load_model(str(folder), device="cpu")


FILES = {
    "config.json": [b"", b"[]", b"3", b"{", b"[" * 100_000, b"\xff\xfe", b'{"a": 1}'],
    "tokenizer.json": [b"", b"[]", b"{}", b"[" * 100_000, b'{"model": {"type": "BPE"}}', b"\xff"],
    "tokenizer_config.json": [
        b"[]",
        b"{",
        b'{"tokenizer_class": 3}',
        b'{"added_tokens_decoder":3}',
    ],
    "generation_config.json": [b"[]", b'{"eos_token_id": "x"}'],
    "model.safetensors": [
        b"",
        b"\xff" * 8,
        (1 << 60).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        b"noise " * 1000,
    ],
}
BROKEN = [(name, data) for name, contents in FILES.items() for data in contents]


@pytest.mark.parametrize(("name", "data"), BROKEN, ids=[f"{n} {d[:12]!r}" for n, d in BROKEN])
def test_a_broken_file_is_a_model_error(folder, name, data):
    (folder / name).write_bytes(data)
    with pytest.raises(ModelError, match="model"):
        load_model(str(folder), device="cpu")
    if name == "tokenizer.json":
        with pytest.raises(ModelError):
            load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "index",
    [
        [],
        {},
        {"weight_map": 3},
        {"weight_map": {"lm_head.weight": "gone.safetensors"}},
        {"weight_map": {"lm_head.weight": "/etc/passwd"}},
        {"weight_map": {"lm_head.weight": 3}},
        {"weight_map": {"lm_head.weight": "../" * 20 + "dev/zero"}},
    ],
)
def test_an_index_of_weights_that_are_not_there_is_a_model_error(folder, index):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError):
        load_model(str(folder), device="cpu")


class Command:
    def __reduce__(self):
        return (open, ("opened-by-a-pickle", "w"))


@pytest.mark.parametrize("data", [pickle.dumps(Command()), b"noise", b"", b"PK\x03\x04"])
def test_pickled_weights_are_not_run(folder, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ModelError):
        load_model(str(folder), device="cpu")
    torch.save({"lm_head.weight": Command()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model(str(folder), device="cpu")
    assert not (tmp_path / "opened-by-a-pickle").exists()


def test_weights_of_no_numbers_are_a_model_error(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: one[:0].clone() for name, one in weights.items()}, folder / "model.safetensors"
    )
    with pytest.raises(ModelError):
        load_model(str(folder), device="cpu")


# GGUF --------------------------------------------------------------------------------------------


def _text(text):
    return struct.pack("<Q", len(text)) + text.encode()


def _list(kind, count, data=b""):
    return _text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, kind, count) + data


def _head(fields, tensors=0):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields)) + b"".join(fields)


def _tensor(shape, kind=0):
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text("token_embd.weight") + sizes + struct.pack("<IQ", kind, 0)


ARCHITECTURE = _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
LAYERS = _text("llama.block_count") + struct.pack("<II", 4, 10**9)
GGUFS = {
    "a list of 2^60 numbers": _head([ARCHITECTURE, _list(6, 1 << 60)]),
    "a list of 2^60 texts": _head([ARCHITECTURE, _list(8, 1 << 60)]),
    "a list of 2^60 lists": _head([ARCHITECTURE, _list(9, 1 << 60)]),
    "lists in lists": _head([ARCHITECTURE, _list(9, 1, struct.pack("<IQ", 9, 1) * 5000)]),
    "a list longer than any": _head([_list(0, 1 << 23, bytes(1 << 23))]),
    "2^60 fields": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + ARCHITECTURE,
    "2^60 tensors": _head([ARCHITECTURE], 1 << 60) + bytes(100),
    "a name of 2^60 letters": _head([struct.pack("<Q", 1 << 60)]),
    "10^9 layers": _head([ARCHITECTURE, LAYERS]),
    "a tensor larger than the file": _head([ARCHITECTURE], 1) + _tensor([1 << 40]),
    "a tensor of 2^32 axes": _head([ARCHITECTURE], 1) + _text("a") + b"\xff" * 100,
    "a tensor of no kind": _head([ARCHITECTURE], 1) + _tensor([4], kind=999) + bytes(100),
    "a tensor whose size overflows": _head([ARCHITECTURE], 1) + _tensor([1 << 32] * 2) + bytes(99),
    "a field of no kind": _head([_text("a") + struct.pack("<I", 99)]) + bytes(100),
    "nothing": b"",
    "a mark": b"GGUF",
    "another version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "noise": b"noise" * 1000,
}


@pytest.mark.parametrize("data", GGUFS.values(), ids=GGUFS)
@pytest.mark.parametrize("load", [load_model, load_llama_cpp, load_tokenizer])
def test_a_hostile_gguf_is_a_model_error(tmp_path, monkeypatch, load, data):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="cannot"):
        load(str(path))


def experts(writer, count, used, groups, used_groups):
    writer.add_expert_count(count)
    writer.add_expert_used_count(used)
    writer.add_expert_group_count(groups)
    writer.add_expert_group_used_count(used_groups)


FIELDS = {
    "more experts than llama.cpp has room for": lambda w: w.add_expert_count(1000),
    "more experts in use than there are": lambda w: w.add_expert_used_count(5),
    "experts and none in use": lambda w: w.add_expert_count(4),
    "groups of no experts": lambda w: w.add_expert_group_count(2),
    "groups that experts do not fill": lambda w: experts(w, 4, 2, 3, 1),
    "groups of experts and none in use": lambda w: experts(w, 4, 2, 2, 0),
    "all groups of experts in use": lambda w: experts(w, 4, 2, 2, 2),
    "as many groups as experts": lambda w: experts(w, 4, 2, 4, 1),
    "a rotation wider than heads": lambda w: w.add_rope_dimension_count(10**6),
    "keys of no width": lambda w: w.add_key_length(0),
}


@pytest.mark.parametrize("add", FIELDS.values(), ids=FIELDS)
def test_fields_that_do_not_fit_end_no_process(tmp_path, monkeypatch, add):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError):
        load_llama_cpp(str(write_gguf(tmp_path / "tiny.gguf", add=add)), threads=1)


def test_tensors_that_overlap_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "overlapping.gguf"
    data = b"".join(
        _text(f"blk.{n}.attn_q.weight") + struct.pack("<IQIQ", 1, 64, 0, 0) for n in range(9)
    )
    path.write_bytes(_head([ARCHITECTURE], 9) + data + bytes(300))
    for load in (load_model, load_llama_cpp):
        with pytest.raises(ModelError, match="overlap"):
            load(str(path))


def test_large_models_are_within_the_bounds():
    check_counts({"num_hidden_layers": 126, "n_routed_experts": 384, "block_size": 8192})
    check_counts({"max_position_embeddings": 10**7, "text_config": {"num_experts": 512}})


def test_what_a_reader_panics_over_is_a_model_error_and_an_interruption_is_none():
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def load(error):
        raise error

    with pytest.raises(ModelError, match="PanicException"):
        judged(load)(panic("index out of range"))
    with pytest.raises(KeyboardInterrupt):
        judged(load)(KeyboardInterrupt())
    for full in (MemoryError("no room"), torch.OutOfMemoryError("no room")):
        with pytest.raises(ModelError, match=r"memory ran out .*\(no room\); free some"):
            judged(load)(full)
    with pytest.raises(NameError, match="a slip in the code"):
        judged(load)(NameError("a slip in the code"))


def test_what_cannot_be_read_is_told_from_what_is_damaged(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for method in ("exl3", "bitsandbytes"):  # transformers reads the latter, which is then refused
        path.write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        with pytest.raises(ModelError, match=f"as {method}, which is not read here.* GGUF of it$"):
            load_model(str(folder), device="cpu")
    for kind, name in (("t5", "T5Config"), ("qwen3_vl", "Qwen3VLConfig")):  # the latter is wrapped
        path.write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ModelError, match=f"{name}.* give it to `wrap_model`$") as caught:
            load_model(str(folder), device="cpu")
        assert len(str(caught.value)) < 500
    path.write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"needs config\.json, tokenizer\.json"):
        load_model(str(folder), device="cpu")


def test_weights_that_are_no_numbers_are_named(folder):
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, place in (("lm_head", "the head"), ("model.layers.1.mlp.down_proj", "layer 1")):
        tensors[f"{name}.weight"][0, 0] = float("nan")
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"{place} .* are not finite"):
            load_model(str(folder), device="cpu")


def test_a_gguf_is_known_by_its_content_and_not_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    named = write_gguf(tmp_path / "tiny.gguf")
    wanted = load_model(str(named), device="cpu").fingerprint
    for name in ("TINY.GGUF", "sha256-0123abc"):
        other = shutil.copy(named, tmp_path / name)
        assert load_model(str(other), device="cpu").fingerprint == wanted
        assert load_llama_cpp(str(other)).name == str(other)
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(ModelError, match="does not begin as a GGUF file does"):
        load_model(str(tmp_path / "page.gguf"))
