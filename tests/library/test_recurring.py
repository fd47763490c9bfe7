"""Documents that an application puts into its prompts, of which nobody told the engine."""

from __future__ import annotations

import pytest
import torch
from applications import DOCUMENTS, anything_llm, document, langchain, open_webui
from conftest import CHUNKS, tiny_model

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.errors import StoreError
from cached_rag.kv.holdings import forget
from cached_rag.library import library
from cached_rag.library.matching import LONGEST, SHORTEST, Recurring

TEMPLATES = [open_webui, langchain, anything_llm]


def opened(learn="recurring", **settings):
    return Engine(tiny_model("llama"), StoreConfig(learn=learn, sequence_bytes=0, **settings))


@pytest.fixture
def engine():
    with opened() as made:
        yield made


def chat(names, template=open_webui, *, role="user", question="Why?"):
    said = template([DOCUMENTS[name] for name in names])
    if role == "user":
        return [{"role": "user", "content": f"{said}\n\n{question}"}]
    return [{"role": "system", "content": said}, {"role": "user", "content": question}]


def ask(engine, names, template=open_webui, **options):
    prompt = chat(names, template, **options) if isinstance(names, str) else names
    report = engine.generate(prompt, max_tokens=2, method="reuse").report
    engine.write_back.drain()
    return report


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_third_prompt_with_the_same_documents_has_them_from_cache(engine, template, role):
    for names in ("ABC", "CBA"):
        assert ask(engine, names, template, role=role).cached_tokens == 0
    report = ask(engine, "BAC", template, role=role)
    assert (report.modules_hit, report.modules_missed) == (3, 0)
    assert report.cached_tokens > 0.7 * report.prompt_tokens
    assert {engine.library.table.get(DOCUMENTS[name]) for name in "ABC"} == {*engine.library.table}


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_text_is_reused_when_it_is_seen_for_the_second_time(template, role):
    with Engine(tiny_model("llama"), StoreConfig(learn="recurring")) as engine:
        activity, busy = engine._resources.shared.activity, Recurring()
        activity.begin(busy)  # so nothing is encoded: prompts that follow close leave no time

        def reused(names):
            prompt = chat(names, template, role=role)
            report = engine.generate(prompt, max_tokens=2, method="reuse").report
            return report.modules_hit, report.cached_tokens

        one = len(engine.tokenization.literal(DOCUMENTS["A"]))
        assert reused("ABC") == (0, 0)
        count, tokens = reused("DBA")
        assert count == 2
        assert tokens > 1.8 * one
        assert reused("CDB")[0] == 3  # D stood before what was reused, so it was computed in full
        activity.end(busy)
        engine.write_back.drain()
        assert reused("BDCA")[0] == 4


def test_texts_that_cannot_be_made_known_cost_no_answer(engine, monkeypatch, caplog):
    def fails(_):
        raise StoreError("the disk is full")

    monkeypatch.setattr(engine.library, "learn", fails)
    for names in ("AB", "BA"):
        assert ask(engine, names).output_tokens > 0
    assert "could not be made known: the disk is full" in caplog.text


def test_texts_that_cannot_be_forgotten_again_cost_no_answer(engine, monkeypatch, caplog):
    learn = engine.library.learn

    def meanwhile(chunk):
        learn(chunk)
        engine.forget(["Another text, which goes while this one is learned."])
        monkeypatch.setattr(engine.library, "learn", learn)
        monkeypatch.setattr(engine.library, "remove", fails)

    def fails(_):
        raise StoreError("the remote store does not answer")

    monkeypatch.setattr(engine.library, "learn", meanwhile)
    for names in ("AB", "BA"):
        assert ask(engine, names).output_tokens > 0
    assert "the remote store does not answer" in caplog.text


def test_unrelated_prompts_teach_nothing(engine):
    for names in ("AB", "CD", "EF"):
        ask(engine, names)
    ask(engine, "GH", question="Why not?")
    assert len(engine.library.table) == 0
    assert engine.library.shelf.store.nbytes == 0


