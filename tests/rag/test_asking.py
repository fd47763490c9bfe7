"""Questions to an index: what is asked, what is counted, what is said of the answer."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from indexes import WordEmbedding

from cached_rag import AnswerStream, CachedRAG, ConfigError, Engine, Grammar, Hit
from cached_rag.backends.chat_template import ChatTemplate
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.rag.asking import NOTHING_FOUND


@pytest.fixture
def rag(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, chunk in zip("abc", CHUNKS, strict=True):
        (folder / f"{name}.txt").write_text(f"About {name}\n\n{chunk}")
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    options = {"embedding": WordEmbedding(), "chunk_tokens": 128}
    with engine, CachedRAG.open(tmp_path / "index", engine=engine, **options) as opened:
        opened.ingest(folder, progress=False)
        yield opened


@pytest.fixture
def calls(monkeypatch):
    """Names of tokenisation's methods as they are called, and what they are given."""
    seen = []
    for owner, name in ((ChatTemplate, "render"), (Tokenization, "tokenize")):
        own = getattr(owner, name)

        def counted(self, what, _own=own, _name=name, **options):
            seen.append((_name, what))
            return _own(self, what, **options)

        monkeypatch.setattr(owner, name, counted)
    return seen


def test_a_prompt_is_rendered_once_and_tokenised_once(rag, calls):
    rag.ask("copper", k=1, max_tokens=2)
    assert [name for name, _ in calls] == ["render", "tokenize"]


def test_times_count_from_the_question(rag, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("cached_rag.engine.report.time.perf_counter", lambda: now[0])

    def passing(owner, name, seconds):
        own = getattr(owner, name)

        def slow(*arguments, **options):
            now[0] += seconds
            return own(*arguments, **options)

        monkeypatch.setattr(owner, name, slow)

    passing(rag.embedder, "embed", 5)
    passing(rag.engine.tokenization.template, "render", 7)
    report = rag.ask("copper", max_tokens=2).report
    assert (report.search_ms, report.ttft_ms, report.total_ms) == (5000, 12000, 12000)
    report = rag.engine.generate([{"role": "user", "content": "Why?"}], max_tokens=2).report
    assert (report.search_ms, report.ttft_ms) == (0, 7000)


QUESTION = "Why does copper turn green in the air?"
GREEDY = {"k": 2, "max_tokens": 6}


async def test_questions_in_an_event_loop_get_the_same_answers(rag):
    wanted = rag.ask(QUESTION, **GREEDY)
    answers = await asyncio.gather(*(rag.aask(QUESTION, **GREEDY) for _ in range(3)))
    assert [answer.text for answer in answers] == [wanted.text] * 3
    assert answers[0].sources == wanted.sources
    assert all(isinstance(hit, Hit) for hit in answers[0].sources)
    assert answers[0].report.output_tokens == wanted.report.output_tokens
    stream = await rag.astream(QUESTION, **GREEDY)
    assert isinstance(stream, AnswerStream)
    assert "".join([piece async for piece in stream]) == stream.answer.text == wanted.text
    assert await (await rag.astream(QUESTION, **GREEDY)).atext() == wanted.text


async def test_the_search_does_not_block_the_event_loop(rag, monkeypatch):
    has_gone_on = threading.Event()
    own = rag.embedder.embed

    def patient(texts):
        assert has_gone_on.wait(60)
        return own(texts)

    monkeypatch.setattr(rag.embedder, "embed", patient)
    task = asyncio.create_task(rag.aask(QUESTION, **GREEDY))
    await asyncio.sleep(0)
    has_gone_on.set()
    assert (await task).text


async def test_who_stops_asking_stops_the_generation(rag):
    stream = await rag.astream(QUESTION, k=2, max_tokens=200)
    pieces = stream.apieces()
    first = await anext(pieces)
    await pieces.aclose()
    assert stream.answer.text == first
    assert rag.ask(QUESTION, **GREEDY).text  # nothing is in the way of the next


def test_several_first_questions_load_one_engine(rag, monkeypatch):
    made, engine = [], rag.engine
    both, is_second = threading.Barrier(2), threading.Event()

    def load(*_, **__):
        if made:
            is_second.set()
        made.append(1)
        is_second.wait(0.5)  # the other one has time to come here, too
        return engine

    def ask():
        both.wait(60)
        unloaded.ask(QUESTION, **GREEDY)

    monkeypatch.setattr(Engine, "load", load)
    with CachedRAG.open(rag.path, embedding=WordEmbedding()) as unloaded:
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1


def prompts_in(calls):
    return [what.text for name, what in calls if name == "tokenize"]


def test_a_follow_up_knows_what_was_asked_and_answered(rag, calls):
    first = rag.ask(QUESTION, **GREEDY)
    again = rag.ask("And why so slowly?", history=[first], **GREEDY)
    prompt = prompts_in(calls)[-1]
    order = [prompt.index(text) for text in (CHUNKS[1], QUESTION, first.text, "so slowly?")]
    assert order == sorted(order)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.text},
    ]
    spelt = rag.ask("And why so slowly?", history=messages, **GREEDY)
    assert (spelt.text, prompts_in(calls)[-1]) == (again.text, prompt)
    third = rag.ask("Is it?", history=[first, again], **GREEDY)
    assert [third.question, again.question] == ["Is it?", "And why so slowly?"]
    assert prompts_in(calls)[-1].count("Question: ") == 3


