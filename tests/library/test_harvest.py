"""Harvest: a chunk that a prompt missed is taken from that prompt, until it is encoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import CHUNKS, ask, tiny_model

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.kv.buffer import KVBuffer
from cached_rag.library.matching import HARVESTED
from cached_rag.library.sequences import where
from cached_rag.methods import Auto


def opened(**settings):
    options = {"harvest": True, "write_back": False} | settings
    return Engine(tiny_model("llama"), StoreConfig(**options))


def prefilled(engine, prompt, **options):
    options = {"method": "reuse", "max_tokens": 4} | options
    done = engine.prefill(prompt, **options)
    done.release()
    return done


def hits(engine, *chunks, **options):
    report = prefilled(engine, ask(*chunks), **options).report
    return report.modules_hit, report.modules_missed


@pytest.mark.parametrize("harvests", [True, False])
def test_what_one_prompt_missed_the_next_one_has(harvests):
    with opened(harvest=harvests) as engine:
        engine.register(CHUNKS)
        assert hits(engine, *CHUNKS) == (0, 3)
        done = prefilled(engine, ask(*CHUNKS[::-1]), method="auto")
        assert done.report.modules_hit == (3 if harvests else 0)
        assert done.report.modules_missed == (0 if harvests else 3)
        assert (done.report.recomputed_tokens > 0) == harvests  # repaired, as any chunk
        assert any("harvest" in note for note in done.report.notes) == harvests


def test_what_is_computed_anew_is_no_harvest_and_the_turn_is_kept(monkeypatch):
    monkeypatch.setattr(Auto, "least_weights", 1e9)
    monkeypatch.setattr(Auto, "few_tokens", 0)
    parts = [f"Part {n * 37} costs {n * 91 % 101} EUR." for n in range(28)]
    listed = ["\n".join(parts[at : at + 7]) for at in range(0, 28, 7)]
    with opened() as engine:
        engine.encode(CHUNKS, context=None)
        engine.register(listed)
        first = "\n\n".join([*CHUNKS, "Who?"])
        second = "\n\n".join([first, *listed[::-1], "Which?"])
        prefilled(engine, "\n\n".join(listed))
        prefilled(engine, first, method="auto")
        done = prefilled(engine, second, method="auto").report
        assert done.kept_repaired_tokens > 0
        assert (done.modules_hit, done.modules_missed) == (0, 4)
        assert not any("harvest" in note for note in done.notes)
        again = prefilled(engine, f"{second} And why?", method="auto").report
        assert again.kept_tokens > 0.95 * done.prompt_tokens


def test_it_is_what_full_prefill_of_that_prompt_gave_moved_by_the_rule():
    with opened() as engine:
        engine.register(CHUNKS)
        model = engine.model
        donor = prefilled(engine, ask(*CHUNKS)).tokens.ids
        done = engine.prefill(ask(*CHUNKS[::-1]), method="reuse", max_tokens=4)
        twin = KVBuffer.like(model.shapes, len(donor))
        model.prefill(twin, torch.tensor([donor]))
        moved, alone = (KVBuffer.like(model.shapes, len(done.tokens)) for _ in range(2))
        engine.encode(CHUNKS, context=None)
        (behind,) = (one for one in engine.library.encoded_after() if one != HARVESTED)
        places = [place for place in done.plan.placements if place.is_chunk]
        assert len(places) == 3
        assert {match.encoded_after for match in done.plan.matches} == {HARVESTED}
        for place in places:
            ids = done.tokens.ids[place.begin : place.end]
            at = next(i for i in range(len(donor)) if donor[i : i + len(ids)] == ids)
            assert not place.is_exact
            moved.place(twin.read(at, at + len(ids), tuple(ids)), place.begin, model.rule)
            alone.place(engine.library.shelf.fetch(behind, ids), place.begin, model.rule)
            for kind in ("keys", "values"):
                found, same, other = (
                    getattr(buffer, kind)[..., place.begin : place.end, :]
                    for buffer in (done.buffer, moved, alone)
                )
                assert torch.allclose(found, same, atol=1e-4)
                assert not torch.allclose(found, other, atol=1e-2)  # control
        done.release()


def test_a_chunk_is_found_where_its_borders_merge_with_other_neighbours():
    with opened() as engine:
        engine.register(CHUNKS[:1])
        prefilled(engine, f"Read this, then answer.\n{CHUNKS[0]}\nWho?")
        done = prefilled(engine, f"Now. ({CHUNKS[0]}...) Who was it?")
        (place,) = done.plan.placements
        whole = len(engine.library.table.get(CHUNKS[0]).token_ids)
        assert whole - 8 <= place.kv.seq_len <= whole
        ids = tuple(done.tokens.ids[place.begin : place.end])
        assert place.kv.token_ids == ids
        assert engine.tokenization.tokenizer.decode(ids).strip() in CHUNKS[0]


def test_what_is_encoded_is_preferred():
    with opened(write_back=True) as engine:
        engine.register(CHUNKS)
        prefilled(engine, ask(*CHUNKS))
        engine.write_back.drain()
        done = prefilled(engine, ask(*CHUNKS[::-1]))
        assert done.report.modules_hit == 3
        assert not done.plan.harvested


def test_a_harvested_chunk_is_still_encoded_in_the_background():
    with opened(write_back=True) as engine:
        engine.register(CHUNKS)
        busy = engine.stream("Hello there", max_tokens=50, ignore_eos=True)
        next(busy)  # so nothing is encoded
        prefilled(engine, ask(*CHUNKS))
        for _ in range(2):
            assert len(prefilled(engine, ask(*CHUNKS[::-1])).plan.harvested) == 3
        busy.close()
        engine.write_back.drain()
        assert not prefilled(engine, ask(CHUNKS[1], CHUNKS[0], CHUNKS[2])).plan.harvested


def test_nothing_is_taken_from_behind_reused_chunks():
    with opened() as engine:
        engine.encode(CHUNKS[:1], context=None)
        engine.register(CHUNKS)
        assert hits(engine, *CHUNKS) == (1, 2)
        assert hits(engine, *CHUNKS[::-1]) == (1, 2)  # they were computed behind an approximation
        assert hits(engine, *CHUNKS, method="full") == (0, 0)
        assert hits(engine, CHUNKS[2], CHUNKS[0], CHUNKS[1]) == (3, 0)


def test_lossless_methods_take_none():
    with opened() as engine:
        engine.register(CHUNKS)
        prefilled(engine, ask(*CHUNKS))
        for method in ("full", "prefix"):
            done = prefilled(engine, ask(*CHUNKS[::-1]), method=method)
            assert done.report.modules_hit == 0
            assert not done.report.notes


@pytest.mark.parametrize("forgotten", [0, 1])
def test_it_goes_with_its_text_and_with_those_that_stood_before_it(forgotten):
    with opened() as engine:
        engine.register(CHUNKS)
        prefilled(engine, ask(*CHUNKS))
        # Made of KV that has read the first text, which is not in this prompt.
        made = prefilled(engine, ask(CHUNKS[2], CHUNKS[1]))
        assert made.report.modules_hit == 2
        engine.forget([CHUNKS[forgotten]])
        engine.register(CHUNKS)
        again = prefilled(engine, ask(CHUNKS[2], CHUNKS[1]))
        assert (again.report.modules_hit, again.report.kept_repaired_tokens) == (0, 0)
        first = prefilled(engine, ask("And now:", CHUNKS[0])).plan.harvested
        assert len(first) == forgotten  # the first text depends on no other


def test_tenants_harvest_their_own():
    with opened() as engine:
        other = engine.tenant("other")
        for one in (engine, other):
            one.register(CHUNKS)
        prefilled(engine, ask(*CHUNKS))
        assert hits(other, *CHUNKS[::-1]) == (0, 3)
        assert hits(engine, *CHUNKS[::-1]) == (3, 0)


def test_harvest_needs_prompts_that_are_kept():
    for settings in ({"sequence_bytes": 0}, {"keeps_repaired": False}):
        with pytest.raises(ConfigError, match="harvest"):
            StoreConfig(harvest=True, **settings)


def test_a_phrase_of_another_prompt_is_not_taken_for_a_text():
    text = "The keeper lit the lamp each evening."
    with opened() as engine:
        record = engine.tokenization.literal(text)
        engine.register([text])
        count = len(record.ids)
        other = f"{CHUNKS[1]} A lamp each. Why?"
        inner = np.asarray(record.ids[4 : count - 4])
        assert where(np.asarray(engine.tokenization.literal(other).ids), inner)
        prefilled(engine, other, method="full")
        report = prefilled(engine, f"Now: {text} Who?").report
        assert 8 < count <= 32
        assert (report.modules_hit, report.modules_missed) == (0, 1)
