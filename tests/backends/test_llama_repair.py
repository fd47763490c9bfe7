"""Scattered tokens and the question's attention in llama.cpp, beside slow ways to the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from conftest import CHUNKS, random_ids
from gguf import GGMLQuantizationType as Kind
from tiny_architectures import write_architecture
from tiny_gguf import LAYERS, write_gguf
from transformers import AutoModelForCausalLM

from cached_rag import Engine, StoreConfig
from cached_rag.backends.base import RepairInput
from cached_rag.backends.llama_cpp import loading
from cached_rag.backends.llama_cpp.assembly import Assembly, Call, calls
from cached_rag.backends.llama_cpp.context import FullError
from cached_rag.backends.llama_cpp.loading import load_llama_cpp
from cached_rag.backends.transformers.attention import Rows
from cached_rag.backends.transformers.row_cache import Drift
from cached_rag.errors import ConfigError, ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import stacks_of
from cached_rag.methods import A3, AnchorFlow, Epic, InfoFlow, Layout
from cached_rag.methods.base import Selector

CLOSE = {"atol": 2e-2, "rtol": 2e-3}
LENGTH, QUESTION = 80, 70
CHUNK, OTHER = (4, 40), (41, 70)
WATCHED = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss", "llama4")
UNWATCHED = ("deepseek2", "bloom")  # latent attention, ALiBi


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", Kind.F32)


@pytest.fixture(scope="module")
def model(path):
    return load_llama_cpp(str(path), threads=1)


class Chosen(Selector):
    """Recomputes given tokens."""

    name = "chosen"

    def __init__(self, rows, *, transfers_drift=False):
        self.rows, self.transfers_drift = rows, transfers_drift

    def first_rows(self, layout):
        rows = layout.fresh.clone()
        rows[self.rows] = True
        return rows


def layout_of(*chunks, fresh=(0, 1, 2, 3, 40, *range(QUESTION, LENGTH)), layers=LAYERS):
    is_fresh = torch.zeros(LENGTH, dtype=torch.bool)
    is_fresh[list(fresh)] = True
    return Layout(is_fresh, torch.zeros(LENGTH, dtype=torch.bool), chunks, layers)


def stale(model):
    """KV of other tokens, as of chunks that were encoded elsewhere."""
    buffer = KVBuffer.like(model.shapes, LENGTH + 8)
    model.prefill(buffer, torch.tensor([random_ids(LENGTH, seed=1)]), num_logits=0)
    return buffer


def copied(buffer):
    return KVBuffer(buffer.keys.clone(), buffer.values.clone())


def assert_same_kv(one, other, slots):
    """Rounding to fp16 on other ways through a layer leaves a percent; other tokens' KV 100."""
    at = (slice(None), 0, slice(None), list(slots))
    for side in ("keys", "values"):
        stacks = (stacks_of(getattr(buffer, side)[at]) for buffer in (one, other))
        for mine, its in zip(*stacks, strict=True):
            assert (mine.float() - its.float()).norm() <= 0.02 * its.float().norm()


# Calls ---------------------------------------------------------------------------------------


def test_a_chunks_beginning_is_computed_before_its_other_runs():
    runs = [(0, 4), (40, 44), (50, 51), (60, 62), (69, 80)]
    found = list(calls(runs, layout_of(CHUNK, OTHER)))
    assert found == [
        Call(((0, 4),)),
        Call(((40, 44),), OTHER),
        Call(((50, 51), (60, 62), (69, 70)), OTHER),
        Call(((70, 80),)),
    ]


def test_a_chunk_of_many_runs_takes_more_than_one_call():
    fresh = torch.zeros(4000, dtype=torch.bool)
    layout = Layout(fresh, ~fresh, ((0, 2000), (2000, 4000)), 2)
    runs = [(at, at + 2) for at in range(2, 4000, 10)]
    found = list(calls(runs, layout))
    assert [run for call in found for run in call.runs] == runs
    assert {call.chunk for call in found} == set(layout.modules)
    early, late = ([c for c in found if c.chunk == chunk] for chunk in layout.modules)
    assert all(len(call.runs) >= 32 for call in late)
    assert len(early) == len(late) > 1  # both end behind a long prompt


