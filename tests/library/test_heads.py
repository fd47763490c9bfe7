"""What recurs before a prompt's first module is reused, and new modules encoded behind it."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, tiny_model

from cached_rag import PRIMER, Engine, StoreConfig, primer
from cached_rag.library.matching import EncodedAfter, Heads

SYSTEM = "You answer from the documents, in one sentence."


def chat(*chunks, system=SYSTEM, question="which is it?"):
    content = "\n\n".join([*chunks, f"Question: {question}"])
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def ask(engine, *chunks, **options):
    answer = engine.generate(chat(*chunks, **options), max_tokens=2)
    engine.write_back.drain()
    return answer.report


def test_a_head_is_learned_before_different_modules_and_different_ends_only():
    heads = Heads(learned=1)
    assert not heads.learn((1, 2), "a", "x")
    assert not heads.learn((1, 2), "a", "y")  # a conversation goes on
    assert heads.learn((1, 2), "b", "y")
    assert heads.learn((1, 2), "a", "x")
    assert not heads.learn((3,), "a", "x")
    assert not heads.learn((3,), "b", "y")  # no room for another
    heads = Heads()
    assert not any(heads.learn((1, 2), chunk, "x") for chunk in "abcdef")  # one question about each
    assert heads.learn((1, 2), "a", "y")


@pytest.mark.parametrize("primers", [1, 3])
def test_what_is_learned_is_encoded_behind_as_many_primers_as_the_store_says(primers):
    with Engine(tiny_model("llama"), StoreConfig(primers=primers)) as engine:
        engine.register(CHUNKS)
        ask(engine, CHUNKS[0], CHUNKS[1])
        ask(engine, CHUNKS[1], CHUNKS[0], question="what is it?")
        behind = engine.library.encoded_after()
        assert {one.context for one in behind if one.context} == {primer(primers).name}
        ids = tuple(engine.tokenization.literal(CHUNKS[0]).ids)
        assert any(engine.library.shelf.holds(one, ids) for one in behind if one.context)


def test_a_question_before_its_documents_is_no_head(engine):
    """As `LLMChainExtractor` asks: about each document by itself, and all prompts end alike."""
    engine.register(CHUNKS)
    for question in ("Who?", "When?"):
        hits = [ask(engine, chunk, system=f"{SYSTEM} {question}").modules_hit for chunk in CHUNKS]
    assert hits == [1, 1, 1]
    assert all(len(behind.prefix_ids) < 5 for behind in engine.library.encoded_after())


def test_a_beginning_of_few_tokens_is_computed_and_a_longer_one_is_not(engine):
    """The token before lone chunks would save nothing, and its KV is rounded otherwise."""
    engine.encode(CHUNKS)
    report = engine.generate(chat(), method="prefix", max_tokens=1).report
    assert report.cached_tokens == 0
    [sink] = {one.prefix_ids for one in engine.library.encoded_after()}
    assert len(sink) == 1
    assert engine.library.shelf.holds(EncodedAfter(()), sink)
    head = engine.head(chat(CHUNKS[0]), CHUNKS[0])
    engine.encode(CHUNKS, head, context=None)
    again = engine.generate(chat(), method="prefix", max_tokens=1).report
    assert again.cached_tokens >= 8
    first = engine.generate(chat(CHUNKS[0]), method="prefix", max_tokens=1).report
    assert first.cached_tokens > again.cached_tokens  # a chunk right behind it is taken with it


def test_registered_texts_are_computed_once_and_then_behind_what_recurs(engine):
    engine.register(CHUNKS)
    first = ask(engine, CHUNKS[0], CHUNKS[1])
    assert (first.modules_hit, first.modules_missed) == (0, 2)
    assert 0 < first.missed_tokens <= first.prompt_tokens
    # Another first module and another question: the head recurs.
    second = ask(engine, CHUNKS[1], CHUNKS[0], question="what is it?")
    assert (second.modules_hit, second.modules_missed, second.missed_tokens) == (2, 0, 0)
    (learned,) = [b for b in engine.library.encoded_after() if len(b.prefix_ids) > 5]
    assert learned.context == PRIMER.name
    rendered = engine.tokenization.template.render(chat(CHUNKS[0])).text
    head = engine.tokenization.tokenizer.decode(learned.prefix_ids)
    assert rendered.startswith(head)
    assert len(head) >= rendered.index(CHUNKS[0]) - 4
    third = ask(engine, CHUNKS[0], CHUNKS[1], CHUNKS[2])
    assert (third.modules_hit, third.modules_missed) == (2, 1)
    assert third.cached_tokens > second.cached_tokens  # the head's, too
    library = engine.library
    new, old = (library.table.get(chunk).token_ids for chunk in (CHUNKS[2], CHUNKS[0]))
    assert library.shelf.holds(learned, new)
    assert not library.shelf.holds(learned, old)  # what has KV is not encoded a second time


def test_modules_behind_a_learned_head_are_exact_in_the_head(engine):
    engine.register(CHUNKS)
    ask(engine, CHUNKS[0])
    ask(engine, CHUNKS[1], question="what is it?")
    report = engine.generate(chat(CHUNKS[2]), method="prefix", max_tokens=2).report
    assert report.cached_tokens > 10
    exact = engine.prefill(chat(CHUNKS[2]), method="prefix", max_tokens=2)
    exact.release()
    full = engine.prefill(chat(CHUNKS[2]), method="full", max_tokens=2)
    full.release()
    assert (exact.logits - full.logits).abs().max() <= 1e-4


def test_what_was_encoded_behind_a_given_head_is_left_alone(engine):
    prefix = engine.head(chat(CHUNKS[0]), CHUNKS[0])
    engine.encode(CHUNKS, prefix=prefix, context=None)
    before = engine.library.shelf.store.nbytes
    ask(engine, CHUNKS[0], CHUNKS[1])
    ask(engine, CHUNKS[2], CHUNKS[1])
    assert engine.library.shelf.store.nbytes == before
    assert len(engine.library.encoded_after()) == 1


@pytest.mark.parametrize("settings", [{"learn_prefixes": False}, {"write_back": False}])
def test_learning_can_be_switched_off(settings):
    engine = Engine(tiny_model("llama"), StoreConfig(**settings))
    engine.encode(CHUNKS, context=None)
    known = engine.library.encoded_after()
    for first in CHUNKS:
        engine.generate(chat(first), max_tokens=2)
        if engine.write_back:
            engine.write_back.drain()
    assert engine.library.encoded_after() == known
