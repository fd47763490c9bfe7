"""MapReduce and MapRerank: what is asked, at the same time, and what it costs."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model

from cached_rag import BatchConfig, Engine, GenerationConfig
from cached_rag.evaluation import several
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.measure import read
from cached_rag.evaluation.prompts import messages

EXAMPLE = Example("1", "What turns green?", ("Copper",), tuple(CHUNKS))
CONFIG = GenerationConfig(method="full", max_tokens=8)
BATCH_MS = 1e9


class Clock:
    def total(self):
        return BATCH_MS


@pytest.fixture
def asked(monkeypatch):
    """Put the example's question in one of the ways; returns its reading and the map's prompts."""
    engine = Engine(tiny_model("llama"), NEW_PROMPTS, BatchConfig(shares=False))
    monkeypatch.setattr(several, "Clock", Clock)
    batches, reduced = [], []
    batch, prefill = engine.generate_batch, engine.prefill

    def generate_batch(prompts, config):
        batches.append((prompts, config, batch(prompts, config)))
        return batches[-1][2]

    def prefill_one(prompt, config):
        reduced.append(prompt)
        return prefill(prompt, config)

    monkeypatch.setattr(engine, "generate_batch", generate_batch)
    monkeypatch.setattr(engine, "prefill", prefill_one)

    def ask(way):
        reading = several.SEVERAL[way](engine, EXAMPLE, CONFIG, "Copper", False)
        (only,) = batches  # all documents in one batch, and nothing else
        return engine, reading, only, reduced

    return ask


def plain_tokens(engine):
    return engine.count_tokens(messages(CHUNKS, EXAMPLE.question, long=False))


def test_mapreduce_makes_one_prompt_of_summaries_made_at_the_same_time(asked):
    engine, reading, (prompts, config, answers), (reduced,) = asked("mapreduce")
    assert config.max_tokens > CONFIG.max_tokens  # a summary has room
    for chunk, prompt in zip(CHUNKS, prompts, strict=True):
        assert "Summarise" in prompt[0]["content"]
        assert prompt[1]["content"] == f"{chunk}\n\nQuestion: What turns green?"
    texts = [answer.text.strip() for answer in answers]
    assert all(texts)
    assert reduced == messages(texts, EXAMPLE.question, long=False)
    counts = [engine.count_tokens(prompt) for prompt in (*prompts, reduced)]
    assert reading.charged_recompute == pytest.approx(sum(counts) / plain_tokens(engine))
    assert BATCH_MS < reading.ttft_ms < 1.5 * BATCH_MS  # the batch once, and the last prefill
    assert reading.text == engine.generate(reduced, CONFIG).text


def test_maprerank_takes_the_answer_that_its_own_document_makes_likeliest(asked):
    engine, reading, (prompts, _, answers), _ = asked("maprerank")
    assert prompts == [messages([chunk], EXAMPLE.question, long=False) for chunk in CHUNKS]
    alone = [read(engine, prompt, CONFIG, "Copper") for prompt in prompts]
    assert [one.text for one in alone] == [answer.text for answer in answers]
    best = min(alone, key=lambda one: one.own_nll)
    worst = max(alone, key=lambda one: one.own_nll)
    assert (reading.text, reading.nll, reading.own_nll) == (best.text, best.nll, best.own_nll)
    assert reading.nll != pytest.approx(worst.nll, abs=1e-3)  # control: they differ
    counts = [engine.count_tokens(prompt) for prompt in prompts]
    assert reading.charged_recompute == pytest.approx(sum(counts) / plain_tokens(engine))
    assert reading.ttft_ms == BATCH_MS  # scores cost nothing