# Repair --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", *WATCHED, *UNWATCHED])
def test_a_run_sees_what_was_computed_before_its_call(tmp_path, path, name):
    """One run a call is what a prefill of these tokens is, each over the stored KV before it."""
    tiny = path if name == "llama" else write_architecture(tmp_path / "tiny.gguf", name)
    model = load_llama_cpp(str(tiny), threads=1)
    ids, slots = torch.tensor([random_ids(LENGTH)]), [*range(6), 40, *range(41, 48)]
    one = stale(model)
    other = copied(one)
    layout = layout_of(CHUNK, OTHER, layers=model.shapes.num_layers)
    found = model.repair(RepairInput(one, ids, layout, Chosen(slots)))
    rows = torch.tensor(sorted({*slots, *range(QUESTION, LENGTH)}))
    expected = model.prefill(other, ids, rows)
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    assert found.rows.tolist() == rows.tolist()
    assert_same_kv(one, other, range(LENGTH))


def test_runs_of_one_call_see_each_others_stored_kv(model):
    ids, runs = torch.tensor([random_ids(LENGTH)]), [(10, 13), (20, 21), (30, 34)]
    layout = layout_of(CHUNK, OTHER, fresh=range(QUESTION, LENGTH))
    stored = stale(model)
    found = copied(stored)
    model.repair(RepairInput(found, ids, layout, Chosen([n for run in runs for n in range(*run)])))
    for begin, end in runs:
        alone = copied(stored)
        model.prefill(alone, ids[:, :end], torch.arange(begin, end))
        assert_same_kv(found, alone, range(begin, end))
    in_turn = copied(stored)  # control: what the later ones see makes a difference
    model.prefill(in_turn, ids[:, :34], torch.tensor([*range(10, 13), 20, *range(30, 34)]))
    with pytest.raises(AssertionError):
        assert_same_kv(found, in_turn, range(30, 34))


def test_the_answer_goes_on_over_what_was_repaired(model):
    ids, chosen = torch.tensor([random_ids(LENGTH)]), [10, 11, 20, 45]
    buffer = stale(model)
    found = model.repair(RepairInput(buffer, ids, layout_of(CHUNK, OTHER), Chosen(chosen)))
    again = model.prefill(copied(buffer), ids, torch.arange(QUESTION, LENGTH))
    torch.testing.assert_close(found.logits, again.logits, **CLOSE)


def test_a_chunks_other_tokens_move_as_those_that_are_computed(model):
    ids, chosen = torch.tensor([random_ids(LENGTH)]), [4, 5, 6, 7, 20, 21, 33]
    stored = stale(model)
    found = copied(stored)
    done = model.repair(
        RepairInput(found, ids, layout_of(CHUNK, OTHER), Chosen(chosen, transfers_drift=True))
    )
    expected, rows = copied(stored), Rows(torch.tensor(chosen), LENGTH)
    for layer in range(LAYERS):
        fresh = [side[layer][:, :, chosen] for side in (found.keys, found.values)]
        Drift([CHUNK]).transfer(layer, rows, *fresh, expected)
        expected.write(layer, rows.slots, *fresh)
    assert_same_kv(found, expected, range(*CHUNK))
    with pytest.raises(AssertionError):  # control: they have moved
        assert_same_kv(found, stored, range(*CHUNK))
    assert_same_kv(found, stored, range(*OTHER))
    again = model.prefill(copied(found), ids, torch.arange(QUESTION, LENGTH))
    torch.testing.assert_close(done.logits, again.logits, **CLOSE)


