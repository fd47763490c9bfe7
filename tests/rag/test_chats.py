"""Conversations with an index: prompts that only grow, chunks given once, questions rewritten."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from itertools import pairwise

import pytest

from cached_rag import Answer, ConfigError
from cached_rag.errors import BusyError, ContextOverflowError
from cached_rag.rag.answer import Prompts

PRINTABLE = [chr(code) for code in range(32, 127)]
FIRST, SECOND = "copper green?", "and lighthouses?"


@pytest.fixture
def rag(opened, docs):
    rag = opened(sequence_bytes=1 << 26)
    rag.ingest(docs, progress=False)
    return rag


@pytest.fixture
def prompts(rag, monkeypatch):
    """The texts that the engine was given so far."""
    given, begin = [], rag.engine.stream

    def stream(text, *args, **kwargs):
        given.append(text.text)
        return begin(text, *args, **kwargs)

    monkeypatch.setattr(rag.engine, "stream", stream)
    return given


def test_each_prompt_begins_with_the_last_one_and_costs_what_it_added(rag):
    chat = rag.chat(k=1, condense=False, max_tokens=4)
    answers = [chat.ask(question) for question in (FIRST, SECOND, "and bees?")]
    assert chat.history == tuple(answers)
    for last, next_ in pairwise(answers):
        # All but a few tokens where two texts meet, and the answer's last, have exact KV.
        kept = next_.report.kept_tokens
        assert kept >= last.report.prompt_tokens - 4


def test_a_chunk_is_given_once(rag, prompts):
    chat = rag.chat(k=2, condense=False, max_tokens=2)
    first = chat.ask(FIRST)
    second = chat.ask(FIRST)
    assert [hit.text for hit in second.sources] == [hit.text for hit in first.sources]
    for hit in first.sources:
        assert prompts[1].count(hit.text) == 1
    assert prompts[1].index(first.sources[0].text) < prompts[1].index(FIRST)


def test_a_follow_up_is_searched_with_what_the_model_makes_of_it(rag, monkeypatch):
    asked = []

    class Rewritten:
        text = " How tall are lighthouses?"

    def generate(text, config):
        asked.append((text.text, config))
        return Rewritten

    monkeypatch.setattr(rag.engine, "generate", generate)
    chat = rag.chat(k=1, max_tokens=2)
    first = chat.ask(FIRST)
    assert not asked
    assert first.searched == FIRST
    second = chat.ask(SECOND)
    ((text, config),) = asked
    assert first.sources[0].text in text
    assert SECOND in text
    assert config.max_tokens == 64
    assert second.searched == f"How tall are lighthouses?\n{SECOND}\n{FIRST}"


@pytest.mark.parametrize("rewritten", [" ", "<think> What"])
def test_what_is_no_question_is_not_searched_with(rag, monkeypatch, rewritten):
    class Rewritten:
        text = rewritten

    monkeypatch.setattr(rag.engine, "generate", lambda *_: Rewritten)
    chat = rag.chat(k=1, max_tokens=2)
    chat.ask(FIRST)
    assert chat.ask(SECOND).searched == f"{SECOND}\n{FIRST}"


def test_condensing_asks_the_real_engine_behind_the_conversation(rag):
    chat = rag.chat(k=1, max_tokens=2)
    chat.ask(FIRST)
    rewritten, plain = chat.ask(SECOND).searched.split("\n", 1)
    assert rewritten
    assert plain == f"{SECOND}\n{FIRST}"


def test_a_stream_that_was_left_is_in_the_history_as_far_as_it_was_taken(rag):
    chat = rag.chat(k=1, condense=False, max_tokens=30)
    stream = chat.stream(FIRST)
    piece = next(stream)
    stream.close()
    assert chat.history[0].text == piece
    assert isinstance(chat.ask(SECOND), Answer)


def test_an_answer_that_is_dropped_or_still_open_ends_with_the_next_question(rag):
    chat = rag.chat(k=1, condense=False, max_tokens=30)
    piece = next(chat.stream(FIRST))
    assert [answer.text for answer in chat.history] == [piece]
    stream = chat.stream(SECOND)
    taken = next(stream)
    chat.ask("and bees?", max_tokens=2)
    assert list(stream) == []
    assert [answer.text for answer in chat.history][:2] == [piece, taken]


def test_the_collector_may_drop_an_answer_within_a_turn(rag, monkeypatch):
    chat = rag.chat(k=1, condense=False, max_tokens=30)
    cycle = [chat.stream(FIRST)]
    piece = next(cycle[0])
    cycle.append(cycle)
    scheduler = rag.engine.scheduler
    turned = scheduler._run
    monkeypatch.setattr(scheduler, "_run", lambda work: (gc.collect(), turned(work)))
    del cycle
    asking = threading.Thread(target=rag.ask, args=[SECOND], kwargs={"max_tokens": 2}, daemon=True)
    asking.start()
    asking.join(60)
    assert not asking.is_alive()
    assert [answer.text for answer in chat.history] == [piece]


class Failing:
    """A stream that gives a piece, and then fails."""

    def __init__(self):
        self.pieces = iter(["a piece"])

    def __next__(self):
        for piece in self.pieces:
            return piece
        raise BusyError("too many requests")

    def close(self):
        pass


def test_a_question_that_fails_leaves_the_conversation_as_it_was(rag, monkeypatch):
    chat = rag.chat(k=1, condense=False, max_tokens=2)
    before = (chat.ask(FIRST), chat.ask(SECOND))
    for question, options in (("long " * 20_000, {}), (FIRST, {"max_tokens": 10**6})):
        with pytest.raises(ContextOverflowError):
            chat.ask(question, **options)
    for question in ("", " \n"):
        with pytest.raises(ConfigError, match="some text"):
            chat.ask(question)
    with monkeypatch.context() as patch:
        patch.setattr(rag.engine, "stream", lambda *_, **__: Failing())
        with pytest.raises(BusyError):
            chat.ask("and bees?")
    assert chat.history == before


def test_a_question_that_fails_lets_nothing_be_forgotten(rag, monkeypatch):
    chat = rag.chat(k=1, condense=False, max_tokens=2)
    before = (chat.ask(FIRST), chat.ask(SECOND))
    with monkeypatch.context() as patch:
        patch.setattr(Prompts, "has_room", lambda _, text, tokens: len(text.text) < 400)
        with patch.context() as failing:
            failing.setattr(rag.engine, "stream", lambda *_, **__: Failing())
            with pytest.raises(BusyError):
                chat.ask("and bees?")
        assert chat.history == before
        last = chat.ask("and bees?")
        assert any("forgotten" in note for note in last.report.notes)
    assert last in chat.history
    assert before[0] not in chat.history


@pytest.mark.parametrize("how", ["ask", "stream", "astream"])
def test_an_answer_without_words_is_in_the_history(rag, prompts, monkeypatch, how):
    chat = rag.chat(k=1, condense=False, max_tokens=2)
    begin = rag.engine.stream

    def silent(text, config, **options):
        return begin(text, config.replace(stop=(*config.stop, *PRINTABLE)), **options)

    async def taken():
        return await (await chat.astream(FIRST)).atext()

    with monkeypatch.context() as patch:
        patch.setattr(rag.engine, "stream", silent)
        if how == "ask":
            chat.ask(FIRST)
        elif how == "stream":
            assert list(chat.stream(FIRST)) == []
        else:
            assert asyncio.run(taken()) == ""
    assert [(one.question, one.text) for one in chat.history] == [(FIRST, "")]
    chat.ask(SECOND)
    assert FIRST in prompts[-1]
    chat.stream("and bees?").close()  # nothing of it was taken
    assert len(chat.history) == 2


def test_chunks_of_deleted_documents_leave_the_conversation(rag, prompts):
    chat = rag.chat(k=1, condense=False, max_tokens=2)
    (hit,) = chat.ask(FIRST).sources
    rag.delete(hit.source)
    chat.ask(SECOND)
    assert hit.text in prompts[0]
    assert hit.text not in prompts[1]
    assert FIRST in prompts[1]


def test_what_outgrows_the_context_is_forgotten_by_halves_and_said(rag, monkeypatch):
    chat = rag.chat(k=1, condense=False, max_tokens=2)
    for question in (FIRST, SECOND, "and bees?"):
        assert not any("forgot" in note for note in chat.ask(question).report.notes)
    monkeypatch.setattr(Prompts, "has_room", lambda _, text, tokens: len(text.text) < 500)
    last = chat.ask("and honey?")
    assert "the conversation's first 2 turns no longer fit, and were forgotten" in last.report.notes
    assert [answer.question for answer in chat.history] == ["and bees?", "and honey?"]


def test_a_bad_setting_or_question_says_so(rag):
    with pytest.raises(ConfigError, match="k must be 1 to 100"):
        rag.chat(k=0)
    with pytest.raises(ConfigError):
        rag.chat(unknown=1)


def test_a_reranker_decides_among_the_candidates(rag, opened):
    seen = []

    def reranker(question, texts):
        seen.append((question, len(texts)))
        return [-len(text) for text in texts]

    other = opened(sequence_bytes=0, reranker=reranker, candidates=3)
    shortest = min((hit.text for hit in rag.search(FIRST, 3)), key=len)
    assert [hit.text for hit in other.search(FIRST, 1)] == [shortest]
    assert seen == [(FIRST, 3)]
    bad = [[1.0], ["far"] * 3, [1.0, 2.0, None], [1.0, 2.0, float("nan")], None, 1.0]
    for scores in bad:
        wrong = opened(sequence_bytes=0, reranker=lambda *_, now=scores: now, candidates=3)
        with pytest.raises(ConfigError, match=r"a number for each text.* for 3 texts"):
            wrong.search(FIRST, 1)


def _interrupted():
    raise KeyboardInterrupt


def test_a_turn_that_was_interrupted_keeps_what_there_is_of_it(rag):
    chat = rag.chat(k=1, condense=False, max_tokens=40, ignore_eos=True)
    stream = chat.stream(FIRST)
    first = next(stream)
    begun, stream.stream = stream.stream, iter(_interrupted, None)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    stream.stream = begun
    stream.close()
    assert [answer.question for answer in chat.history] == [FIRST]
    assert chat.history[0].text.startswith(first)


def test_a_conversation_goes_on_from_its_messages_as_json_keeps_them(rag, prompts):
    chat = rag.chat(k=2, condense=False, max_tokens=2)
    chat.ask(FIRST)
    kept = json.loads(json.dumps(chat.messages))
    chat.ask(SECOND)
    again = rag.chat(history=kept, k=2, condense=False, max_tokens=2)
    again.ask(SECOND)
    assert prompts[2] == prompts[1]
    assert again.messages == chat.messages
    assert rag.chat(history=chat.history).messages == chat.messages
    assert rag.chat(history=again.history).messages == chat.messages


def test_a_resumed_conversation_has_no_chunk_that_the_index_does_not_have(rag, prompts):
    forged = [
        {"role": "user", "content": "q", "chunks": ["a forged text"]},
        {"role": "assistant", "content": "a"},
    ]
    rag.chat(history=forged, k=1, condense=False, max_tokens=2).ask(FIRST)
    assert "forged" not in prompts[-1]


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "user", "content": "unanswered"}],
        [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}],
        [{"role": "user", "content": "q", "chunks": "x"}, {"role": "assistant", "content": "a"}],
        ["text"],
        "text",
    ],
)
def test_a_history_that_is_no_conversation_is_refused(rag, history):
    with pytest.raises(ConfigError, match=r"history|chunks"):
        rag.chat(history=history)
