"""Retrieved texts that an application changed on their way into the prompt."""

from __future__ import annotations

import html
import json
import logging

import pytest
import torch
from conftest import NEW_PROMPTS, shuffled, tiny_model

from cached_rag import Engine, StoreConfig
from cached_rag.library import handed_over
from cached_rag.library.handed_over import RUN, is_like

LINES = [f"Line {n}: {shuffled(n)[:90]}. And {n * 7} more." for n in range(12)]
TEXT = "\n".join(LINES)
OTHER = "\n".join(map(shuffled, range(20, 26)))
QUESTION = "\n\nWhat is said of copper?"


@pytest.fixture
def engine():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as made:
        made.encode([TEXT, OTHER], context=None)
        yield made


def ask(engine, prompt, *retrieved, **options):
    engine.prefetch(retrieved)
    return engine.generate(prompt + QUESTION, max_tokens=4, **options)


def tokens(engine, text):
    return len(engine.tokenization.literal(text))


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (lambda text: text[:500], 0.95),
        (lambda text: text[300:], 0.9),
        (lambda text: f"... {text[200:900]} ...", 0.9),
        (lambda text: text[:400] + " [cut] " + text[420:], 0.85),
        (lambda text: html.escape(text[:450] + " < " + text[450:]), 0.85),
    ],
)
def test_what_is_left_of_a_changed_text_is_reused_and_said(engine, change, share):
    changed = change(TEXT)
    answer = ask(engine, changed, TEXT, method="reuse")
    assert answer.report.cached_tokens >= share * tokens(engine, changed)
    (note,) = answer.report.notes
    assert "not in the prompt as it was retrieved" in note
    assert "docs/langchain.md and docs/llama_index.md say" in note
    assert "they part at" in note
    assert "where the prompt has" in note
    unasked = ask(engine, changed, method="reuse").report  # known, and of use again
    assert unasked.cached_tokens == answer.report.cached_tokens
    assert unasked.notes == []


@pytest.mark.parametrize(
    "change", [str.lower, lambda text: text.replace("\n", " "), lambda text: text[: len(text) // 9]]
)
def test_where_nothing_can_be_reused_that_is_said(engine, change):
    report = ask(engine, change(TEXT), TEXT).report
    assert report.cached_tokens == 0
    (note,) = report.notes
    assert "none of the 1 texts that were retrieved before is in this prompt" in note
    assert ask(engine, "Something else.").report.notes == []


CJK = "".join(chr(0x4E00 + number * 37 % 5000) for number in range(400))


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        json.dumps,
        html.escape,
        lambda text: " ".join(text.split()),
        lambda text: text[: len(text) // 5],
        lambda text: "\n".join(f"{n}. **{line}**" for n, line in enumerate(text.split(". "))),
    ],
)
@pytest.mark.parametrize("text", [TEXT, CJK], ids=["words", "no words"])
def test_a_prompt_is_like_a_text_whatever_was_done_to_its_form(change, text):
    assert is_like(f"Answer from this: {change(text)}{QUESTION}", [OTHER, text])
    assert not is_like(f"Answer from this: {change(OTHER)}{QUESTION}", [CJK])


def test_a_prompt_about_something_else_is_not_spoken_of_and_what_was_retrieved_stays_awaited(
    engine,
):
    engine.prefetch([TEXT])
    for prompt in ("Write a haiku.", f"Write a haiku on this: {TEXT[10:40]}."):
        assert engine.generate(prompt, max_tokens=4).report.notes == []
    (note,) = engine.generate(f"{TEXT.lower()}{QUESTION}", max_tokens=4).report.notes
    assert "none of the 1 texts" in note
    again = engine.generate(f"{TEXT.lower()}{QUESTION}", max_tokens=4)
    assert again.report.notes == []  # each is spoken of once


def test_a_text_that_was_there_is_awaited_no_more(engine):
    assert ask(engine, TEXT, TEXT).report.notes == []
    assert engine.generate(f"{TEXT.lower()}{QUESTION}", max_tokens=4).report.notes == []


def test_a_text_that_is_there_as_it_was_retrieved_needs_no_note(engine):
    report = ask(engine, f"{TEXT}\n\n{OTHER}", TEXT, OTHER).report
    assert report.notes == []
    assert report.modules_hit == 2
    dropped = ask(engine, TEXT, TEXT, OTHER).report  # by a reranker
    assert dropped.notes == []


def test_parts_of_several_texts_stand_where_they_are(engine):
    prompt = f"{OTHER[:600]}\n\n{TEXT}\n\n{OTHER[620:]}"
    report = ask(engine, prompt, TEXT, OTHER, method="reuse").report
    assert report.modules_hit == 3
    assert report.cached_tokens >= 0.9 * tokens(engine, prompt)


def test_parts_that_are_recomputed_give_full_prefill(engine):
    prompt = f"Before. {TEXT[:500]} Between. {OTHER[250:]}{QUESTION}"
    engine.prefetch([TEXT, OTHER])
    full = engine.prefill(prompt, method="full")
    expected = full.logits.clone()
    full.release()
    engine.prefetch([TEXT, OTHER])
    part = engine.prefill(prompt, method="epic:recompute_ratio=1")
    assert part.plan.num_chunks == 2
    torch.testing.assert_close(part.logits, expected, atol=1e-4, rtol=0)
    part.release()
    engine.prefetch([TEXT, OTHER])
    stale = engine.prefill(prompt, method="reuse")
    assert not torch.allclose(stale.logits, expected, atol=1e-4)  # control
    stale.release()


def test_a_part_is_placed_as_the_same_tokens_of_the_whole(engine):
    engine.prefetch([TEXT])
    request = engine.prefill(TEXT[:500] + QUESTION, method="reuse")
    (place,) = request.plan.placements
    whole = engine.prefill(TEXT + QUESTION, method="reuse")
    (other,) = whole.plan.placements
    assert place.begin == other.begin == 0
    assert place.end >= RUN
    keys, expected = (one.buffer.keys[..., 1 : place.end - 5, :] for one in (request, whole))
    torch.testing.assert_close(keys, expected)
    request.release()
    whole.release()


def test_a_changed_text_without_kv_is_encoded_for_the_next_time():
    with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=0)) as engine:
        engine.register([TEXT])
        first = ask(engine, TEXT[:500], TEXT).report
        assert first.cached_tokens == 0
        assert first.modules_missed == 1
        engine.write_back.drain()
        assert ask(engine, TEXT[:500], TEXT, method="reuse").report.cached_tokens > 100


