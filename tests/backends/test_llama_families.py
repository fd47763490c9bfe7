"""llama.cpp's other memories: windows, latents and shared layers are put together, states go whole.

Each is a tiny random model of its architecture, as a GGUF with weights in fp32; KV is in fp16.
"""

from __future__ import annotations

import gc
import json

import gguf
import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, ask, random_ids, shuffled
from tiny_architectures import WINDOW, write_architecture
from tiny_gguf import write_gguf
from typer.testing import CliRunner

from cached_rag import Engine
from cached_rag.backends.llama_cpp.context import Work
from cached_rag.backends.llama_cpp.loading import load_llama_cpp
from cached_rag.cli.main import app
from cached_rag.errors import ModelError, RelocationError
from cached_rag.evaluation.machine import self_test
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import each, stacks_of

IN_PARTS = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss", "llama4", "deepseek2", "bloom")
WINDOWED = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss")
WHOLE = (
    *("qwen35", "qwen3next", "lfm2", "granitehybrid", "nemotron_h", "falcon-h1", "jamba"),
    *("mamba2", "kimi-linear", "qwen2vl"),
)
CLOSE = {"atol": 2e-2, "rtol": 2e-3}
LENGTH = 60
HEAD = "You answer questions about the documents below, briefly and exactly, in one sentence each."


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Loads a tiny model of an architecture, once."""
    models = {}

    def load(name):
        if name not in models:
            path = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
            models[name] = load_llama_cpp(str(write_architecture(path, name)), threads=1)
        return models[name]

    return load


def prefilled(model, ids, slots=None, buffer=None):
    buffer = buffer or KVBuffer.like(model.shapes, LENGTH + 8)
    done = model.prefill(buffer, torch.tensor([ids]), slots)
    return buffer, done.logits


def differ(one, other):
    return not torch.allclose(one, other, **CLOSE)


# In parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_PARTS)
def test_tokens_between_known_ones_see_what_stands_before_them(loaded, name):
    model, ids = loaded(name), random_ids(LENGTH)
    assert not model.keeps_states
    whole, expected = prefilled(model, ids)
    slots = torch.tensor([*range(3, 9), 20, *range(40, LENGTH)])
    known = torch.tensor([slot for slot in range(LENGTH) if slot not in slots])
    partly = KVBuffer(whole.keys.clone(), whole.values.clone())
    for side in (partly.keys, partly.values):
        for stack in stacks_of(side):
            stack[:, :, :, slots] = 7.0
    _, found = prefilled(model, ids, slots, partly)
    torch.testing.assert_close(found, expected, **CLOSE)
    for mine, its in ((partly.keys, whole.keys), (partly.values, whole.values)):
        for stack, other in zip(stacks_of(mine), stacks_of(its), strict=True):
            ours, theirs = (one[:, 0, :, :LENGTH].float() for one in (stack, other))
            torch.testing.assert_close(ours, theirs, **CLOSE)
    for stack in stacks_of(partly.keys):
        stack[:, :, :, known] += 1.0
    _, wrong = prefilled(model, ids, slots, partly)
    assert differ(wrong, expected)  # control


@pytest.mark.parametrize("name", IN_PARTS)
def test_kv_is_moved_to_where_it_would_have_been_computed(loaded, name):
    model, ids, delta = loaded(name), random_ids(30), 100
    assert model.rule.is_movable
    sides = []
    for begin in (0, delta):
        part = model.shapes.empty(len(ids))
        with model.context.opened() as own:
            model.context.compute([Work(own, ids, begin, 0)])
            model.context.read(own, begin, part)
        sides.append(part)
    for of, here, there in zip(("keys", "values"), *sides, strict=True):
        moved = here.clone()
        model.rule.relocate(here, delta, moved, of=of)
        for ours, theirs, before in zip(*map(stacks_of, (moved, there, here)), strict=True):
            size = theirs.float().norm()
            assert (ours.float() - theirs.float()).norm() < 0.02 * size
            is_rotated = of == ("values" if name == "deepseek2" else "keys")
            if is_rotated and name not in ("bloom", "llama4"):
                assert (before.float() - theirs.float()).norm() > 0.1 * size  # control


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_with_a_window_see_it_and_no_more(loaded, name):
    model, ids = loaded(name), random_ids(LENGTH)
    whole, expected = prefilled(model, ids)
    _, first = model.context.format.sections
    layers = range(model.shapes.num_layers - first.layers, model.shapes.num_layers)

    def changed(slot):
        keys = each(whole.keys, torch.clone)
        for layer in layers:
            keys[layer][:, :, slot] += 3.0
        buffer = KVBuffer(keys, whole.values.clone())
        return prefilled(model, ids, torch.tensor([LENGTH - 1]), buffer)[1]

    torch.testing.assert_close(changed(LENGTH - 1 - WINDOW), expected, **CLOSE)
    assert differ(changed(LENGTH - WINDOW), expected)  # control


@pytest.mark.parametrize("name", WINDOWED)
def test_gaps_between_positions_are_refused_where_layers_see_the_distance(loaded, name):
    model = loaded(name)
    buffer = KVBuffer.like(model.shapes, 20).lay_out([*range(8), *range(15, 23)])
    with pytest.raises(ModelError, match=r"no gaps.*backend=\"transformers\""):
        prefilled(model, random_ids(16), buffer=buffer)


@pytest.mark.parametrize("name", IN_PARTS)
def test_everything_recomputed_is_full_prefill_and_chunks_are_reused(loaded, name):
    with Engine(loaded(name), NEW_PROMPTS) as engine:
        engine.encode(CHUNKS, engine.head(ask(*CHUNKS, system=HEAD), CHUNKS[0]))
        options = {"max_tokens": 8, "ignore_eos": True}
        messages = ask(*CHUNKS, system=HEAD)
        plain = engine.generate(messages, method="full", **options)
        whole = engine.generate(messages, method="epic:recompute_ratio=1.0", **options)
        assert whole.token_ids == plain.token_ids
        found = engine.generate(messages, **options).report
        assert found.cached_tokens > 0.5 * found.prompt_tokens
        assert all(test.passed for test in self_test(engine))
        asked = [ask(*CHUNKS[: n + 1], system=HEAD) for n in range(len(CHUNKS))]
        alone = [engine.generate(one, method="full", **options).token_ids for one in asked]
        streams = [engine.stream(one, method="full", **options) for one in asked]
        assert [stream.result().token_ids for stream in streams] == alone


def test_learned_positions_are_not_tried_beyond_the_last(loaded):
    model, ids = loaded("gpt2"), random_ids(LENGTH)
    assert "learned positions" in str(model.rule)
    whole, expected = prefilled(model, ids)
    slots = torch.arange(40, LENGTH)
    for stack in stacks_of(whole.keys):
        stack[:, :, :, slots] = 7.0
    torch.testing.assert_close(prefilled(model, ids, slots, whole)[1], expected, **CLOSE)


@pytest.mark.parametrize(
    ("name", "why"), [("t5", "it has an encoder"), ("llama-embed", "equally likely")]
)
def test_what_does_not_continue_text_is_refused_and_ends_no_process(name, why, loaded):
    with pytest.raises(ModelError, match=f"does not continue text: .*{why}"):
        loaded(name)


@pytest.mark.parametrize(
    "add",
    [
        lambda writer: writer.add_pooling_type(gguf.PoolingType.MEAN),
        lambda writer: writer.add_causal_attention(False),
    ],
)
def test_a_file_that_says_that_it_makes_embeddings_is_refused(add, tmp_path):
    with pytest.raises(ModelError, match="it makes embeddings"):
        load_llama_cpp(str(write_gguf(tmp_path / "tiny.gguf", add=add)), threads=1)


# As a whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_a_prompt_goes_on_from_a_state_that_was_kept(loaded, name):
    model, ids, other = loaded(name), random_ids(LENGTH, 3), random_ids(LENGTH, 4)
    assert model.keeps_states
    _, expected = prefilled(model, ids)
    begin = LENGTH - 20

    def kept(begun):
        buffer = KVBuffer.like(model.shapes, LENGTH)
        model.prefill(buffer, torch.tensor([begun[:begin]]), num_logits=0)
        return buffer.states.copy()

    def going_on(states):
        buffer = KVBuffer.like(model.shapes, LENGTH)
        buffer.states = states
        return prefilled(model, ids, torch.arange(begin, LENGTH), buffer)[1]

    states, foreign = kept(ids), kept(other)
    model.residents.clear()
    model.context.resize(0)
    for _ in range(2):  # what went on has left the state as it was
        torch.testing.assert_close(going_on(states.copy()), expected, **CLOSE)
    assert states.length == begin
    assert states.nbytes > 0
    assert differ(going_on(foreign), expected)  # control
    with pytest.raises(ModelError, match="is not there"):
        going_on(None)
    with pytest.raises(ModelError, match="one after the other"):
        prefilled(model, ids, torch.tensor([3, LENGTH - 1]))


@pytest.fixture(params=["in one buffer", "in pages"])
def small_pages(request):
    """Answers stand where the prompt does, or go on in pages of four slots."""
    if request.param == "in pages":
        request.getfixturevalue("pages")
        patch = request.getfixturevalue("monkeypatch")
        patch.setattr("cached_rag.kv.buffer.rounded", lambda capacity: capacity)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("name", WHOLE)
def test_the_next_turn_costs_what_is_new(loaded, name):
    options = {"max_tokens": 8, "ignore_eos": True}
    messages = ask(*CHUNKS, system=HEAD)

    def plain(asked):
        with Engine(loaded(name), NEW_PROMPTS) as anew:
            return anew.generate(asked, method="full", **options)

    with Engine(loaded(name)) as engine:
        first = engine.generate(messages, **options)
        assert first.token_ids == plain(messages).token_ids
        later = [
            *messages,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And then?"},
        ]
        second = engine.generate(later, **options)
        assert second.report.cached_tokens > 0.7 * second.report.prompt_tokens
        assert second.token_ids == plain(later).token_ids
        assert all(test.passed for test in self_test(engine))
        with pytest.raises(RelocationError, match="kept as a whole"):
            engine.generate(messages, method="reuse", max_tokens=1)


@pytest.mark.parametrize("name", ["qwen35", "lfm2"])
def test_a_prompt_goes_on_from_its_own_state_in_memory_that_another_tenant_used(loaded, name):
    model = loaded(name)
    options = {"method": "full", "max_tokens": 6, "ignore_eos": True}

    def cut(text, tokens):
        return next(
            text[:end]
            for end in range(len(text), 0, -1)
            if len(model.tokenizer(text[:end])["input_ids"]) == tokens
        )

    mine, theirs = (
        cut(" ".join(map(shuffled, seeds)), 200) for seeds in ((2, 3, 7, 8), (4, 1, 5, 6))
    )
    longer = f"{mine} by the lamp?"
    with Engine(model, NEW_PROMPTS) as engine:
        expected = engine.generate(longer, **options).token_ids
    with Engine(model) as engine:
        engine.generate(mine, **options)
        other = engine.tenant("other")
        other.generate(cut(theirs, 199), **{**options, "max_tokens": 1})
        for _ in range(2):
            answer = engine.generate(longer, **options)
            assert answer.report.cached_tokens >= 199
            assert answer.token_ids == expected


@pytest.mark.usefixtures("small_pages")
def test_answers_that_leave_the_context_take_their_states_along(loaded, monkeypatch):
    model = loaded("qwen35")
    options = {"method": "full", "max_tokens": 24, "ignore_eos": True}
    asked = [ask(f"{n} times", *CHUNKS) for n in range(6)]
    with Engine(model, NEW_PROMPTS) as engine:
        expected = [engine.generate(prompt, **options).token_ids for prompt in asked]
        monkeypatch.setattr("cached_rag.backends.llama_cpp.model.free_bytes", lambda _: 0)
        model.residents.clear()
        model.context.resize(0)
        streams = [engine.stream(prompt, **options) for prompt in asked]
        assert [stream.result().token_ids for stream in streams] == expected
    gc.collect()
    model.residents.sweep()
    assert len(model.context.held) <= 2


def test_the_command_line_says_what_is_kept(tmp_path):
    path = str(write_architecture(tmp_path / "tiny.gguf", "mamba2"))
    command = ["doctor", "--model", path, "--backend", "llama.cpp", "--json"]
    found = json.loads(CliRunner().invoke(app, command).stdout)
    assert "as a whole: it has recurrent layers" in found["position_rule"]
    assert all(test["passed"] for test in found["self_test"])
