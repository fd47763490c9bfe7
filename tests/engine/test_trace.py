"""What became of each token adds up to the report's figures, and spans are the prompt's text."""

from __future__ import annotations

import gc
import pickle
import weakref
from itertools import pairwise

import pytest
from conftest import CHUNKS, NEW_PROMPTS, ask, tiny_model
from gguf import GGMLQuantizationType
from pml.test_pml_exactness import hills, trip
from tiny_gguf import write_gguf

from cached_rag import Engine, StoreConfig, Tools
from cached_rag.backends.llama_cpp.loading import load_llama_cpp
from cached_rag.engine import trace as tracing
from cached_rag.engine.report import Clock
from cached_rag.engine.trace import Kind
from cached_rag.kv.buffer import Workspace
from cached_rag.kv.fingerprint import digest
from cached_rag.rag.answer import AnswerStream, Lookup

METHODS = ("full", "prefix", "reuse", "epic:anchor_tokens=4", "auto", "cacheblend", "random")
MORE = ("cacheblend:gradual=true", "cacheblend:recompute_ratio=1", "infoflow+epic:anchor_tokens=2")
CACHED = (Kind.IN_PLACE, Kind.MOVED, Kind.IN_PART)


def checked(generation):
    """The trace of a generation that agrees with its report and its prompt."""
    trace, report = generation.trace, generation.report
    counts = trace.counts
    assert sum(counts.values()) == report.prompt_tokens
    assert sum(counts[kind] for kind in CACHED) == report.cached_tokens
    assert counts[Kind.REPAIRED] == report.recomputed_tokens
    assert trace.spans[0].begin == 0
    assert trace.spans[-1].end == len(trace.text)
    assert all(one.end == other.begin for one, other in pairwise(trace.spans))
    for index, part in enumerate(trace.parts):
        own = [span for span in trace.spans if span.part == index]
        for kind in Kind:
            assert part.counts[kind] == sum(one.tokens for one in own if one.kind is kind)
    return trace


def text_of(trace, part):
    index = trace.parts.index(part)
    return "".join(trace.text[one.begin : one.end] for one in trace.spans if one.part == index)


def chunks(trace):
    return [part for part in trace.parts if part.digest]


def kinds(trace):
    return {kind for kind, count in trace.counts.items() if count}


@pytest.fixture
def filled(engine):
    engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
    return engine


@pytest.mark.parametrize("method", [*METHODS, *MORE])
def test_kinds_add_up_to_the_report_and_spans_to_the_prompt(filled, method):
    trace = checked(filled.generate(ask(*CHUNKS), method=method, max_tokens=2))
    assert trace.text == filled.tokenization.template.render(ask(*CHUNKS)).text
    for part in trace.parts:
        if part.digest:
            (chunk,) = (one for one in CHUNKS if digest(one) == part.digest)
            assert text_of(trace, part).strip() in chunk
            assert len(text_of(trace, part)) > len(chunk) - 8


def test_what_each_method_does_is_told_apart(filled):
    made = {
        method: filled.generate(ask(*CHUNKS), method=method, max_tokens=2).trace
        for method in METHODS
    }
    assert kinds(made["full"]) == {Kind.COMPUTED}
    assert not made["full"].parts
    assert kinds(made["prefix"]) == {Kind.IN_PLACE, Kind.COMPUTED}
    assert kinds(made["reuse"]) == {Kind.IN_PLACE, Kind.MOVED, Kind.COMPUTED}
    assert kinds(made["epic:anchor_tokens=4"]) == {*kinds(made["reuse"]), Kind.REPAIRED}
    assert kinds(made["auto"]) == {*kinds(made["reuse"]), Kind.REPAIRED}
    blended = made["cacheblend"]
    assert kinds(blended) == {Kind.IN_PLACE, Kind.IN_PART, Kind.REPAIRED, Kind.COMPUTED}
    assert blended.counts[Kind.IN_PART] > blended.counts[Kind.REPAIRED]
    assert [part.state for part in made["prefix"].parts] == ["hit", "hit", "unused", "unused"]
    assert [part.counts[Kind.REPAIRED] for part in made["epic:anchor_tokens=4"].parts[2:]] == [4, 4]


