"""The evaluation: scores, pairing, resuming, and that its references are what they should be."""

from __future__ import annotations

import errno
import json
import math
import statistics
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, plain_logits, tiny_model

from cached_rag import ConfigError, Engine, GenerationConfig
from cached_rag.errors import EvaluationError
from cached_rag.evaluation.data import Example, Questions, is_long, load_examples, messages
from cached_rag.evaluation.measure import divergence, exact_match, f1, read, right, rouge_l
from cached_rag.evaluation.run import (
    EncodedEngines,
    Journal,
    Settings,
    evaluate,
    make_trials,
    origins,
)
from cached_rag.evaluation.summary import bootstrap, bootstrap_ratio, plot_frontier, summarise
from cached_rag.library.encode import primer

QUESTIONS = ["What turns green?", "Who lit the lamp?", "When was the South Pole reached?"]
ANSWERS = ["Copper", "The lighthouse keeper", "1911"]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "small.jsonl"
    rows = [
        {
            "id": str(i),
            "question": question,
            "answers": [answer],
            "chunks": [{"title": "", "text": chunk} for chunk in CHUNKS],
        }
        for i, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Letters:
    """An embedder that counts letters."""

    name = "letters"

    def embed(self, texts):
        return [[text.count(c) + 0.01 for c in "abcdefghijklmnop"] for text in texts]


def run(data, tmp_path, methods, ratios=(0.2,), limit=None, name="journal.jsonl"):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    trials = make_trials(methods, ratios)
    settings = Settings((data,), tuple(trials), Questions(limit))
    journal = Journal(tmp_path / name, settings.facts(engine))
    evaluate(engine, settings, journal)
    return summarise(settings.chosen(journal), [(t.name, t.ratio) for t in trials]), journal


def test_scores_are_squads():
    assert (
        f1("The Eiffel Tower!", ["eiffel tower"])
        == exact_match("The Eiffel Tower!", ["eiffel tower"])
        == 1
    )
    assert f1("the tall tower", ["eiffel tower", "a tall building"]) == pytest.approx(0.5)
    assert f1("", ["tower"]) == exact_match("towers", ["tower"]) == 0
    assert rouge_l("a b c d", ["a b x d"]) == pytest.approx(0.75)
    assert rouge_l("Running lighthouses", ["runs, a lighthouse"]) == pytest.approx(0.8)
    for text in ("\u5317\u4eac", "\u041c\u043e\u0441\u043a\u0432\u0430", "Gen\u00e8ve"):
        assert rouge_l(text, [text]) == 1


@pytest.mark.parametrize(
    ("answer", "reference", "wanted"),
    [
        ("The sensor costs 70 EUR.", "70", 1),
        ("70", "70", 1),
        ("It costs 170.", "70", 0),
        ("1,705 or 2.70 or 70,5", "70", 0),
        ("1,270 EUR", "1270", 0),
        ("1,270 EUR", "1,270", 1),
        ("the number is tx-24.", "TX-24", 1),
        ("TX-245", "TX-24", 0),
        ("She worked for the  STRASSE\nfirm", "Straße firm", 1),
        ("(C++)", "C++", 1),
        ("anything", " ", 0),
        ("", "70", 0),
    ],
)
def test_an_answer_is_right_if_the_wanted_words_stand_in_it(answer, reference, wanted):
    assert right(answer, ["nowhere", reference]) == wanted


def test_what_is_kept_is_the_share_of_what_full_prefill_gets_right():
    def measured(method, ratio, found):
        row = dict.fromkeys(("f1", "em", "rouge_l", "nll"))
        row |= {"data": "d", "method": method, "ratio": ratio, "ttft_ms": 1.0, "full_ttft_ms": 1.0}
        named = [(f"{kind}-1-{n}", right) for n, (kind, right) in enumerate(found)]
        return [row | {"id": name, "example": name, "right": right} for name, right in named]

    kinds = ["parts"] * 20 + ["people"] * 20
    full = measured("full", 1.0, zip(kinds, [1.0] * 30 + [0.0] * 10, strict=True))
    auto = measured("auto", 0.03, zip(kinds, [0.0] * 15 + [1.0] * 20 + [0.0] * 5, strict=True))
    rows = summarise([*full, *auto], [("full", 1.0), ("auto", 0.03)])
    assert [row["data"] for row in rows] == ["d"] * 2 + ["d/parts"] * 2 + ["d/people"] * 2
    whole, parts, people = (row for row in rows if row["method"] == "auto")
    assert (whole["right"], whole["right_kept"], whole["right_of"]) == (0.5, 0.5, 30)
    assert whole["right_diff"] == -0.25
    low, high = whole["right_kept_ci"]
    assert 0.3 < low < 0.5 < high < 0.7
    assert whole["right_diff_ci"][0] < -0.25 < whole["right_diff_ci"][1]
    assert (parts["right_kept"], parts["right_of"]) == (0.25, 20)
    assert (people["right_kept"], people["right_of"]) == (1, 10)
    assert rows[0]["right_kept"] == 1


def test_journals_of_before_say_what_is_right(data, tmp_path):
    (full,), journal = run(data, tmp_path, ["full"])
    assert full["right"] == 0  # a random model
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    for row, answer in zip(lines[-3:], ANSWERS, strict=True):
        assert "right" not in row
        row["text"] = f"It is {answer}."
    journal.path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    (full,), _ = run(data, tmp_path, ["full"])
    assert (full["right"], full["right_of"]) == (1, 3)


def test_divergence_is_that_of_probabilities():
    full = torch.tensor([[0.5, 0.5, 0.0]]).log()
    other = torch.tensor([[0.25, 0.75, 0.0]]).log()  # the last token is masked in both
    wanted = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence(full, other) == pytest.approx(wanted)
    assert divergence(full, full) == 0
    with pytest.raises(EvaluationError, match="no numbers"):
        divergence(full, full * math.nan)


def test_intervals_are_of_the_mean_and_the_same_every_time():
    differences = [0.1, -0.2, 0.3, 0.0, 0.5, 0.2, 0.1, -0.1]
    found = bootstrap(differences)
    assert found == bootstrap(differences)
    assert found.mean == pytest.approx(0.1125)
    # Near the normal interval of the mean: 1.96 standard errors to either side.
    error = statistics.pstdev(differences) / len(differences) ** 0.5
    assert found.mean - found.low == pytest.approx(1.96 * error, rel=0.15)
    assert found.high - found.mean == pytest.approx(1.96 * error, rel=0.15)
    pairs = [(0.5, 1.0), (1.0, 1.0)] * 40
    ratio = bootstrap_ratio(pairs)
    assert ratio.mean == 0.75
    assert 0.65 < ratio.low < 0.75 < ratio.high < 0.85
    assert bootstrap([0.2] * 5).low == pytest.approx(0.2) == bootstrap([0.2] * 9).high
    with pytest.warns(RuntimeWarning, match="invalid value"):
        assert math.isnan(bootstrap([]).mean)


def test_rows_have_the_keys_that_are_promised(data, tmp_path):
    rows, _ = run(data, tmp_path, ["full", "reuse", "prophetkv", "cacheblend@alone"])
    assert [row["method"] for row in rows] == ["full", "reuse", "prophetkv", "cacheblend@alone"]
    promised = "method ratio data n f1 em rouge_l nll nll_diff nll_diff_ci kl agreement"
    for row in rows:
        assert set(f"{promised} charged_recompute ttft_ms speedup".split()) <= set(row)
        assert row["n"] == 3
        assert row["small"]
    full, reuse = rows[:2]
    assert (full["kl"], full["nll_diff"], full["nll_diff_ci"], full["speedup"]) == (0, 0, [0, 0], 1)
    assert reuse["kl"] > 0.001  # control: a random model without repair differs
    assert reuse["charged_recompute"] < rows[2]["charged_recompute"] < 1


def test_r_1_has_no_loss_and_less_has(data, tmp_path):
    methods = ["cacheblend", "prophetkv", "epic@prefix", "infoflow@both:2", "a3@apart"]
    rows, _ = run(data, tmp_path, methods, [0.2, 1.0])
    assert [row["ratio"] for row in rows] == [1.0, *[0.2, 1.0] * len(methods)]
    for row in rows:
        if row["ratio"] == 1.0:
            assert row["kl"] == pytest.approx(0, abs=1e-6)
            assert row["nll_diff"] == pytest.approx(0, abs=1e-4)
            assert row["agreement"] == 1
        else:  # control: something is reused, and it is not what full prefill computes
            assert row["kl"] > 1e-4
            assert row["charged_recompute"] < 1


def test_answers_and_likelihoods_are_the_models_own():
    """Twin: the reference's NLL from one plain forward pass over prompt and answer."""
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    prompt, config = (
        messages(CHUNKS, QUESTIONS[0], long=False),
        GenerationConfig("full", max_tokens=8),
    )
    reading = read(engine, prompt, config, ANSWERS[0])
    ids = engine.prefill(prompt, config).tokens.ids
    answer = engine.tokenization.literal(ANSWERS[0]).ids[:8]
    log_probs = plain_logits(engine.model, [*ids, *answer]).log_softmax(-1)[len(ids) - 1 : -1]
    nll = -log_probs.gather(1, torch.tensor(answer)[:, None]).mean()
    assert reading.nll == pytest.approx(float(nll), abs=1e-4)
    assert torch.allclose(reading.log_probs, log_probs[0], atol=1e-4)
    assert reading.text == engine.generate(prompt, config).text
    assert read(engine, prompt, config, ANSWERS[1]).nll != pytest.approx(float(nll), abs=1e-3)


def test_an_interrupted_run_goes_on_where_it_stopped(data, tmp_path):
    _, journal = run(data, tmp_path, ["reuse"], limit=2)
    before = list(journal.rows.values())
    with journal.path.open("a") as file:
        file.write('{"data": "small", "id')  # killed while writing
    rows, journal = run(data, tmp_path, ["reuse", "epic"])
    assert list(journal.rows.values())[: len(before)] == before
    assert [row["n"] for row in rows] == [3, 3, 3]
    fresh, _ = run(data, tmp_path, ["reuse", "epic"], name="other.jsonl")
    for resumed, whole in zip(rows, fresh, strict=True):
        for name in ("f1", "nll", "kl", "nll_diff_ci"):
            assert resumed[name] == whole[name]


@pytest.mark.parametrize("left", ["", '{"run": {"au', "whole but for the line feed"])
def test_a_journal_is_written_on_wherever_it_was_cut(data, tmp_path, left):
    rows, journal = run(data, tmp_path, ["reuse"], limit=2)
    whole = journal.path.read_text()
    journal.path.write_text(whole[:-1] if "whole" in left else left)
    again, journal = run(data, tmp_path, ["reuse", "epic"], limit=2)
    assert [row["n"] for row in again] == [2, 2, 2]
    assert again[0]["nll"] == rows[0]["nll"]
    _, journal = run(data, tmp_path, ["reuse", "epic"], limit=2)
    assert len(list(journal.rows.values())) == 6


def test_another_file_of_the_same_name_is_measured_anew(data, tmp_path):
    (first,), _ = run(data, tmp_path, ["full"])
    other = tmp_path / "other" / data.name
    other.parent.mkdir()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    other.write_text("\n".join(json.dumps(row | {"question": "Why?"}) for row in rows))
    (second,), journal = run(other, tmp_path, ["full"])
    (fresh,), _ = run(other, tmp_path, ["full"], name="fresh.jsonl")
    assert len(list(journal.rows.values())) == 6
    assert second["nll"] == fresh["nll"] != first["nll"]
    with pytest.raises(ConfigError, match="same name"):
        Settings((data, other), ())
    with pytest.raises(ConfigError, match="row of all sets together"):
        Settings((data.with_name("all.jsonl"),), ())


def test_a_journal_of_another_run_is_refused(tmp_path):
    Journal(tmp_path / "j.jsonl", {"model": "one"})
    with pytest.raises(EvaluationError, match="another model"):
        Journal(tmp_path / "j.jsonl", {"model": "two"})
    with (tmp_path / "j.jsonl").open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(EvaluationError, match="line 2"):
        Journal(tmp_path / "j.jsonl", {"model": "one"})


@pytest.mark.parametrize("lacking", ["text", "origin", "id", "example", "full_ttft_ms"])
def test_a_measurement_that_lacks_something_is_said_when_the_journal_is_read(
    data, tmp_path, lacking
):
    _, journal = run(data, tmp_path, ["full"], limit=1)
    head, line = journal.path.read_text().splitlines()
    row = json.loads(line)
    del row[lacking]
    journal.path.write_text(f"{head}\n{json.dumps(row)}\n")
    with pytest.raises(EvaluationError, match=rf"line 2: not a measurement \(it lacks {lacking}\)"):
        run(data, tmp_path, ["full"], limit=1)


def test_a_set_whose_answers_became_long_is_measured_anew(data, tmp_path):
    run(data, tmp_path, ["full"], limit=2)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for number in range(3, 7):
        row = rows[0] | {"id": str(number), "answers": ["so many words " * 10]}
        rows.append(row)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (full,), journal = run(data, tmp_path, ["full"], limit=2)
    assert full["n"] == 2
    assert len(list(journal.rows.values())) == 4
    (fresh,), _ = run(data, tmp_path, ["full"], limit=2, name="fresh.jsonl")
    assert full["nll"] == fresh["nll"]


def test_a_question_that_cannot_be_measured_is_named_with_its_file(data, tmp_path):
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[1] |= {"id": "q7", "question": "word " * 9000}
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        EvaluationError, match=r"small\.jsonl, question 'q7': .* context .*--chunks"
    ):
        run(data, tmp_path, ["full"])
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2  # what was measured