def test_what_fails_on_the_way_is_done_again_and_nothing_moves_twice(model, monkeypatch):
    """As where cells or sequences run out."""
    ids, layout = torch.tensor([random_ids(LENGTH)]), layout_of(CHUNK, OTHER)
    method, stored = Chosen([4, 5, 6, 7, 20, 21, 33, 41, 42], transfers_drift=True), stale(model)
    smooth, found = copied(stored), copied(stored)
    wanted = model.repair(RepairInput(smooth, ids, layout, method))
    original, calls_made = Assembly.repair, []

    def failing(self, call, *, moves):
        original(self, call, moves=moves)
        calls_made.append(call)
        if len(calls_made) == 2:
            raise FullError(model.context.size + 1)

    monkeypatch.setattr(Assembly, "repair", failing)
    done = model.repair(RepairInput(found, ids, layout, method))
    assert len(calls_made) == 2 + 3  # both of the first chunk again, and one of the other
    assert_same_kv(found, smooth, range(QUESTION))
    torch.testing.assert_close(done.logits, wanted.logits, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("transfers_drift", [False, True])
def test_everything_recomputed_is_full_prefill_with_gaps_too(model, transfers_drift):
    ids = torch.tensor([random_ids(LENGTH)])
    at = [n + (30 if n >= CHUNK[0] else 0) + (50 if n >= OTHER[0] else 0) for n in range(LENGTH)]
    whole = KVBuffer.like(model.shapes, LENGTH + 8).lay_out(at)
    expected = model.prefill(whole, ids)
    found = stale(model).lay_out(at)
    method = AnchorFlow(1.0, transfers_drift=transfers_drift)
    done = model.repair(RepairInput(found, ids, layout_of(CHUNK, OTHER), method))
    torch.testing.assert_close(done.logits, expected.logits, **CLOSE)
    assert_same_kv(found, whole, range(LENGTH))


def test_scattered_tokens_and_the_question_may_stand_behind_gaps(model):
    """The same tokens, chosen and computed, as with one run a call at those positions."""
    ids = torch.tensor([random_ids(LENGTH)])
    at = [n + (30 if n >= CHUNK[0] else 0) + (50 if n >= QUESTION else 0) for n in range(LENGTH)]
    stored = stale(model).lay_out(at)
    slots = torch.tensor([*range(8), 40, *range(QUESTION, LENGTH)])
    expected = copied(stored).lay_out(at)
    wanted = model.prefill(expected, ids, slots)
    found = copied(stored).lay_out(at)
    done = model.repair(RepairInput(found, ids, layout_of(CHUNK, OTHER), Chosen([4, 5, 6, 7])))
    torch.testing.assert_close(done.logits, wanted.logits, **CLOSE)
    rows = model.repair(
        RepairInput(copied(stored).lay_out(at), ids, layout_of(CHUNK), InfoFlow(0.2))
    ).rows
    assert len(rows) > len(layout_of().fresh.nonzero())


# Attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen(A3):
    """Keeps the weights and the scores that it is shown, and chooses nothing."""

    layer: int = 0
    weights: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)

    def observed_layers(self, layout):
        return (self.layer,)

    def score(self, weights):
        self.weights.append(weights)
        return weights.sum(dim=0)

    def choose(self, scores, layout):
        self.scores.append(scores)
        return layout.fresh


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(("length", "question"), [(80, 70), (700, 100)])  # 512 are computed at once
def test_weights_are_those_of_the_model_in_transformers(model, path, layer, length, question):
    network = AutoModelForCausalLM.from_pretrained(
        Path(path).parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([random_ids(length)])
    expected = network(ids, output_attentions=True).attentions[layer][0].mean(dim=0)
    buffer = KVBuffer.like(model.shapes, length)
    model.prefill(buffer, ids)
    fresh = torch.arange(length) >= question
    layout = Layout(fresh, torch.zeros(length, dtype=torch.bool), ((0, question),), LAYERS)
    method = Seen(layer=layer)
    model.repair(RepairInput(buffer, ids, layout, method))
    assert method.weights[0].shape == (length - question, length)

    def moved(rows):
        """The mean share of attention that lies elsewhere."""
        return (method.weights[0] - rows).abs().sum(dim=1).mean() / 2

    assert moved(expected[question:]) < 0.02
    assert moved(expected[question - 1 : -1]) > 0.2  # control: the rows before


def test_tokens_without_kv_are_left_out_of_the_weights(model):
    ids, layout, method = torch.tensor([random_ids(LENGTH)]), layout_of(CHUNK, OTHER), Seen()
    model.repair(RepairInput(stale(model), ids, layout, method))
    missing = layout.fresh.clone()
    missing[QUESTION:] = False
    assert not method.scores[0][:, missing].any()
    assert method.scores[0][:, ~missing].any()


@pytest.mark.parametrize("name", WATCHED)
def test_windows_sinks_and_bounded_scores_are_watched(tmp_path, name):
    model = load_llama_cpp(str(write_architecture(tmp_path / "tiny.gguf", name)), threads=1)
    assert model.can_watch
    ids = torch.tensor([random_ids(LENGTH)])
    layers = model.shapes.num_layers
    layout = layout_of(CHUNK, OTHER, layers=layers)
    found = model.repair(RepairInput(stale(model), ids, layout, AnchorFlow(0.3)))
    assert len(found.rows) > int(layout.fresh.sum()) + 16


@pytest.mark.parametrize("name", UNWATCHED)
def test_what_is_not_explained_is_not_watched(tmp_path, name):
    model = load_llama_cpp(str(write_architecture(tmp_path / "tiny.gguf", name)), threads=1)
    assert not model.can_watch
    ids, layers = torch.tensor([random_ids(LENGTH)]), model.shapes.num_layers
    with pytest.raises(ConfigError, match="does not show"):
        model.repair(RepairInput(stale(model), ids, layout_of(CHUNK, layers=layers), InfoFlow()))


def test_a_split_file_is_read_whole(tmp_path, monkeypatch):
    write_architecture(tmp_path / "tiny.gguf", "gpt-oss", split_max_tensors=20)
    first, *others = sorted(tmp_path.glob("*-of-*.gguf"))
    assert len(others) > 1
    assert load_llama_cpp(str(first), threads=1).can_watch  # by sinks that others have
    room = first.stat().st_size + loading.OVERHEAD_BYTES
    monkeypatch.setattr(loading, "free_bytes", lambda _: room)
    with pytest.raises(ModelError, match="does not fit"):
        load_llama_cpp(str(first), threads=1)


# The engine ----------------------------------------------------------------------------------


def test_auto_asks_the_question(model):
    with Engine(model, StoreConfig(sequence_bytes=0)) as engine:
        long = [" ".join([chunk] * 5) for chunk in CHUNKS]
        engine.encode(long, context=None)
        prompt = "\n\n".join((*long, "Why is copper green?"))
        report = engine.generate(prompt, max_tokens=2).report
        assert report.method == "auto"
        assert not report.notes
        fast = engine.generate(prompt, method="fast", max_tokens=2).report
        anchors = engine.generate(prompt, method=Epic(8), max_tokens=2).report
        assert anchors.recomputed_tokens < fast.recomputed_tokens < report.recomputed_tokens
        followed = engine.generate(prompt, method="anchorflow:follow_tokens=3", max_tokens=6)
        assert len(followed.token_ids) == 6


def test_where_it_cannot_auto_chooses_by_words_and_says_so(model):
    with Engine(replace(model, attention=None), StoreConfig(sequence_bytes=0)) as engine:
        long = [" ".join([chunk] * 5) for chunk in CHUNKS]
        engine.encode(long, context=None)
        prompt = "\n\n".join((*long, "Why is copper green?"))
        report = engine.generate(prompt, max_tokens=2).report
        assert report.method == "epic:anchor_tokens=8+lexical"
        fast = engine.generate(prompt, method="fast", max_tokens=2).report
        assert fast.method == "epic:anchor_tokens=8+lexical:recompute_ratio=0.03"
        assert any("cannot be watched" in note for note in report.notes)
