"""llama.cpp as a backend: what it puts together is what it would compute; the engine runs on it."""

from __future__ import annotations

import ctypes
import gc
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import CHUNKS, random_ids
from gguf import GGMLQuantizationType as Kind
from indexes import WordEmbedding
from langchain_cached_rag import CachedRAGLLM as StringLLM
from llama_index.llms.cached_rag import CachedRAGLLM
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM
from transformers import GenerationConfig as Settings
from typer.testing import CliRunner

from cached_rag import CachedRAG, ConfigError, Engine, Schema, StoreConfig
from cached_rag.backends.base import RepairInput, StepInput
from cached_rag.backends.llama_cpp import api, loading
from cached_rag.backends.llama_cpp import context as context_module
from cached_rag.backends.llama_cpp import model as backend_module
from cached_rag.backends.llama_cpp.assembly import neighbours
from cached_rag.backends.llama_cpp.context import MAX_SEQUENCES, Work
from cached_rag.backends.llama_cpp.loading import FileOutline, load_llama_cpp
from cached_rag.backends.llama_cpp.state_format import Cells, Dims, Section, StateFormat
from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.transformers.loading import load_model
from cached_rag.cli.main import app
from cached_rag.engine.drafts import DEAREST
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.layers import LayerShape
from cached_rag.kv.rows import RowKV
from cached_rag.methods import Epic, Layout

NEW = {"sequence_bytes": 0}
# Weights in fp32 are multiplied in fp32; KV is kept in fp16, so that rounding is left.
CLOSE = {"atol": 2e-2, "rtol": 2e-3}