def test_a_journal_that_cannot_be_kept_says_so(tmp_path, monkeypatch):
    with pytest.raises(EvaluationError, match=r"cannot be kept in .*--journal"):
        Journal(tmp_path, {})  # a folder
    journal = Journal(tmp_path / "j.jsonl", {})
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "open", Mock(side_effect=full))
    with pytest.raises(EvaluationError, match=r"No space left .* make room"):
        journal.add({"data": "d", "method": "full", "ratio": 1.0})


def test_measurements_say_where_they_come_from(tmp_path):
    path, run = tmp_path / "j.jsonl", {"model": "one"}
    here = {"commit": "a1", "processor": "P", "threads": 1, "cores": 2}
    key = {"data": "d", "method": "full", "ratio": 1.0, "id": "1", "text": None}
    key |= {"ttft_ms": 1.0, "full_ttft_ms": 1.0}
    for number, machine in enumerate((here, here, here | {"commit": "b2"}, None)):
        Journal(path, run, machine).add({**key, "example": str(number), "nll": 1.0})
    found = {one["commit"]: one for one in origins(Journal(path, run).rows.values())}
    assert found["a1"] == {"commit": "a1", "processor": "P", "threads": 1, "rows": 2}
    assert (found["b2"]["rows"], found[None]["rows"]) == (1, 1)


