"""Prompts that are repaired while others run: in pieces, several in a pass, and nobody notices."""

from __future__ import annotations

import pytest
from conftest import NEW_PROMPTS, tiny_model
from crowd import ASKED, DOCUMENTS, begun
from doubles import Recording

from cached_rag import BatchConfig, Engine, StoreConfig

TEXTS = [f"{n}. {DOCUMENTS[n % 2][: len(DOCUMENTS[0]) // 2]}" for n in range(4)]


@pytest.fixture
def model():
    return Recording(tiny_model("llama"))


def known(model, **batch):
    """An engine that knows the documents."""
    engine = Engine(model, NEW_PROMPTS, BatchConfig(**batch))
    engine.encode(TEXTS, context=None)
    return engine


def over(*numbers):
    """A prompt over these documents."""
    return "\n\n".join([*(TEXTS[n] for n in numbers), "Who met whom?"])


def test_scheduler_repairs_a_prompt_between_the_tokens_of_others(model):
    """A long prompt under `auto` gives every running answer a token in every step."""
    engine = known(model, prefill_tokens=140)
    prompt, options = over(0, 1, 2, 3), {"max_tokens": 8, "method": "auto"}
    expected = engine.generate(prompt, **options)
    settings = {"max_tokens": 60, "temperature": 5.0, "ignore_eos": True, "drafts": False}
    others = [engine.stream(f"Why {word}?", seed=1, **settings) for word in ("so", "not")]
    for stream in others:
        next(stream)
    model.steps.clear()
    counts = [len(stream.token_ids) for stream in others]
    stream = engine.stream(prompt, **options)
    stream.start()
    turns = 0
    while not stream.report.ttft_ms:
        engine.scheduler.turn()
        turns += 1
        assert [len(s.token_ids) for s in others] == [count + turns for count in counts]
    assert turns == len(model.steps) > 2
    assert all(rows[:2] == [1, 1] and sum(rows) <= 2 + 140 for rows in model.steps)
    steps = model.steps[:turns]
    report = stream.result().report
    assert stream.result().token_ids == expected.token_ids
    assert sum(sum(rows[2:]) for rows in steps) > 90
    for name in ("cached_tokens", "recomputed_tokens", "modules_hit", "method"):
        assert getattr(report, name) == getattr(expected.report, name)
    assert report.charged_recompute >= expected.report.charged_recompute > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("method", ["auto", "epic", "prefix", "reuse", "cacheblend", "full"])
def test_prompts_that_are_repaired_in_a_crowd_answer_as_alone(family, method):
    model = Recording(tiny_model(family))
    engine = known(model, prefill_tokens=48)
    prompts = [over(0, 1), over(2, 1, 3), over(3), over(1, 0, 2, 3), ASKED[5]]
    options = {"max_tokens": 6, "method": method}
    alone = [engine.generate(prompt, **options) for prompt in prompts]
    assert max(len(rows) for rows in model.steps) == 1
    together = engine.generate_batch(prompts, **options)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert max(len(rows) for rows in model.steps) > 2
    assert engine.scheduler.nbytes == engine.scheduler.num_running == 0


def test_prompts_that_are_repaired_share_a_pass(model):
    engine = known(model)
    options = {"max_tokens": 4, "method": "auto"}
    model.steps.clear()
    answers = engine.generate_batch([over(0, 1), over(2, 3)], **options)
    assert all(a.report.recomputed_tokens for a in answers)
    assert len(model.steps[0]) == 2
    assert min(model.steps[0]) > 16


def test_pieces_wait_for_kv_that_is_still_loaded(model, tmp_path):
    store = StoreConfig(str(tmp_path), pipelined=True, sequence_bytes=0)
    prompts, options = [over(0, 1), over(2, 3)], {"max_tokens": 6, "method": "auto"}
    expected = [known(model).generate(prompt, **options).token_ids for prompt in prompts]
    with Engine(model, store) as engine:
        engine.encode(TEXTS, context=None)
    model.steps.clear()
    with Engine(model, store) as engine:
        answers = engine.generate_batch(prompts, **options)
    assert [answer.token_ids for answer in answers] == expected
    assert [answer.report.modules_hit for answer in answers] == [2, 2]
    assert min(model.steps[0]) > 16


def test_a_prompt_that_nobody_runs_beside_is_repaired_in_one_pass(model):
    engine = known(model, prefill_tokens=8)
    model.steps.clear()
    engine.generate(over(0, 1), method="anchorflow", max_tokens=4, drafts=False, ignore_eos=True)
    assert model.steps == [[1]] * 3


def test_who_is_cancelled_or_forgotten_while_it_is_repaired_leaves_nothing(model):
    engine = known(model, prefill_tokens=16)
    first = engine.stream("Why?", max_tokens=40, temperature=5.0, seed=2, ignore_eos=True)
    next(first)
    options = {"max_tokens": 4, "method": "auto"}
    second, third = begun(engine, [over(0, 1, 2), over(3, 2, 0)], **options)
    engine.scheduler.turn()
    engine.scheduler.turn()
    assert not second.report.ttft_ms
    assert not third.report.ttft_ms
    second.cancel()
    assert engine.scheduler.num_running == 2
    engine.forget(TEXTS[3:])
    twin = known(tiny_model("llama"))
    assert third.result().token_ids == twin.generate(over(3, 2, 0), **options).token_ids
    assert list(second) == []
    first.close()
    assert engine.scheduler.nbytes == engine.scheduler.num_running == 0


def test_a_piece_that_fails_fails_its_prompt_alone(model):
    engine = known(model, prefill_tokens=64)
    prompts, options = [over(0), over(2, 3, 1), over(1, 2)], {"max_tokens": 4, "method": "auto"}
    expected = [engine.generate(prompt, **options).token_ids for prompt in prompts]
    count = engine.count_tokens(prompts[1])

    def fails(batch):
        mine = [row for row in batch if row.slots and row.slots[-1] == count - 1]
        return RuntimeError("row") if mine else None

    assert count not in (engine.count_tokens(prompts[0]), engine.count_tokens(prompts[2]))
    model.fails = fails
    streams = begun(engine, prompts, **options)
    assert streams[0].result().token_ids == expected[0]
    with pytest.raises(RuntimeError, match="row"):
        streams[1].result()
    assert streams[2].result().token_ids == expected[2]
    assert engine.scheduler.nbytes == engine.scheduler.num_running == 0