def ask(*chunks):
    return "\n\n".join((*chunks, "Why is copper green?"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", Kind.F32))


@pytest.fixture(scope="module")
def model(path):
    return load_llama_cpp(path, threads=1)


@pytest.fixture(scope="module")
def cheap(path):
    """A model of its own, as two that share a context would not know each other's sequences."""
    model = load_llama_cpp(path, threads=1)
    assert model.token_price > DEAREST  # on a CPU drafts do not pay; as if they did:
    # Not `return`: `model` frees the weights of both when it goes.
    yield replace(model, token_price=0.1)  # noqa: PT022


def prefilled(model, ids):
    buffer = KVBuffer.like(model.shapes, len(ids) + 8)
    done = model.prefill(buffer, torch.tensor([ids]))
    return buffer, done


def assert_same_kv(one, other, slots):
    for name in ("keys", "values"):
        mine, its = (getattr(side, name)[:, 0, :, slots].float() for side in (one, other))
        torch.testing.assert_close(mine, its, **CLOSE)


# Bytes ---------------------------------------------------------------------------------------


def test_a_state_is_put_together_and_taken_apart():
    sections = (Section(3, LayerShape(2, 4, 6)), Section(2, LayerShape(1, 8, 8), middle=(3, 4)))
    form = StateFormat(sections, (-7, 0))
    shapes, positions = form.shapes, torch.tensor([4, 5, 9, 10, 13, 12, 11])
    keys, values = shapes.empty(7)
    for stack in (*keys.stacks, *values.stacks):
        stack.normal_()
    state = form.put_together(positions.tolist(), (keys, values))
    assert len(state) == form.size(7)
    assert [cells.positions.tolist() for cells in form.parse(state)] == [positions.tolist()] * 2
    found = shapes.empty(7)
    form.take_apart(state, found)
    order = [0, 1, 2, 3, 6, 5, 4]
    for mine, its in zip((keys, values), found, strict=True):
        for layer in range(5):
            assert torch.equal(mine[layer][:, order], its[layer])
    assert StateFormat.of(state, Dims((4, 8))) == form
    fewer = [
        Cells(one.positions[:n], one.keys[:, :n], one.values[:, :n])
        for n, one in zip((7, 3), form.parse(state), strict=True)
    ]
    windowed = form.compose(fewer)  # a window's tokens are fewer
    assert StateFormat.of(windowed, Dims((4, 8))) == form
    with pytest.raises(ModelError, match=r"cannot have|were expected"):
        form.parse(state[:-4])
    wrong = state.clone()
    wrong[8 + 8 + 7 * 12 + 16] += 1  # the type that stands before the first layer's rows
    for damaged in (wrong, state[:-4]):
        with pytest.raises(ModelError, match="not laid out"):
            StateFormat.of(damaged, Dims((4, 8)))


def test_a_latent_has_its_rotated_part_behind_it():
    form = StateFormat((Section(2, LayerShape(1, 6, 4), is_latent=True),))
    part = torch.randn(2, 1, 3, 6).half(), torch.randn(2, 1, 3, 4).half()
    state = form.put_together([0, 1, 2], part)
    (cells,) = form.parse(state)
    rows = torch.cat([cells.keys, cells.values], dim=-1)
    assert torch.equal(rows[1, 2, 0], torch.cat([part[0][1, 0, 2], part[1][1, 0, 2]]))
    assert StateFormat.of(state, Dims((0, 0), latent=4)) == form


def test_neighbours_stand_at_neighbouring_slots_and_positions():
    assert neighbours([1, 2, 3, 7, 9, 10], range(11)) == [(1, 4), (7, 8), (9, 11)]
    assert neighbours([0, 1, 2], [0, 1, 9]) == [(0, 2), (2, 3)]


# Computing -----------------------------------------------------------------------------------


def test_moved_keys_are_those_that_llama_cpp_moves(model):
    ids, context = random_ids(30), model.context
    own = context.open()
    context.compute([Work(own, ids, 0)])
    here, there = (KVBuffer.like(model.shapes, len(ids)) for _ in range(2))
    keys, values = here.keys[:, 0], here.values[:, 0]
    context.read(own, 0, (keys, values))
    add = context._c.llama_memory_seq_add
    add.restype, add.argtypes = None, (ctypes.c_void_p, *[ctypes.c_int32] * 4)
    add(context._memory, own, 0, -1, 100)
    context.compute([Work(own, [5], 100 + len(ids))])  # only now it moves them
    its = there.keys[:, 0]
    context.read(own, 100, (its, there.values[:, 0]))
    context.drop(own)
    buffer = KVBuffer.like(model.shapes, 200)
    buffer.place(ModuleKV(tuple(ids), 0, keys, values), 100, model.rule)
    mine = buffer.keys[:, 0, :, 100 : 100 + len(ids)]
    torch.testing.assert_close(mine.float(), its.float(), **CLOSE)
    assert not torch.allclose(keys.float(), its.float(), **CLOSE)  # control


def scaled_by(kind, **fields):
    def add(writer):
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)
        writer.add_rope_dimension_count(16)
        for name, value in fields.items():
            writer.add_float32(f"llama.rope.scaling.{name}", value)

    return add


@pytest.mark.parametrize(
    "scaling",
    [
        scaled_by(gguf.RopeScalingType.LINEAR),
        scaled_by(gguf.RopeScalingType.YARN),
        scaled_by(gguf.RopeScalingType.YARN, yarn_beta_fast=8.0, yarn_beta_slow=2.0),
    ],
    ids=["linear", "yarn", "yarn, turns that llama.cpp passes over"],
)
def test_scaled_rotations_are_found_and_hold_over_long_distances(scaling, tmp_path, monkeypatch):
    path = str(write_gguf(tmp_path / "scaled.gguf", Kind.F32, add=scaling))
    model, ids = load_llama_cpp(path, threads=1), random_ids(30)
    parts = []
    for begin in (0, 9000):
        with model.context.opened() as own:
            model.context.compute([Work(own, ids, begin, 0)])
            there = KVBuffer.like(model.shapes, len(ids))
            model.context.read(own, begin, (there.keys[:, 0], there.values[:, 0]))
        parts.append(there.keys[:, 0])
    moved = model.rule.relocate(parts[0], 9000, torch.empty_like(parts[0]))
    error = (moved.float() - parts[1].float()).norm() / parts[1].float().norm()
    assert error < 0.01
    plain = tuple(10_000.0 ** (-i / 8) for i in range(8))
    monkeypatch.setattr(loading, "frequencies_of", lambda *_: [plain])  # control
    assert "no known rotation" in load_llama_cpp(path, threads=1).rule.reason


def test_longrope_rotates_by_its_long_factors_whatever_a_context_has_room_for(tmp_path):
    factors = np.linspace(1.0, 4.0, 8, dtype=np.float32)

    def add(writer):
        writer.add_rope_scaling_orig_ctx_len(2000)
        writer.add_rope_dimension_count(16)
        writer.add_tensor("rope_factors_long.weight", factors)
        writer.add_tensor("rope_factors_short.weight", np.ones(8, np.float32))

    path = write_gguf(tmp_path / "long.gguf", Kind.F32, kind="phi3", add=add)
    model = load_llama_cpp(str(path), threads=1)
    assert model.context.size > 2000
    plain = 10_000.0 ** -(np.arange(8) / 8)
    found = {rule.inv_freq for rule in model.rule.layers}
    assert np.allclose([*found], plain / factors)


def test_recomputing_everything_is_full_prefill(model):
    ids = random_ids(90)
    whole, done = prefilled(model, ids)
    stale = KVBuffer.like(model.shapes, 100)
    for side in (stale.keys, stale.values):
        side.normal_()
    fresh = torch.zeros(90, dtype=torch.bool)
    fresh[70:] = True
    layout = Layout(fresh, torch.zeros(90, dtype=torch.bool), ((0, 40), (40, 70)), 2)
    found = model.repair(RepairInput(stale, torch.tensor([ids]), layout, Epic(recompute_ratio=1.0)))
    torch.testing.assert_close(found.logits, done.logits, **CLOSE)
    assert_same_kv(stale, whole, range(90))


@pytest.mark.parametrize("piece", [512, 7])
@pytest.mark.parametrize("gaps", [[(3, 9), (20, 21), (40, 60)], [(0, 2), (59, 60)]])
def test_tokens_between_known_ones_see_what_stands_before_them(model, monkeypatch, gaps, piece):
    monkeypatch.setattr(context_module, "_PIECE", piece)
    ids = random_ids(60)
    whole, done = prefilled(model, ids)
    slots = torch.tensor([slot for begin, end in gaps for slot in range(begin, end)])
    partly = KVBuffer(whole.keys.clone(), whole.values.clone())
    for side in (partly.keys, partly.values):
        side[:, :, :, slots] = 7.0
    found = model.prefill(partly, torch.tensor([ids]), slots, num_logits=2)
    torch.testing.assert_close(found.logits, done.logits, **CLOSE)
    assert found.tail.shape == (1, 2, model.vocab_size)
    assert_same_kv(partly, whole, range(60))
    known = [slot for slot in range(60) if slot not in slots]
    partly.values[:, :, :, known] += 0.5  # control: what is known counts
    found = model.prefill(partly, torch.tensor([ids]), slots)
    assert not torch.allclose(found.logits, done.logits, **CLOSE)


def test_a_chunk_behind_its_own_prefix_is_exact(model):
    ids = random_ids(50)
    whole, _ = prefilled(model, ids)
    behind = KVBuffer.like(model.shapes, 50, batch=2)
    behind.keys[:, :, :, :20] = whole.keys[:, :, :, :20]
    behind.values[:, :, :, :20] = whole.values[:, :, :, :20]
    model.prefill(behind, torch.tensor([ids, ids]), torch.arange(20, 50), num_logits=0)
    for row in (0, 1):
        alone = KVBuffer(behind.keys[:, row : row + 1], behind.values[:, row : row + 1])
        assert_same_kv(alone, whole, range(50))


def test_more_logits_than_one_call_gives_are_all_there(model):
    ids = random_ids(60)
    buffer = KVBuffer.like(model.shapes, 60)
    tail = model.prefill(buffer, torch.tensor([ids]), num_logits=40).tail
    assert tail.shape == (1, 40, model.vocab_size)
    for number in (0, 17, 39):
        _, done = prefilled(model, ids[: 21 + number])
        torch.testing.assert_close(tail[:, number], done.logits, **CLOSE)


def test_a_step_of_more_rows_than_sequences(model):
    ids = random_ids(12)
    rows = [
        RowKV(prefilled(model, ids[: n % 12 + 1])[0], n % 12 + 1) for n in range(MAX_SEQUENCES + 6)
    ]
    logits = model.step([StepInput(row, [7]) for row in rows])
    assert logits.shape == (MAX_SEQUENCES + 6, model.vocab_size)
    torch.testing.assert_close(logits[:12], logits[12:24], **CLOSE)
    assert [row.length for row in rows[:3]] == [2, 3, 4]


def test_positions_may_be_left_out(model, path):
    ids, at = random_ids(40), [*range(10), *range(30, 45), *range(60, 75)]
    found, twin = [], load_model(path, "float32", "cpu", "bf16")
    assert model.num_weights == twin.num_weights
    for backend in (model, twin):
        buffer = KVBuffer.like(backend.shapes, 48).lay_out(at)
        whole = backend.prefill(buffer, torch.tensor([ids])).logits
        again = backend.prefill(buffer, torch.tensor([ids]), torch.tensor([12, 13, 25, 39]))
        torch.testing.assert_close(again.logits, whole, **CLOSE)
        step = backend.step([StepInput(RowKV(buffer, 40), [7])])
        found.append(torch.cat([whole, step]).float())
    compact, done = prefilled(model, ids)
    step = model.step([StepInput(RowKV(compact, 40), [7])])
    mine, its, control = found[0], found[1], torch.cat([done.logits, step])
    assert (mine - its).norm() < 0.1 * its.norm()  # the other's weights are rounded to bf16
    assert (control - its).norm() > 0.3 * its.norm()


# The engine on it ----------------------------------------------------------------------------

METHODS = ("full", "prefix", "reuse", "epic", "auto", "random:recompute_ratio=0.5")


@pytest.mark.parametrize("method", METHODS)
def test_batches_and_drafts_change_no_answer(cheap, method):
    with Engine(cheap, StoreConfig(**NEW)) as engine:
        engine.encode(CHUNKS, context=None)
        asked = [ask(*CHUNKS), ask(*CHUNKS[::-1]), ask(CHUNKS[1])]
        options = {"method": method, "max_tokens": 120, "ignore_eos": True}
        alone = [engine.generate(prompt, drafts=False, **options) for prompt in asked]
        drafted = [engine.generate(prompt, **options) for prompt in asked]
        together = engine.generate_batch(asked, **options)
        for found in (drafted, together):
            assert [a.token_ids for a in found] == [a.token_ids for a in alone]
        assert max(a.report.drafted_tokens for a in drafted) > 0
        hits = {a.report.modules_hit for a in together}
        assert hits == ({0} if method in ("full", "prefix") else {1, len(CHUNKS)})


@pytest.mark.parametrize(
    "method",
    ["full", "prefix", "epic:recompute_ratio=1.0", "epic+lexical:recompute_ratio=1.0"],
)
def test_exact_methods_answer_as_generate_does(model, path, method):
    folder, name = Path(path).parent, Path(path).name
    plain = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    with Engine(model, StoreConfig(**NEW)) as engine:
        engine.encode(CHUNKS, context=None)
        for prompt in (ask(*CHUNKS), ask(*CHUNKS[::-1])):
            options = {"method": method, "max_tokens": 20, "ignore_eos": True}
            found = engine.generate(prompt, repetition_penalty=1.0, **options)
            ids = torch.tensor([engine.tokenization.tokenize(Rendered(prompt)).ids])
            expected = plain.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=Settings(max_new_tokens=20, min_new_tokens=20, do_sample=False),
            )
            assert list(found.token_ids) == expected[0, ids.shape[1] :].tolist()