_ASKED = {"id": 1, "question": "?", "chunks": [{"text": "It costs 70."}]}


@pytest.mark.parametrize(
    "line",
    [
        *("{", '{"id": 1}', '{"id": 1, "question": "?", "chunks": []}', '{"chunks": "x"}', "[]"),
        *(json.dumps(_ASKED | {name: "70"}) for name in ("answers", "answer", "anwsers")),
        *(json.dumps(_ASKED | {"answers": wrong}) for wrong in ({"text": ["70"]}, None, [["70"]])),
        *(json.dumps(_ASKED | {name: None}) for name in ("id", "question", "chunks", "document")),
        *(json.dumps(_ASKED | {"chunks": [{"text": wrong}]}) for wrong in (None, ["70"], True)),
        json.dumps(_ASKED | {"chunks": [{"text": "It costs 70.", "title": ["a"]}]}),
        json.dumps(_ASKED | {"question": "half of a pair: \ud83d"}),
        "[" * 100_000,
    ],
)
def test_bad_data_is_named_with_its_line(line, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n" + line)
    with pytest.raises(EvaluationError, match="line 2"):
        load_examples(path)
    with pytest.raises(EvaluationError, match="cannot read"):
        load_examples(tmp_path / "none.jsonl")
    path.write_text("\n")
    with pytest.raises(EvaluationError, match="no examples"):
        load_examples(path)


def test_what_a_chunk_is_and_what_a_key_is_called_is_said(tmp_path):
    path = tmp_path / "bad.jsonl"
    for changed, said in (
        (
            {"chunks": ["It costs 70."]},
            r'chunks is a list of objects: \{"text": ..., "title": ...\}',
        ),
        ({"anwsers": ["70"]}, "'anwsers' is not known; write answers"),
    ):
        path.write_text(json.dumps(_ASKED | changed))
        with pytest.raises(EvaluationError, match=said):
            load_examples(path)
    path.write_text(json.dumps(_ASKED | {"answers": [70, 7.5], "answer_place": 3}))
    (example,) = load_examples(path)
    assert (example.id, example.answers) == ("1", ("70", "7.5"))


def test_sets_without_answers_have_no_scores(data, tmp_path):
    rows = [json.loads(line) | {"answers": []} for line in data.read_text().splitlines()]
    data.write_text("\n".join(map(json.dumps, rows)))
    (full, reuse), _ = run(data, tmp_path, ["reuse"])
    assert full["f1"] is full["nll"] is full["nll_diff"] is reuse["nll_diff_ci"] is None
    assert reuse["kl"] > 0
    assert not is_long(load_examples(data))


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("the longest yard", "The Longest Yard"),
        ("Texas", "Texas"),  # TEXAS comes first, but it is also written as given
        ("yes", "Yes"),
        ("yard", "Yard"),
        ("art", "art"),  # never a word of its own
        ("Dr. Who?", "Dr. Who?"),
    ],
)
def test_the_reference_is_written_as_in_the_chunks(answer, reference):
    chunks = ("TEXAS\nIt was no Party.", "The Longest Yard, filmed in Texas.")
    assert Example("1", "?", (answer, "other"), chunks).reference == reference