def test_parts_say_how_far_they_were_moved_and_missed_ones_that_they_were(filled):
    text = "A text that has no KV yet, and is long enough to be a chunk of its own."
    filled.register([text])
    new = filled.library.table.get(text)
    prompt = ask(CHUNKS[1], text)
    trace = checked(filled.generate(prompt, method="reuse", max_tokens=2))
    head, first, missed = trace.parts
    assert (head.digest, head.moved_by, head.origin.tier) == ("", 0, "memory")
    assert (first.state, first.moved_by, kinds(trace) >= {Kind.IN_PLACE}) == ("hit", 0, True)
    assert (missed.state, missed.origin, missed.digest) == ("missed", None, new.text_digest)
    assert set(missed.counts.items()) >= {(Kind.COMPUTED, missed.tokens)}
    moved = checked(filled.generate(ask(CHUNKS[0], CHUNKS[1]), method="reuse", max_tokens=2))
    begin = sum(span.tokens for span in moved.spans[: [s.part for s in moved.spans].index(2)])
    start = sum(span.tokens for span in trace.spans[: [s.part for s in trace.spans].index(1)])
    assert moved.parts[2].moved_by == begin - start > 0


def test_tiers_are_those_the_kv_came_from_also_when_it_was_read_ahead(tmp_path):
    store = StoreConfig(path=str(tmp_path), sequence_bytes=0)

    def tiers(engine, prompt):
        trace = checked(engine.generate(prompt, method="reuse", max_tokens=2))
        assert all(part.origin.load_ms >= 0 for part in trace.parts)
        return [part.origin.tier for part in chunks(trace)]

    with Engine(tiny_model("llama"), store) as engine:
        engine.encode(CHUNKS[:2], context=None)
        assert tiers(engine, ask(*CHUNKS[:2])) == ["memory", "memory"]
    with Engine(tiny_model("llama"), store) as engine:
        assert tiers(engine, ask(CHUNKS[0])) == ["disk"]
        engine.prefetch(CHUNKS[:2])
        assert tiers(engine, ask(*CHUNKS[:2])) == ["memory", "ahead"]
        assert tiers(engine, ask(*CHUNKS[:2])) == ["memory", "memory"]


def test_kv_on_disk_that_is_read_layer_by_layer_has_no_time_of_its_own(tmp_path):
    store = StoreConfig(path=str(tmp_path), sequence_bytes=0, pipelined=True)
    with Engine(tiny_model("llama"), store) as engine:
        engine.encode(CHUNKS, context=None)
    with Engine(tiny_model("llama"), store) as engine:
        trace = checked(engine.generate(ask(*CHUNKS), method="auto", max_tokens=2))
    assert {(one.origin.tier, one.origin.load_ms) for one in chunks(trace)} == {("disk", None)}