def test_chunks_are_found_again_after_a_restart_and_tenants_share_nothing(model, tmp_path):
    store = StoreConfig(str(tmp_path), **NEW)
    with Engine(model, store) as engine:
        engine.encode(CHUNKS, context=None)
        expected = engine.generate(ask(*CHUNKS), method="reuse", max_tokens=8)
    with Engine(model, store) as engine:
        found = engine.generate(ask(*CHUNKS), method="reuse", max_tokens=8)
        assert found.token_ids == expected.token_ids
        assert found.report.modules_hit == len(CHUNKS)
        other = engine.tenant("b").generate(ask(*CHUNKS), method="reuse", max_tokens=2)
        assert other.report.modules_hit == 0


def test_a_chat_goes_on_where_it_was(model):
    with Engine(model) as engine:
        first = ask(*CHUNKS, *CHUNKS, *CHUNKS)
        said = engine.generate(first, method="full", max_tokens=6)
        second = f"{first}{said.text} And then?"
        report = engine.generate(second, method="full", max_tokens=2).report
        assert report.kept_tokens > 0.8 * engine.count_tokens(first)


def test_schemas_run_on_it(model):
    source = (
        '<schema name="s">Rules.<module name="a">Copper is green.</module>'
        '<module name="b">Tin is not.</module></schema>'
    )
    asked = '<prompt schema="s"><a/><b/>Why?</prompt>'
    with Engine(model, StoreConfig(**NEW)) as engine:
        prompt = Schema.from_string(source).prompt_from_string(asked)
        assert len(engine.generate(prompt, method="reuse", max_tokens=4).token_ids) == 4