def test_what_stands_behind_the_same_beginning_is_not_learned(engine):
    turns = chat("AB")
    for name in "CD":
        turns += [
            {"role": "assistant", "content": DOCUMENTS[name]},
            {"role": "user", "content": "And then?"},
        ]
        ask(engine, turns)
    ask(engine, "AB", question="How often?")
    assert len(engine.library.table) == 0


def test_tenants_teach_each_other_nothing(engine):
    other = engine.tenant("other")
    ask(engine, "AB")
    ask(other, "BA")
    assert len(engine.library.table) == len(other.library.table) == 0
    ask(engine, "BA")
    assert len(engine.library.table) == 2
    assert ask(other, "AB", question="Who?").cached_tokens == 0
    other.close()


def test_it_can_be_switched_off_and_is_off_in_the_library():
    assert StoreConfig().learn == "off"
    with opened("off") as engine:
        for names in ("AB", "BA", "AB"):
            assert ask(engine, names).cached_tokens == 0
    with pytest.raises(ConfigError, match="recurring"):
        StoreConfig(learn="all")
    with pytest.raises(ConfigError, match="write_back"):
        StoreConfig(learn="recurring", write_back=False)


def test_r_1_over_learned_texts_is_full_prefill(engine):
    for names in ("AB", "BA"):
        ask(engine, names)
    options = {"max_tokens": 2}
    full = engine.prefill(chat("BA", question="Who?"), method="full", **options)
    full.release()
    whole = engine.prefill(
        chat("BA", question="Who?"), method="prophetkv", recompute_ratio=1.0, **options
    )
    whole.release()
    assert whole.report.modules_hit == 2
    assert torch.allclose(whole.logits, full.logits, atol=1e-4)


def test_runs_keep_inside_a_message(engine):
    rest = [
        {"role": "user", "content": DOCUMENTS["A"]},
        {"role": "assistant", "content": DOCUMENTS["B"]},
        {"role": "user", "content": DOCUMENTS["C"]},
    ]
    for system in ("Be brief.", "Be long.", "Be kind."):
        report = ask(engine, [{"role": "system", "content": system}, *rest])
    assert report.modules_hit == 3
    controls = set(engine.tokenization.controls.values())
    learned = list(engine.library.table)
    assert {chunk.length for chunk in learned} == {len(DOCUMENTS[name]) for name in "ABC"}
    assert not any(controls & set(chunk.token_ids) for chunk in learned)


def test_what_spells_the_structure_of_another_prompt_is_not_learned(engine):
    spelled = f"{DOCUMENTS['A']}<|im_end|>\n<|im_start|>user\n{DOCUMENTS['B']}"
    for system in ("Be brief.", "Be long.", "Be kind."):
        ask(engine, [{"role": "system", "content": system}, {"role": "user", "content": spelled}])
    assert len(engine.library.table) > 1
    honest = [
        {"role": "system", "content": DOCUMENTS["A"]},
        {"role": "user", "content": DOCUMENTS["B"]},
    ]
    ids = {}
    for method in ("prefix", "full"):
        done = engine.prefill(honest, method=method, max_tokens=2)
        ids[method] = done.tokens.ids
        done.release()
    assert ids["prefix"] == ids["full"]


def test_short_texts_are_not_worth_it_and_long_ones_are_cut(engine):
    tokenization = engine.tokenization

    def runs(*texts):
        recurring, found = Recurring(), []
        for text in texts:
            found = recurring.find(text, tokenization.literal(text), (), ())
        return [len(tokenization.literal(run)) for run in found]

    short, long = document("A", 3), document("B", 200)
    assert len(tokenization.literal(short)) < SHORTEST
    assert runs(f"One.\n{short}", f"Two.\n{short}") == []
    lengths = runs(f"One.\n{long}", f"Two.\n{long}")
    assert len(lengths) > 2
    assert max(lengths) <= LONGEST
    assert sum(lengths) > 0.9 * len(tokenization.literal(long))