def test_a_warning_is_logged_once_for_each_cause(engine, caplog):
    with caplog.at_level(logging.WARNING, handed_over.__name__):
        for _ in range(3):
            ask(engine, TEXT[:500], TEXT)
        assert len(caplog.records) == 1
        ask(engine, TEXT.lower(), TEXT)
        assert len(caplog.records) == 2


def test_a_deleted_text_is_not_reused_in_parts_nor_from_prompts_with_parts():
    with Engine(tiny_model("llama"), StoreConfig(write_back=False)) as engine:
        engine.encode([TEXT], context=None)
        prompt = f"{TEXT[:700]}{QUESTION}"
        engine.prefetch([TEXT])
        assert engine.generate(prompt, max_tokens=4).report.cached_tokens > 0
        assert engine.generate(prompt, max_tokens=4).report.kept_tokens > 0
        engine.forget([TEXT])
        report = engine.generate(prompt, max_tokens=4).report
        assert report.cached_tokens == 0


def test_only_so_many_texts_are_remembered(engine, monkeypatch):
    monkeypatch.setattr(handed_over, "_MOST", 2)
    engine.library.handed_over = handed_over.HandedOver()
    engine.prefetch([TEXT])
    engine.prefetch([OTHER, "x" * 100])
    assert ask(engine, TEXT[:500]).report.cached_tokens == 0
    ask(engine, "Something else.", OTHER)  # which now came last, whatever is asked
    engine.prefetch([TEXT])
    assert ask(engine, OTHER[:700], method="reuse").report.cached_tokens > 0


def test_texts_that_are_too_short_to_be_known_are_not_missed(engine):
    assert ask(engine, "Short.", "Short.", "Also short.").report.notes == []


def test_what_was_retrieved_long_ago_is_not_spoken_of(engine, monkeypatch):
    monkeypatch.setattr(handed_over, "_SECONDS", -1.0)
    assert ask(engine, "Something else.", TEXT).report.notes == []
