"""What prompts that are answered at the same time share, and that nobody's answer shows it."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, FAMILIES, NEW_PROMPTS, ask, shuffled, tiny_model
from crowd import ASKED, DOCUMENTS, GREEDY, PARTS, SYSTEM, WORDS, alone, begun

from cached_rag import BatchConfig, Engine, StoreConfig
from cached_rag.library.sequences import MIN_SHARED

FAST = sorted(f for f in FAMILIES if tiny_model(f).can_batch)
# One of each kind of layers; each family moves keys in `tests/backends/test_exactness.py`.
MOVED = ("llama", "cohere", "gemma3", "gemma4", "lfm2", "llama4", "gpt_oss")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_prompts_that_begin_alike_answer_as_alone(family):
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    answers = engine.generate_batch(ASKED, **GREEDY)
    assert [answer.token_ids for answer in answers] == alone(family, ASKED, **GREEDY)
    shared = [answer.report.shared_kv_bytes for answer in answers]
    if family in FAST:
        token = engine.model.shapes.bytes_per_token
        counts = [engine.count_tokens(prompt) for prompt in (SYSTEM, f"{SYSTEM}\n{DOCUMENTS[0]}")]
        assert shared[0] == 0
        assert shared[1] // token >= counts[1]  # the document too
        assert all(count // token >= counts[0] for count in shared[1:])
        for answer in answers[1:]:
            report = answer.report
            copied = report.cached_tokens - report.shared_kv_bytes // token
            assert 0 <= copied < MIN_SHARED  # what is too short to be read for itself
            assert report.charged_recompute < 0.5
    else:
        assert not any(shared)


def test_what_is_shared_is_kept_once():
    def peak(*, shares):
        engine = Engine(tiny_model("llama"), NEW_PROMPTS, BatchConfig(shares=shares))
        streams = begun(engine, ASKED, **GREEDY, drafts=False)  # else the first ends too early
        for stream in streams:
            next(stream)
        count = engine.scheduler.nbytes // engine.model.shapes.bytes_per_token
        return count, ["".join(stream) for stream in streams]

    shared, copied = peak(shares=True), peak(shares=False)
    assert shared[1] == copied[1]
    sizes = [len(prompt) for prompt in ASKED]
    assert copied[0] >= sum(1024 * -(-(size + 8) // 1024) for size in sizes) // 4
    assert shared[0] < copied[0] * 0.6


def test_who_is_shared_from_may_leave_first():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    long = GREEDY | {"max_tokens": 24, "temperature": 5.0, "seed": 3}
    first = engine.stream(ASKED[0], **GREEDY)
    next(first)
    second = engine.stream(ASKED[1], **long)
    taken = next(second)
    first.close()
    others = engine.generate_batch(ASKED[2:4], **GREEDY)  # its memory must not be theirs
    assert [a.token_ids for a in others] == alone("llama", ASKED[2:4], **GREEDY)
    assert second.report.shared_kv_bytes > 0
    twin = Engine(tiny_model("llama"), NEW_PROMPTS)
    assert taken + "".join(second) == twin.generate(ASKED[1], **long).text


@pytest.mark.parametrize("family", MOVED)
def test_unrepaired_modules_are_shared(family):
    for method, options in (("reuse", {}), ("cacheblend", {"recompute_ratio": 1.0})):
        options |= {"method": method, "max_tokens": 6}
        together = Engine(tiny_model(family), NEW_PROMPTS).generate_batch(PARTS, **options)
        assert [answer.token_ids for answer in together] == alone(family, PARTS, **options)
        shared = [answer.report.shared_kv_bytes for answer in together]
        assert shared[0] == 0
        assert all(shared[1:])


def test_modules_are_shared_behind_different_beginnings():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode(DOCUMENTS, context=None)
    asked = [f"{opening}\n{DOCUMENTS[0]}\nWhy?" for opening in ("Read now", "Think now")]
    together = engine.generate_batch(asked, method="reuse", max_tokens=8)
    twin = Engine(tiny_model("llama"), NEW_PROMPTS, BatchConfig(shares=False))
    twin.encode(DOCUMENTS, context=None)
    assert [a.text for a in together] == [
        twin.generate(prompt, method="reuse", max_tokens=8).text for prompt in asked
    ]
    lengths = {engine.count_tokens(prompt) for prompt in asked}
    shares = [answer.report.shared_kv_bytes > 0 for answer in together]
    assert shares == [False, len(lengths) == 1]  # only at the same positions


def test_approximate_beginnings_are_not_passed_on():
    """A method's answer must not depend on who else asks."""
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode([SYSTEM], context=None)
    asked = [f"Read this. {SYSTEM}\nQuestion {n}?" for n in range(2)]
    alone = {
        method: engine.generate(asked[1], method=method, max_tokens=8).token_ids
        for method in ("full", "reuse")
    }
    for first in alone:
        for second in alone:
            streams = [
                engine.stream(prompt, method=method, max_tokens=8)
                for prompt, method in zip(asked, (first, second), strict=True)
            ]
            for stream in streams:
                stream.start()
            answer = [stream.result() for stream in streams][1]
            assert answer.token_ids == alone[second]
            assert (answer.report.shared_kv_bytes > 0) == (first == second)


