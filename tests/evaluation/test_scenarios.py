"""Scenarios of `peers`: what is asked, what is counted, and who answers."""

from __future__ import annotations

import json
import sys
import types

import pytest
from conftest import CHUNKS, NEW_PROMPTS
from typer.testing import CliRunner

from cached_rag import ConfigError, Engine
from cached_rag.backends.prompt_text import Rendered
from docs.experiments.__main__ import app
from docs.experiments.answers import Peer, Transformers
from docs.experiments.peers import EVERYBODY, Means, Question, Sample, open_peers
from docs.experiments.peers.kvboost import KVBoost
from docs.experiments.peers.own import OwnEngine, TransformersPrefix
from docs.experiments.scenarios import Scenarios, bench_scenario, pays_after

ASKED = [
    (CHUNKS[:2], "Who lit the lamp?", "the keeper"),
    (CHUNKS[1:], "What turns green?", "copper"),
    (CHUNKS[::2], "Who reached the pole?", "a party"),
]


@pytest.fixture
def made(engine):
    return Scenarios(engine)


class Counting(Peer):
    """Knows how it was called; its answers take a time that is told."""

    about = "counting"

    def __init__(self, *totals, ids=(1, 2)):
        self.totals, self.ids = list(totals), ids
        self.told, self.texts = [], ()

    def learn(self, texts, head):
        self.texts, self.head = tuple(texts), head

    def answer(self, question, max_tokens):
        self.told.append(question)
        return Sample(self.totals[0] / 2, self.totals.pop(0), self.ids)

    def settle(self):
        self.told.append("settled")


def test_a_stream_is_known_beforehand_and_cold_is_not(made):
    stream, cold = (made.named(kind, "set", ASKED) for kind in ("stream", "cold"))
    assert stream.texts == tuple(CHUNKS)
    assert cold.texts == ()
    assert [q.ids for q in cold.questions] == [q.ids for q in stream.questions]
    for scenario, question in ((stream, stream.questions[0]), (stream, stream.questions[1])):
        assert question.prompt.text.startswith(scenario.head.text)
        assert "\n\n".join(ASKED[0][0]) in stream.questions[0].prompt.text


def test_a_document_is_the_same_for_all_questions(made):
    document = made.named("document", "set", ASKED)
    text = "\n\n".join(CHUNKS)
    assert all(text in question.prompt.text for question in document.questions)
    ends = [question.prompt.text.split(text)[1] for question in document.questions]
    assert [one for one, (_, asked, _) in zip(ends, ASKED, strict=True) if asked not in one] == []


def test_a_chat_grows_by_what_was_said(made):
    chat = made.named("chat", "set", ASKED)
    texts = [question.prompt.text for question in chat.questions]
    assert "the keeper" not in texts[0]
    assert "the keeper" in texts[1]
    assert [len(text) for text in texts] == sorted(len(text) for text in texts)
    with pytest.raises(ConfigError, match="no scenario 'dream'; there are cold"):
        made.named("dream", "set", ASKED)


def test_rows_are_paired_and_say_when_learning_has_paid(made, monkeypatch):
    stream = made.named("stream", "set", ASKED)
    slow, quick = Counting(9000, 400, 800), Counting(9000, 200, 200, ids=(1, 9))
    monkeypatch.setattr("docs.experiments.scenarios._seconds", lambda work: work() or 2.0)
    first, second = bench_scenario({"slow": slow, "quick": quick}, stream, 2)
    assert slow.told[::2] == list(stream.questions)
    assert slow.told[1::2] == ["settled"] * 3
    assert quick.texts == stream.texts
    assert quick.head == stream.head
    assert (first.speedup, second.speedup) == (1.0, 3.0)  # median of 2 and 4
    assert (second.total_ms, second.ttft_p50_ms) == (200, 100)
    assert second.agreement == 0.5
    assert second.ttft_p95_ms == 100  # one of those that were measured
    assert second.pays_after == 5  # 2 s at .4 s a question
    assert first.pays_after is None
    peers = {"slow": Counting(9, 400, 800), "full": Counting(9, 300, 500)}
    peers |= {"quick": Counting(9, 200, 200), "other": Counting(9, 200, 200)}
    peers["quick"].plain = "full"
    peers["other"].plain = "full@llama.cpp"  # which was not asked
    paid = {row.peer: row.pays_after for row in bench_scenario(peers, stream, 2)}
    assert (paid["quick"], paid["other"]) == (10, 5)  # at .2 s and at .4 s a question
    cold = made.named("cold", "set", ASKED)
    rows = bench_scenario({"one": Counting(1, 2, 3)}, cold, 2)
    assert (rows[0].learn_s, rows[0].pays_after) == (0, 0)


@pytest.mark.parametrize(
    ("learn", "won", "expected"), [(0.0, 5.0, 0), (3.0, 0.0, None), (3.0, 2.0, 2)]
)
def test_learning_pays_after(learn, won, expected):
    assert pays_after(learn, won) == expected