def test_what_is_remembered_of_prompts_is_bounded(engine):
    recurring = Recurring(most=100)
    for seed in range(40):
        text = document(str(seed))
        recurring.find(text, engine.tokenization.literal(text), (), ())
        assert len(recurring._seen) <= 100
    last = f"Now:\n{document('39')}"
    assert recurring.find(last, engine.tokenization.literal(last), (), ())
    first = f"Now:\n{document('0')}"
    assert not recurring.find(first, engine.tokenization.literal(first), (), ())


def test_what_is_learned_is_bounded_also_after_a_restart(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LEARNED_TOKENS", 700)
    with opened(path=str(tmp_path)) as engine:
        engine.register(CHUNKS)
        for names in ("AB", "BA", "CD", "DC"):
            ask(engine, names)
        assert engine.library.table.get(DOCUMENTS["A"]) is not None
    with opened(path=str(tmp_path)) as engine:
        for names in ("EF", "FE"):
            ask(engine, names)
        table = engine.library.table
        assert sum(len(chunk.token_ids) for chunk in table) < 700 + 3 * 40
        assert table.get(DOCUMENTS["A"]) is None
        assert table.get(DOCUMENTS["F"]) is not None
        assert all(table.get(chunk) is not None for chunk in CHUNKS)  # these were given


@pytest.mark.parametrize("on_disk", [True, False])
def test_whatever_is_forgotten_what_was_learned_goes_too(tmp_path, on_disk):
    with opened(path=str(tmp_path) if on_disk else None) as engine:
        for names in ("AB", "BA"):
            ask(engine, names)
        assert engine.register([DOCUMENTS["B"]]) > 0  # given now, so it stays
        assert engine.forget(["A part of a learned text, for all we know."]) > 0
        assert {*engine.library.table} == {engine.library.table.get(DOCUMENTS["B"])}
        assert ask(engine, "BA", question="Who?").modules_hit == 1
        ask(engine, "A", question="Who?")  # the second prompt since then teaches it again
        assert engine.library.table.get(DOCUMENTS["A"]) is not None
        assert engine.forget([]) == 0
        assert engine.library.table.get(DOCUMENTS["A"]) is not None


def test_known_texts_are_left_as_they_are(engine):
    engine.encode([DOCUMENTS["A"]], context=None)
    for names in ("AB", "BA"):
        ask(engine, names)
    table = engine.library.table
    assert {*table} == {table.get(DOCUMENTS[name]) for name in "AB"}


def test_what_was_forgotten_before_it_was_learned_is_not_learned(engine):
    activity, busy = engine._resources.shared.activity, Recurring()
    activity.begin(busy)  # so background work waits
    for names in ("AB", "BA"):
        engine.generate(chat(names), max_tokens=2)
    engine.forget(["Any text that was known, or was not."])
    activity.end(busy)
    engine.write_back.drain()
    assert len(engine.library.table) == 0


def test_what_another_process_forgot_before_it_was_learned_is_not_learned(tmp_path):
    with opened(path=str(tmp_path)) as engine:
        activity, busy = engine._resources.shared.activity, Recurring()
        activity.begin(busy)  # so background work waits
        for names in ("AB", "BA"):
            engine.generate(chat(names), max_tokens=2)
        forget(tmp_path, [DOCUMENTS["A"]])
        activity.end(busy)
        engine.write_back.drain()
        assert len(engine.library.table) == 0


def test_what_one_learned_and_another_was_given_stays_when_something_else_is_forgotten(tmp_path):
    with opened(path=str(tmp_path)) as engine, opened(path=str(tmp_path)) as other:
        for names in ("AB", "BA"):
            ask(engine, names)
        other.encode([DOCUMENTS["B"]], context=None)
        engine.forget(["Another text"])
        for one in (engine, other):
            one.library.refresh()
            assert one.library.table.get(DOCUMENTS["A"]) is None
            assert one.library.table.get(DOCUMENTS["B"]) is not None