def test_trials():
    names = ["reuse", "epic", "epic:anchor_tokens=8", "auto", "auto:follow_tokens=2", "full"]
    trials = make_trials(names, [0.1, 0.2])
    found = [(trial.name, trial.ratio) for trial in trials]
    assert found[:4] == [("full", 1.0), ("reuse", 0.0), ("epic", 0.1), ("epic", 0.2)]
    assert found[4][0] == "epic:anchor_tokens=8"
    assert found[5:] == [("auto", 0.3), ("auto:follow_tokens=2", 0.3)]
    numbered = [["auto@both:0"], ["auto@alone:2"], ["auto@prefix:1"], ["auto@apart:0"]]
    for bad in (["nope"], ["reuse@nowhere"], ["epic:no=1"], ["auto@primer:"], *numbered):
        with pytest.raises(ConfigError):
            make_trials(bad, [0.1])
    with pytest.raises(ConfigError):
        make_trials(["epic"], [1.5])


@pytest.mark.parametrize(("encoding", "count"), [("primer", 1), ("primer:1", 1), ("primer:3", 3)])
def test_primers_have_the_names_that_an_index_has(encoding, count):
    encodings = EncodedEngines(tiny_model("llama"), long=False)
    (behind,) = encodings.engine(encoding, CHUNKS).library.encoded_after()
    assert behind.context == primer(count).name
    both = encodings.engine(f"both:{count}", CHUNKS).library.encoded_after()
    assert {behind.context for behind in both} == {"", primer(count).name}