def test_a_follow_up_finds_what_was_spoken_of(rag):
    first = rag.ask("Who lit the lamp of the lighthouse every evening?", **GREEDY)
    (lost,) = rag.search("How long?", 1)
    (found,) = rag.search("How long?", 1, history=[first])
    assert not lost.source.endswith("a.txt")
    assert found.source == first.sources[0].source
    assert found.source.endswith("a.txt")
    second = rag.ask("How long?", history=[first], **GREEDY)
    assert second.sources[0] == rag.search("How long?", 1, history=[first])[0]


def test_a_follow_up_is_searched_before_what_was_asked_earlier(rag):
    """Models read the beginning only, and an earlier question may be long."""
    history = [{"role": "user", "content": asked} for asked in ("One?", "Two?", "Three?")]
    answer = rag.ask("Four?", history=history, **GREEDY)
    assert answer.searched == "Four?\nThree?\nTwo?"


def test_a_follow_ups_chunks_come_from_cache_behind_the_same_beginning(rag, calls):
    first = rag.ask(QUESTION, **GREEDY)
    again = rag.ask("And why?", history=[first], **GREEDY)
    assert (again.report.modules_hit, again.report.modules_missed) == (2, 0)
    assert again.report.cached_tokens >= first.report.cached_tokens
    head = rag._asking().prompts.head().text
    assert all(prompt.startswith(head) for prompt in prompts_in(calls))
    one, other = prompts_in(calls)
    assert [hit.text for hit in again.sources] == [hit.text for hit in first.sources]
    assert other.startswith(one)  # so KV of whole beginnings serves, too


def test_a_history_of_something_else_is_refused(rag):
    for turn in ({"role": "system", "content": "x"}, {"role": "user", "content": ["x"]}):
        with pytest.raises(ConfigError, match="a turn of the history"):
            rag.ask(QUESTION, history=[turn])
    with pytest.raises(ConfigError, match="a turn of the history"):
        rag.ask(QUESTION, history=["What was asked?"])
    for alone in (rag.ask(QUESTION, **GREEDY), "What was asked?", {"role": "user"}):
        with pytest.raises(ConfigError, match=r"such as \[answer\]"):
            rag.ask(QUESTION, history=alone)


def test_long_titles_are_cut_where_hits_are_printed():
    for title, shown in (("a" * 60, "a" * 60), ("\u6f22" * 61, "\u6f22" * 60 + " ...")):
        assert str(Hit("text", "s", title, 0, 0.5)) == f"0.50  s #0  {shown}"


def test_what_is_printed_is_short_and_hides_nothing(rag):
    answer = rag.ask(QUESTION, **GREEDY)
    best = answer.sources[0]
    assert str(best) == f"{best.score:.2f}  docs/b.txt #0  {best.title}"
    assert repr(answer.sources[:1]) == f"(<Hit {best.score:.2f} docs/b.txt #0 {best.title!r}>,)"
    assert CHUNKS[1] in best.text
    assert str(answer) == answer.text
    assert repr(answer) == f"<Answer {answer.text!r}, 2 sources>"


def test_a_notebook_shows_an_answer_with_its_sources_and_nothing_of_it_is_html(rag):
    rag.add_texts({"<b>bold</b>": "<script>alert(1)</script> copper"}, progress=False)
    answer = replace(
        rag.ask(QUESTION, where={"source": "<b>bold</b>"}, **GREEDY), text="<img src=x>"
    )
    shown = answer._repr_html_()
    assert "&lt;img src=x&gt;" in shown
    assert "&lt;b&gt;bold&lt;/b&gt; #0" in shown
    assert answer.report.to_line() in shown
    assert not re.search(r"<(img|b|script)\b", shown)


def test_sources_below_a_score_are_left_out(rag):
    best, second = rag.search(QUESTION, 2)
    between = (best.score + second.score) / 2
    assert rag.search(QUESTION, 2, min_score=between) == [best]
    answer = rag.ask(QUESTION, min_score=between, **GREEDY)
    assert (answer.sources, answer.report.notes) == ((best,), [])
    assert rag.ask(QUESTION, **GREEDY).sources == (best, second)


def test_an_answer_without_sources_says_so(rag, calls):
    answer = rag.ask(QUESTION, min_score=1.0, answer_anyway=True, **GREEDY)
    assert answer.sources == ()
    assert "no chunk reaches min_score" in answer.report.notes[0]
    assert f"user\nQuestion: {QUESTION}" in prompts_in(calls)[-1]
    assert rag.search(QUESTION, min_score=1.0) == []


class Embedding(WordEmbedding):
    """Gives what a test says, made of the right vectors."""

    def __init__(self, gives):
        self.gives = gives

    def embed(self, texts):
        return self.gives(super().embed(texts))