def test_what_a_kept_prompt_computed_is_not_taken_for_a_chunk():
    """The first prompt's slots have what stands behind its own head, not the chunk's KV."""
    engine = Engine(tiny_model("llama"), StoreConfig(learn_prefixes=False, write_back=False))
    heads = [{"system": f"You answer brief{end}."} for end in ("ly", "lz")]
    asked, other = (ask(DOCUMENTS[0], **head) for head in heads)
    wanted = {"max_tokens": 4, "logprobs": 0, "drafts": False}
    expected = engine.generate(asked, method="full", **wanted).logprobs[-1].logprob
    engine.sequences.clear()
    engine.encode(DOCUMENTS, engine.head(asked, DOCUMENTS[0]), context=None)
    engine.generate(other, method="full", max_tokens=2)
    first = engine.stream(
        ask(*DOCUMENTS, **heads[1]), method="reuse", max_tokens=60, ignore_eos=True
    )
    next(first)
    assert first.report.kept_tokens > engine.count_tokens(DOCUMENTS[0])
    answer = engine.generate(asked, method="prefix", **wanted)
    first.close()
    assert answer.logprobs[-1].logprob == pytest.approx(expected, abs=1e-3)


def test_tenants_share_nothing():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    other = engine.tenant("other")
    assert other.scheduler is engine.scheduler
    streams = [*begun(engine, ASKED[:1], **GREEDY), *begun(other, ASKED[:2], **GREEDY)]
    answers = [stream.result() for stream in streams]
    assert [a.report.shared_kv_bytes > 0 for a in answers] == [False, False, True]
    engine.encode(CHUNKS[:1], context=None)
    prompt = f"{CHUNKS[0]} Why?"
    assert engine.generate(prompt, max_tokens=2).report.cached_tokens > 0
    assert other.generate(prompt, max_tokens=2).report.cached_tokens == 0
    other.close()
    assert engine.generate(prompt, max_tokens=2).report.cached_tokens > 0


def test_plain_prompts_and_shared_modules_use_the_same_slabs():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode(DOCUMENTS, context=None)
    asked = [(f"{DOCUMENTS[0]}\nQuestion {n}?", "reuse") for n in range(2)]
    asked += [(f"What is {word}, and why?", "full") for word in WORDS[1:4]]
    expected = [engine.generate(p, method=m, max_tokens=8).token_ids for p, m in asked]
    streams = [engine.stream(p, method=m, max_tokens=8) for p, m in asked]
    for stream in streams:
        stream.start()
    assert [stream.result().token_ids for stream in streams] == expected
    assert streams[1].report.shared_kv_bytes > 0


def test_short_beginnings_are_shared_by_those_who_come_together():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    head = SYSTEM[: len(SYSTEM) // 3]
    assert 130 < engine.count_tokens(head) < 250
    first = engine.stream("Why is it green?", max_tokens=60, temperature=5.0, seed=1)
    next(first)
    answers = engine.generate_batch([f"{head} {n}?" for n in range(3)], **GREEDY)
    assert [a.report.shared_kv_bytes > 0 for a in answers] == [False, True, True]


def test_what_comes_back_changed_is_not_exact(tmp_path):
    """A codec that loses digits makes a prompt's beginning its own."""
    engine = Engine(tiny_model("llama"), StoreConfig(path=str(tmp_path), codec="int8"))
    engine.encode(DOCUMENTS[:1], prefix=SYSTEM, context=None)
    asked = [f"{SYSTEM}{DOCUMENTS[0]}\nQuestion {n}?" for n in range(2)]
    streams = [
        engine.stream(prompt, method=method, max_tokens=4)
        for prompt, method in zip(asked, ("prefix", "full"), strict=True)
    ]
    for stream in streams:
        stream.start()
    answers = [stream.result() for stream in streams]
    assert answers[0].report.cached_tokens > 200
    assert answers[1].report.cached_tokens == 0
    engine.close()


def test_repaired_sequences_are_not_exact():
    engine = Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 26))
    engine.encode(DOCUMENTS, context=None)
    prompt = f"{DOCUMENTS[0]}\n{DOCUMENTS[1]}\nWhy?"
    engine.generate(prompt, max_tokens=2)
    engine.encode(DOCUMENTS[:1], prefix="", context=None)
    streams = [engine.stream(prompt, method=m, max_tokens=4) for m in ("auto", "full")]
    for stream in streams:
        stream.start()
    assert streams[0].result().report.modules_hit == 2
    assert streams[1].result().report.shared_kv_bytes == 0


# What README and docs/serving.md say of it --------------------------------------------------------

RULES = " ".join(f"Rule {n}: be brief and exact about number {n}." for n in range(8))
FACTS = [f"{shuffled(n)} {shuffled(n + 2)[::-1]}" for n in range(2)]


def shared_tokens(method, beginning, *texts):
    """Of three prompts over the same texts, the tokens that the second one shares."""
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode(FACTS, context=None)
    prompts = ["\n".join([beginning, *texts, f"Question {n}: why?"]) for n in range(3)]
    answers = engine.generate_batch(prompts, method=method, max_tokens=4)
    return answers[1].report.shared_kv_bytes // engine.model.shapes.bytes_per_token


@pytest.mark.parametrize("method", ["auto", "reuse", "full"])
def test_a_beginning_without_known_texts_is_shared(method):
    assert shared_tokens(method, RULES) >= 128


def test_chunks_are_shared_only_where_they_are_not_repaired():
    whole = shared_tokens("auto", RULES)
    head = shared_tokens("auto", RULES, *FACTS)
    assert 128 <= head <= whole  # what stands before the first chunk
    assert shared_tokens("auto", "Answer.", *FACTS) == 0
    for method in ("reuse", "full", "prefix"):
        assert shared_tokens(method, "Answer.", *FACTS) > 128
    assert shared_tokens("reuse", RULES, *FACTS) > head + 128