def test_a_codec_is_an_encoding_that_is_read_back_from_disk():
    keys = {}
    with closing(EncodedEngines(tiny_model("llama"), long=False)) as encodings:
        for encoding in ("both", "int8", "int4"):
            library = encodings.engine(encoding, CHUNKS).library
            ids = library.table.get(CHUNKS[0]).token_ids
            behind = next(one for one in library.encoded_after() if one.context)
            keys[encoding] = library.shelf.fetch(behind, ids).keys
    errors = [(keys[name] - keys["both"]).abs().mean() for name in ("int8", "int4")]
    assert 0 < errors[0] < errors[1] < 0.1 * keys["both"].abs().mean()


def test_chunks_stand_behind_their_document_or_apart():
    encodings = EncodedEngines(tiny_model("llama"), long=False)
    starts = {}
    for encoding in ("primer", "apart"):
        library = encodings.engine(encoding, CHUNKS[1:], tuple(CHUNKS)).library
        (behind,) = library.encoded_after()
        ids = [library.table.get(text).token_ids for text in CHUNKS[1:]]
        starts[encoding] = [library.shelf.fetch(behind, one).start for one in ids]
    assert starts["apart"][0] == starts["apart"][1] < starts["primer"][0] < starts["primer"][1]


def test_fewer_chunks_of_the_same_question(data):
    texts = ("One.", "The answer is Copper.", "Three.", "Four.", "Five.")
    example = Example("1", "?", ("copper",), texts)
    assert example.fewer(2).chunks == texts[:2]
    assert example.fewer(1).chunks == texts[1:2]
    assert example.fewer(9) == example
    assert replace(example, answers=()).fewer(1).chunks == texts[:1]
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    found = [Settings((data,), (), Questions(chunks=chunks)) for chunks in (None, 1, 2)]
    assert len({settings.digest(engine) for settings in found}) == 3  # no journal mixes them
    assert [len(settings.asked(data)[0].chunks) for settings in found] == [3, 1, 2]
    with pytest.raises(ConfigError, match="at least"):
        Questions(chunks=0)