@pytest.mark.parametrize(
    "wrong",
    [
        *(lambda v: v[1:], lambda v: v * np.nan, lambda v: v[0], lambda v: ["a"] * len(v)),
        *(lambda v: None, lambda v: [[1.0], [1.0, 2.0]]),
    ],
)
def test_vectors_that_are_none_are_refused(rag, monkeypatch, wrong):
    monkeypatch.setattr(type(rag._folder), "embedder", Embedding(wrong))
    with pytest.raises(ConfigError, match="vectors of finite numbers"):
        rag.search(QUESTION)


def test_lists_and_vectors_of_any_length_are_taken_and_scores_stay_cosines(rag, monkeypatch):
    best = rag.search(QUESTION)[0]
    for gives in (lambda v: 9 * v, lambda v: v.tolist(), torch.from_numpy):
        monkeypatch.setattr(type(rag._folder), "embedder", Embedding(gives))
        assert rag.search(QUESTION)[0].score == pytest.approx(best.score, abs=1e-6)
    longer = Embedding(lambda v: np.pad(v, ((0, 0), (0, 1))))
    monkeypatch.setattr(type(rag._folder), "embedder", longer)
    with pytest.raises(ConfigError, match="vectors of 64 numbers, and the question's has 65"):
        rag.search(QUESTION)


def test_a_question_without_sources_is_declined_and_no_model_is_asked(rag, calls):
    before = len(prompts_in(calls))
    nothing = {"min_score": 1.0, **GREEDY}
    answer = rag.ask(QUESTION, **nothing)
    assert (answer.text, answer.sources) == (NOTHING_FOUND, ())
    report = answer.report
    assert (report.prompt_tokens, report.output_tokens) == (0, 0)
    assert 0 < report.search_ms <= report.ttft_ms == report.total_ms
    assert "no chunk reaches min_score" in answer.report.notes[0]
    assert rag.ask(QUESTION, where={"source": "nowhere/*"}, **GREEDY).text == NOTHING_FOUND
    assert list(rag.stream(QUESTION, **nothing)) == [NOTHING_FOUND]
    assert asyncio.run(rag.aask(QUESTION, **nothing)).text == NOTHING_FOUND
    chat = rag.chat(**nothing)
    assert chat.ask(QUESTION).text == NOTHING_FOUND
    assert [turn.text for turn in chat.history] == [NOTHING_FOUND]
    assert len(prompts_in(calls)) == before
    with pytest.raises(ConfigError, match="form that was asked for cannot say so"):
        rag.ask(QUESTION, grammar=Grammar.json(), **nothing)
    dropped = rag.stream(QUESTION, **nothing)
    dropped.close()
    assert (list(dropped), dropped.stream.finish_reason) == ([], "stop")


def test_a_chat_goes_on_from_chunks_that_it_has(rag):
    best = rag.search(QUESTION, 1)[0]
    chat = rag.chat(min_score=best.score - 1e-3, condense=False, **GREEDY)
    assert chat.ask(QUESTION).sources == (best,)
    assert chat.ask("Xylophone zebra quixotic?").text != NOTHING_FOUND


@pytest.mark.parametrize("way", ["search", "ask", "stream", "chat"])
@pytest.mark.parametrize("bad", [{"k": 1000}, {"k": 0}, {"min_score": 5}, {"min_score": -1.5}])
def test_numbers_out_of_range_are_refused(rag, way, bad):
    call = rag.chat if way == "chat" else partial(getattr(rag, way), QUESTION)
    with pytest.raises(ConfigError, match=r"k must be 1 to 100|min_score must be -1 to 1"):
        call(**bad)


def test_a_search_loads_no_language_model(rag, tmp_path):
    with CachedRAG.open(tmp_path / "index", embedding=WordEmbedding()) as other:
        assert other.search(QUESTION, 2) == rag.search(QUESTION, 2)
        assert other.loaded is None


def test_a_question_about_something_else_says_so(rag):
    answer = rag.ask("Xylophone zebra quixotic?", **GREEDY)
    assert answer.sources[0].score < 0.25
    (note,) = answer.report.notes
    assert note.startswith(
        f"the nearest chunk is hardly about this (score {answer.sources[0].score:.2f})"
    )
    assert rag.ask(QUESTION, **GREEDY).report.notes == []


def test_a_part_number_that_no_chunk_has_is_named(rag, tmp_path):
    (tmp_path / "parts.txt").write_text("Spare parts\n\nThe valve TX-245 costs 70 EUR a piece.")
    rag.ingest(tmp_path / "parts.txt", progress=False)
    assert rag.ask("valve (TX-245) costs EUR a piece, spare parts 1?", **GREEDY).report.notes == []
    for asked in ("valve 弁TX-245の圧力は\uff1f", "\u201cTX\u2011245\u201d", "valve TX-245의"):
        assert "no chunk" not in "".join(rag.ask(asked, **GREEDY).report.notes)
    (note,) = rag.ask("valve TX-999 costs EUR a piece, spare parts?", **GREEDY).report.notes
    assert note.startswith("no chunk that was found has 'TX-999'; ")