@pytest.mark.parametrize("method", ["full", "prefix", "reuse", "auto", "cacheblend"])
def test_a_chats_next_turn_takes_what_was_said_before(method):
    engine = Engine(tiny_model("llama"), StoreConfig())
    engine.encode(CHUNKS, prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
    first = engine.generate(ask(*CHUNKS, *CHUNKS), method=method, max_tokens=4)
    checked(first)
    said = [
        *ask(*CHUNKS, *CHUNKS),
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    second = engine.generate(said, method=method, max_tokens=4)
    trace = checked(second)
    assert second.report.kept_tokens > 100
    kept = [part for part in trace.parts if part.origin and part.origin.tier == "kept"]
    assert sum(part.counts[Kind.IN_PLACE] for part in kept) > 50


def test_harvested_chunks_say_so():
    with Engine(tiny_model("llama"), StoreConfig(harvest=True, write_back=False)) as engine:
        engine.register(CHUNKS)
        engine.generate(ask(*CHUNKS), method="reuse", max_tokens=2)
        trace = checked(engine.generate(ask(*CHUNKS[::-1]), method="auto", max_tokens=2))
    assert [part.origin.tier for part in chunks(trace)] == ["harvest"] * 3


def test_nothing_is_missed_where_no_kv_was_asked_for(filled):
    with Engine(tiny_model("qwen3_5"), NEW_PROMPTS) as hybrid:
        hybrid.encode(CHUNKS)
        made = [hybrid.generate(ask(*CHUNKS), max_tokens=2)]
    prompts = [ask(*CHUNKS), ask(*CHUNKS[::-1])]
    made += filled.generate_batch(prompts, max_tokens=2, method="full")
    assert not any(checked(one).parts for one in made)


def test_prompts_that_are_answered_together_have_their_own(filled):
    prompts = [ask(*CHUNKS), ask(*CHUNKS[::-1]), ask(), ask(*CHUNKS), ask(CHUNKS[2])]
    for made, prompt in zip(filled.generate_batch(prompts, max_tokens=8), prompts, strict=True):
        assert checked(made).text == filled.tokenization.template.render(prompt).text


@pytest.mark.parametrize("layout", ["schema", "compact"])
def test_prompts_of_schemas_have_text_and_modules(layout):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    for method in ("reuse", "auto"):
        trace = checked(engine.generate(hills(trip(layout, "head")), method=method, max_tokens=2))
        assert "A trip of 31 days to see the hills (not the high)" in trace.text.replace("\n", " ")
        assert trace.text.startswith("<|im_start|>system\nYou plan journeys.")
        names = {part.name: text_of(trace, part) for part in trace.parts}
        assert "Spend little." in names["budget"]
        assert "the hills" in names["plan/hills"]
        tiers = {part.origin.tier for part in trace.parts if part.name}
        assert tiers == {"new" if method == "reuse" else "memory"}


def test_llama_cpp_is_traced_as_well(tmp_path):
    path = str(write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F32))
    with Engine(load_llama_cpp(path, threads=1), NEW_PROMPTS) as engine:
        engine.encode(CHUNKS, context=None)
        for method in ("full", "prefix", "reuse", "auto"):
            prompt = "\n\n".join([*CHUNKS, "Why?"])
            trace = checked(engine.generate(prompt, method=method, max_tokens=2))
            assert trace.text == prompt
            assert (trace.counts[Kind.REPAIRED] > 0) == (method == "auto")


def test_a_stream_has_none_before_its_prompt_is_prefilled_and_no_tensor_in_it(filled):
    stream = filled.stream(ask(*CHUNKS), max_tokens=4)
    assert stream.trace is None
    next(stream)
    trace = stream.trace
    stream.close()
    assert b"torch" not in pickle.dumps(trace)


@pytest.fixture
def made(monkeypatch):
    """The profiles that were read, and the traces that were made."""
    seen = []

    def watched(owner, name):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: seen.append(name) or inner(*given))

    watched(tracing, "Trace")
    watched(tracing, "kept_profile")
    return seen


def test_an_answer_nobody_asks_about_has_no_trace_made_and_no_profile_read(filled, made):
    generation = filled.generate(ask(*CHUNKS), max_tokens=2)
    filled.generate_batch([ask(), ask(CHUNKS[0])], max_tokens=2)
    stream = filled.stream(ask(*CHUNKS), max_tokens=2)
    lookup = Lookup([], [], "", 0.0, Clock())
    asked = AnswerStream(stream, "Why?", (), lookup, Tools(filled.tokenization).growing())
    assert "".join(asked) == asked.answer.text
    answer = asked.answer
    assert not made
    assert answer.trace.text == filled.tokenization.template.render(ask(*CHUNKS)).text
    assert generation.trace is generation.trace
    assert made == ["kept_profile", "Trace"] * 2


def test_a_trace_is_made_behind_the_engine_without_what_it_held(monkeypatch):
    held, take = [], Workspace.take
    monkeypatch.setattr(
        Workspace,
        "take",
        lambda *given: (buffer := take(*given), held.append(weakref.ref(buffer)))[0],
    )
    model = tiny_model.__wrapped__("llama")  # else it is cached
    held.append(weakref.ref(model))
    with Engine(model, StoreConfig()) as engine:
        generation = engine.generate(ask(*CHUNKS), max_tokens=2)
        text = engine.tokenization.template.render(ask(*CHUNKS)).text
    del model, engine
    gc.collect()
    assert len(held) > 1
    assert not any(one() for one in held)
    sent = pickle.dumps(generation)
    assert b"tokenizer" not in sent
    assert checked(pickle.loads(sent)) == checked(generation)
    assert generation.trace.text == text