def test_the_frontier_is_drawn(data, tmp_path):
    rows, _ = run(data, tmp_path, ["reuse", "epic"], [0.1, 0.3])
    plot_frontier(rows, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(EvaluationError, match="cannot write"):
        plot_frontier(rows, tmp_path / "frontier.nope")


def test_an_answer_is_followed_apart_from_the_reference():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    engine.encode(CHUNKS, context=None)
    prompt = messages(CHUNKS, QUESTIONS[0], long=False)
    config = GenerationConfig("anchorflow:follow_tokens=2,follow_ratio=0.3", max_tokens=8)
    alone, beside = (read(engine, prompt, config, reference) for reference in (None, ANSWERS[1]))
    assert beside.text == alone.text
    assert beside.nll is not None is alone.nll


def test_several_sets_are_also_shown_together():
    def row(data, name, method, nll):
        figures = dict.fromkeys(("f1", "em", "rouge_l", "kl", "agreement", "charged_recompute"))
        where = {"data": data, "id": name, "example": name, "method": method, "ratio": 1.0}
        return where | figures | {"nll": nll, "ttft_ms": 1.0, "full_ttft_ms": 1.0}

    found = [row("a", "1", "full", 1.0), row("a", "1", "auto", 1.5)]
    rows = summarise(found, [("auto", 1.0)])
    assert [(r["data"], r["n"]) for r in rows] == [("a", 1)]
    found += [row("b", "1", "full", 3.0), row("b", "1", "auto", 2.9)]
    rows = {r["data"]: r for r in summarise(found, [("auto", 1.0)])}
    assert {name: r["n"] for name, r in rows.items()} == {"a": 1, "b": 1, "all": 2}
    assert rows["all"]["nll_diff"] == pytest.approx(0.2)
    doubled = [row | {"example": number} for number in (1, 2) for row in found[:2]]
    assert summarise(doubled, [("auto", 1.0)])[0]["n"] == 2  # of one id, but two questions


def test_a_string_of_an_example_may_hold_any_line_end(tmp_path):
    question = "one\u2028two\u0085three\x0cfour"
    row = {"id": "1", "question": question, "answers": [], "chunks": [{"title": "", "text": "t"}]}
    path = tmp_path / "set.jsonl"
    text = json.dumps(row, ensure_ascii=False)
    path.write_bytes((text + "\r\n" + text + "\n").encode())
    assert [one.question for one in load_examples(path)] == [question] * 2


def test_speed_is_paired_and_what_is_kept_has_an_interval():
    def rows(name, ms, full_ms, f1, full_f1):
        figures = dict.fromkeys(("em", "rouge_l", "kl", "agreement", "charged_recompute"))
        where = {"data": "a", "id": name, "example": name, "ratio": 1.0, "nll": 1.0, **figures}
        where["full_ttft_ms"] = full_ms
        yield where | {"method": "full", "ttft_ms": full_ms, "f1": full_f1}
        yield where | {"method": "auto", "ttft_ms": ms, "f1": f1}

    found = [*rows("1", 10, 30, 1.0, 1.0), *rows("2", 100, 110, 0.5, 1.0)]
    found += [*rows("3", 100, 400, 1.0, 0.4)]  # which full prefill gets wrong
    (row,) = summarise(found, [("auto", 1.0)])
    assert row["speedup"] == 3.0  # of 3, 1.1 and 4, not 110 ms over 100
    later = [one | {"full_ttft_ms": 2 * one["ttft_ms"]} for one in found]  # in another run
    assert summarise(later, [("auto", 1.0)])[0]["speedup"] == 2.0
    assert (row["f1_kept"], row["full_is_right"]) == (0.75, 2)
    assert row["f1_kept_ci"] == [0.5, 1.0]