def test_prompts_leave_the_context_where_memory_is_short_and_come_back(model, monkeypatch):
    options = {"method": "full", "max_tokens": 40, "ignore_eos": True}
    asked = [ask(*CHUNKS, f"{n} times") for n in range(3)]
    with Engine(model, StoreConfig(**NEW)) as engine:
        expected = [engine.generate(prompt, **options).token_ids for prompt in asked]
        monkeypatch.setattr(backend_module, "free_bytes", lambda _: 0)
        model.residents.clear()
        model.context.resize(0)
        streams = [engine.stream(prompt, **options) for prompt in asked]
        size = model.context.size
        for stream in streams:
            next(stream)
        found = [stream.result().token_ids for stream in streams]
        assert size == 1024
    assert [list(tokens)[-30:] for tokens in found] == [list(t)[-30:] for t in expected]


def test_prompts_that_are_over_take_no_cells(model):
    with Engine(model, StoreConfig(**NEW)) as engine:
        for n in range(MAX_SEQUENCES + 6):
            engine.generate(f"{n} {CHUNKS[0]}", method="full", max_tokens=1)
    gc.collect()
    model.residents.sweep()
    assert len(model.context.held) <= 2


def test_what_it_cannot_do_is_refused_by_name(model, path, tmp_path):
    with Engine(model, StoreConfig(**NEW)) as engine:
        engine.encode(CHUNKS, context=None)
        with pytest.raises(ConfigError, match=r"llama\.cpp does not show"):
            engine.generate(ask(*CHUNKS), method="cacheblend", max_tokens=2)
    for options, message in (
        ({"backend": "llama"}, "not one of transformers, llama.cpp"),
        ({"backend": "llama.cpp", "weights": "int4"}, "weights='int4'"),
        ({"backend": "llama.cpp", "device": "cuda"}, "device='cuda'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine.load(path, **options)
    if not api.load().llama_supports_gpu_offload():  # as the pinned wheel for Linux
        with pytest.raises(ModelError, match="CPU only"):
            Engine.load(path, backend="llama.cpp", device="gpu")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelError, match="cannot load"):
        Engine.load(str(damaged), backend="llama.cpp")


def test_the_command_line_has_it(path):
    command = ["doctor", "--model", path, "--backend", "llama.cpp", "--json"]
    found = json.loads(CliRunner().invoke(app, command).stdout)
    assert found["layers"].startswith("llama.cpp")
    assert found["attention"] == "scattered rows"
    assert all(test["passed"] for test in found["self_test"])


@pytest.mark.parametrize("kind", [StringLLM, CachedRAGLLM])
def test_integrations_have_it(kind, path):
    llm = kind(model=path, backend="llama.cpp", max_tokens=3, sequence_bytes=0)
    with llm.loaded_engine() as engine:
        assert isinstance(engine.model, backend_module.LlamaCppModel)
        assert engine.generate("Why is copper green?", max_tokens=3).token_ids


def test_a_folder_is_no_gguf(model_folder):
    with pytest.raises(ConfigError, match="reads GGUF files"):
        Engine.load(model_folder, backend="llama.cpp")


def test_an_outline_has_what_ggufs_own_reader_has_but_for_lists(path):
    whole, outline = gguf.GGUFReader(path), FileOutline(path)
    assert list(outline.fields) == list(whole.fields)
    assert [one.name for one in outline.tensors] == [one.name for one in whole.tensors]
    for a, b in zip(outline.tensors, whole.tensors, strict=True):
        assert (a.data == b.data).all()
    texts = outline.fields["tokenizer.ggml.tokens"]
    assert len(texts.parts) < 5 < len(whole.fields["tokenizer.ggml.tokens"].parts)


def test_an_index_remembers_what_runs_its_model_and_says_where_another_does(path, tmp_path, caplog):
    folder = tmp_path / "index"

    def opened(**options):
        return CachedRAG.open(folder, path, embedding=WordEmbedding(), chunk_tokens=128, **options)

    with opened(backend="llama.cpp") as rag:
        rag.add_texts({"a": CHUNKS[1]}, progress=False)
    with opened() as rag:
        assert rag.ask("Why is copper green?", max_tokens=1).report.modules_hit == 1
        kind = type(rag.engine.model)
    assert not caplog.messages
    with opened(backend="transformers", dtype="float32") as rag:
        assert rag.ask("Why is copper green?", max_tokens=1).report.modules_missed == 1
        assert type(rag.engine.model) is not kind
        rag.add_texts({"b": CHUNKS[2]}, progress=False)
    assert "made with backend 'llama.cpp'; with 'transformers' its chunks are" in caplog.text
    assert "made without dtype; with 'float32' its" in caplog.text
    with opened() as rag:
        assert type(rag.engine.model) is kind


@pytest.mark.parametrize("first", [{"dtype": "bfloat16"}, {"weights": "bf16", "dtype": "float32"}])
def test_an_index_remembers_how_its_weights_were_loaded(path, tmp_path, first):
    def opened(**options):
        chosen = {"embedding": WordEmbedding(), "chunk_tokens": 128}
        return CachedRAG.open(tmp_path / "index", path, **chosen, **options)

    with opened(**first) as rag:
        rag.add_texts({"a": CHUNKS[1]}, progress=False)
        made = rag.engine.model.fingerprint
    with opened() as rag:
        assert rag.engine.model.fingerprint == made
        assert rag.add_texts({"a": CHUNKS[1]}, progress=False).encoded == 0