def test_transformers_with_its_last_prompt_kept_answers_as_without(model_folder):
    with Engine.load(model_folder, dtype="float32", device="cpu") as engine:
        chat = Scenarios(engine).named("chat", "set", ASKED)
        plain, keeps = Transformers(engine), TransformersPrefix(engine)
        computed = []
        keeps._model.register_forward_pre_hook(
            lambda _, __, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        for question in (*chat.questions, chat.questions[0]):
            computed.clear()
            sample = keeps.answer(question, 4)
            assert sample.token_ids == plain.answer(question, 4).token_ids
            assert len(sample.token_ids) == 4
            if question is chat.questions[1]:
                assert computed[0] < len(question.ids) / 2
    assert "last prompt kept" in keeps.about


def test_ours_learns_settles_and_closes_what_it_owns(model_folder, monkeypatch):
    with Engine.load(model_folder, dtype="float32", device="cpu", store=NEW_PROMPTS) as engine:
        peer = Means(engine, model_folder, 400, apart=True).make("reuse")
        assert isinstance(peer, OwnEngine)
        assert peer.engine is not engine
        assert peer.plain == "full"
        assert "no drafts" in peer.about
        assert peer.engine.settings.sequence_bytes > 0  # as users have it
        stream = Scenarios(engine).named("stream", "set", ASKED)
        peer.learn(stream.texts, stream.head)
        assert len(peer.engine.library.table) == 3
        asked = []
        generate = peer.engine.generate
        monkeypatch.setattr(peer.engine, "generate", lambda *a: asked.append(a) or generate(*a))
        peer.answer(stream.questions[0], 2)
        assert not asked[0][1].drafts  # they would guess what comes behind an answer's end
        peer.settle()
        monkeypatch.undo()
        peer.close()
        with pytest.raises(Exception, match="was closed"):
            peer.engine.generate("x")
        full = Means(engine, model_folder, 400, apart=True).make("full")
        full.learn(stream.texts, stream.head)
        assert len(full.engine.library.table) == 0
        full.close()


def test_the_frameworks_models_answer_what_transformers_answers(model_folder):
    with Engine.load(model_folder, dtype="float32", device="cpu") as engine:
        question = Scenarios(engine).named("stream", "set", ASKED).questions[0]
        expected = Transformers(engine).answer(question, 4).token_ids
        text = engine.tokenization.tokenizer.decode(expected, skip_special_tokens=True)
        for name in ("langchain-huggingface", "llama-index-llms-huggingface"):
            peer = Means(engine, model_folder, 400).make(name)
            assert name in peer.about
            sample = peer.answer(question, 4)
            again = engine.tokenization.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert list(sample.token_ids) == again[:4]
            assert 0 < sample.ttft_ms <= sample.total_ms


def test_kvboost_is_asked_as_it_says_and_named_where_it_is_not_there(model_folder, monkeypatch):
    class Engine_:  # noqa: N801
        def __init__(self, model, tokenizer, **options):
            self.warmed, self.tokenizer, self.options = [], tokenizer, options

        def warm(self, text):
            self.warmed.append(text)

        def generate(self, prompt, max_new_tokens, on_token):
            for token in range(max_new_tokens):
                on_token(token)
            return types.SimpleNamespace(prompt_tokens=len(self.tokenizer(prompt)["input_ids"]))

    with Engine.load(model_folder, dtype="float32", device="cpu") as engine:
        monkeypatch.setitem(sys.modules, "kvboost", None)
        with pytest.raises(ConfigError, match="pip install --no-deps kvboost"):
            KVBoost(engine)
        monkeypatch.setitem(sys.modules, "kvboost", types.SimpleNamespace(KVBoost=Engine_))
        monkeypatch.setattr("docs.experiments.peers.kvboost.version", lambda _: "0.9.0")
        peer = KVBoost(engine)
        stream = Scenarios(engine).named("stream", "set", ASKED)
        peer.learn(stream.texts, stream.head)
        assert peer._engine.warmed == list(stream.texts)
        assert peer.answer(stream.questions[0], 3).token_ids == (0, 1, 2)
        with pytest.raises(Exception, match="the others are given 1"):
            peer.answer(Question(Rendered("Who is this?"), (5,)), 3)


def test_the_command_writes_rows_and_a_plot(model_folder, tmp_path, monkeypatch):
    known, learn = [], OwnEngine.learn

    def noted(peer, texts, head):
        known.append(len(peer.engine.library.table))
        learn(peer, texts, head)

    monkeypatch.setattr(OwnEngine, "learn", noted)
    data = tmp_path / "set.jsonl"
    rows = [
        {"id": n, "question": q, "answers": [a], "chunks": [{"text": t} for t in texts]}
        for n, (texts, q, a) in enumerate(ASKED * 2)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    plot = tmp_path / "peers.svg"
    args = ["peers", str(data), "--model", model_folder, "--dtype", "float32"]
    args += ["--peers", "transformers,transformers-prefix,full,auto", "--questions", "2"]
    done = CliRunner().invoke(app, [*args, "--new-tokens", "3", "--json", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found["rows"]) == 4 * 4
    assert known == [0] * 3 * 2  # each scenario but the cold one is learned, by both of ours
    assert list(dict.fromkeys(row["scenario"] for row in found["rows"])) == [
        *("cold: set", "stream: set", "one document: set", "chat: set"),
    ]
    assert {row["agreement"] for row in found["rows"] if row["peer"] == "full"} == {1.0}
    assert "transformers" in plot.read_text()
    short = CliRunner().invoke(app, [*args, "--questions", "5"])
    assert short.exit_code != 0
    assert "12 are needed" in " ".join(str(short.exception).split())


def test_everybody_is_opened_or_named(model_folder):
    with Engine.load(model_folder, dtype="float32", device="cpu", store=NEW_PROMPTS) as engine:
        means = Means(engine, model_folder, 400, apart=True)
        peers, missing = open_peers(means, (), EVERYBODY)
        assert set(peers) | set(missing) == set(EVERYBODY)
        assert {"vllm", "llama.cpp", "llama-server", "auto@llama.cpp"} <= set(missing)
        assert {"transformers", "transformers-prefix", "full", "auto"} <= set(peers)
        for peer in peers.values():
            peer.close()
