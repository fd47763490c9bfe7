"""Chunks of one document, encoded in one pass: what full prefill makes of them there."""

from __future__ import annotations

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, ask, plain_cache, shuffled, tiny_model
from test_context import before, head_of

from cached_rag import ConfigError, Context, Engine
from cached_rag.library import encode as module
from cached_rag.library.encode import LEAD_TOKENS, PRIMER, primer, windows

DOCUMENT = [
    *CHUNKS,
    *(f"{text[:-1]}, said the paper of {day}." for day in "MTWF" for text in CHUNKS),
]
BEFORE = Context.fixed(CHUNKS[0][:40])


def ids_of(engine, text):
    return tuple(engine.tokenization.literal(text).ids)


def kept(engine, text):
    """The KV of a text behind the only context."""
    (behind,) = (one for one in engine.library.encoded_after() if one.context)
    return engine.library.shelf.fetch(behind, ids_of(engine, text))


def expected(engine, texts, passage=CHUNKS[0][:40]):
    """(keys, values) of the last text behind the head, a passage and the other texts."""
    (behind,) = (one for one in engine.library.encoded_after() if one.context)
    ids = before(engine, behind, passage, *texts[:-1]) + list(ids_of(engine, texts[-1]))
    length = len(ids_of(engine, texts[-1]))
    return [side[:, :, -length:] for side in plain_cache(engine.model, ids)], len(ids) - length


def test_chunks_of_a_document_are_what_full_prefill_makes_of_them_there(engine):
    done = engine.encode([CHUNKS], head_of(engine), context=BEFORE)
    assert (done.encoded, done.tokens) == (3, sum(len(ids_of(engine, c)) for c in CHUNKS))
    for count in (1, 2, 3):
        kv = kept(engine, CHUNKS[count - 1])
        (keys, values), start = expected(engine, CHUNKS[:count])
        assert kv.start == start
        assert torch.allclose(kv.keys, keys, atol=1e-4)
        assert torch.allclose(kv.values, values, atol=1e-4)
    (_, alone), _ = expected(engine, CHUNKS[2:])
    assert not torch.allclose(values[-1], alone[-1], atol=1e-2)  # control


@pytest.mark.parametrize("texts", [CHUNKS, [[one] for one in CHUNKS]])
def test_texts_by_themselves_stand_behind_the_context_alone(engine, texts):
    engine.encode(texts, head_of(engine), context=BEFORE)
    for text in CHUNKS:
        (keys, _), start = expected(engine, [text])
        assert kept(engine, text).start == start
        assert torch.allclose(kept(engine, text).keys, keys, atol=1e-4)


def test_without_a_context_each_stands_behind_the_head_alone(engine):
    engine.encode([CHUNKS], head_of(engine), context=(BEFORE, None))
    alone, behind = sorted(engine.library.encoded_after(), key=lambda one: one.context)
    starts = [engine.library.shelf.fetch(alone, ids_of(engine, text)).start for text in CHUNKS]
    assert set(starts) == {len(alone.prefix_ids)}
    places = [engine.library.shelf.fetch(behind, ids_of(engine, text)).start for text in CHUNKS]
    assert len(set(places)) == 3


def test_a_window_that_is_full_is_followed_by_one_with_the_last_chunks_before_it(
    engine, monkeypatch
):
    long = max(len(ids_of(engine, text)) for text in DOCUMENT)
    monkeypatch.setattr(module, "LEAD_TOKENS", 2 * (long + 2))
    monkeypatch.setattr("cached_rag.library.encoder.BATCH_TOKENS", 5 * (long + 2))
    engine.encode([DOCUMENT], head_of(engine), context=BEFORE)
    starts = [kept(engine, text).start for text in DOCUMENT]
    begins = [at for at in range(1, len(starts)) if starts[at] < starts[at - 1]]
    assert len(begins) >= 2
    for at in begins:
        (keys, _), start = expected(engine, DOCUMENT[at - 2 : at + 1])
        assert kept(engine, DOCUMENT[at]).start == start
        assert torch.allclose(kept(engine, DOCUMENT[at]).keys, keys, atol=1e-4)


def test_what_is_kept_is_not_computed_again_but_stands_before_what_is_new(engine):
    engine.encode([CHUNKS[:2]], head_of(engine), context=BEFORE)
    held = kept(engine, CHUNKS[1]).keys
    done = engine.encode([CHUNKS], head_of(engine), context=BEFORE)
    assert (done.encoded, done.present, done.tokens) == (1, 2, len(ids_of(engine, CHUNKS[2])))
    assert torch.equal(kept(engine, CHUNKS[1]).keys, held)
    (keys, _), _ = expected(engine, CHUNKS)
    assert torch.allclose(kept(engine, CHUNKS[2]).keys, keys, atol=1e-4)
    assert engine.encode([CHUNKS], head_of(engine), context=BEFORE).encoded == 0


def test_a_text_that_stands_twice_in_a_document_or_in_two_is_encoded_once(engine):
    texts = [[CHUNKS[0], CHUNKS[1], CHUNKS[0]], [CHUNKS[2], CHUNKS[1]]]
    done = engine.encode([*texts, [" "], []], head_of(engine), context=BEFORE)
    assert len(done.skipped) == 1
    assert (done.encoded, done.tokens) == (3, sum(len(ids_of(engine, c)) for c in CHUNKS))
    (keys, _), _ = expected(engine, CHUNKS[:2])
    assert torch.allclose(kept(engine, CHUNKS[1]).keys, keys, atol=1e-4)


def test_a_mean_of_primers_is_that_of_whole_windows(engine):
    passages = (CHUNKS[0][:40], CHUNKS[1][:40])
    engine.encode([CHUNKS[1:]], None, context=Context.mean(*map(Context.fixed, passages)))
    kv = kept(engine, CHUNKS[2])
    found = []
    for passage in passages:
        (keys, values), start = expected(engine, CHUNKS[1:], passage)
        moved = torch.empty_like(keys)
        engine.model.rule.relocate(keys.contiguous(), kv.start - start, moved)
        found.append((moved, values))
    for side, each in zip((kv.keys, kv.values), zip(*found, strict=True), strict=True):
        assert torch.allclose(side, torch.stack(each).mean(0), atol=1e-4)


@pytest.mark.parametrize("context", [PRIMER, primer(2)])
def test_r_1_over_windows_is_full_prefill(engine, context):
    engine.encode([CHUNKS], head_of(engine), context=context)
    full = engine.prefill(ask(*CHUNKS), method="full").logits
    whole = engine.prefill(ask(*CHUNKS), method="prophetkv", recompute_ratio=1.0)
    assert whole.report.modules_hit == 3
    assert torch.allclose(whole.logits, full, atol=1e-4)
    assert not torch.allclose(engine.prefill(ask(*CHUNKS), method="reuse").logits, full, atol=1e-2)


def test_auto_repairs_less_of_what_was_encoded_behind_its_document(engine):
    texts = [f"{number}. {shuffled(number)}" for number in range(8)]
    repaired, settled = {}, {}
    for name, documents in (("apart", texts), ("document", [texts])):
        with Engine(engine.model, NEW_PROMPTS) as one:
            one.encode(documents, head_of(one), context=BEFORE)
            done = one.prefill(ask(*reversed(texts)), method="auto")
            layout = done.plan.layout(4)
            settled[name], repaired[name] = layout.settled, done.report.recomputed_tokens
            modules = layout.modules
            done.release()
    assert settled == {"apart": (), "document": modules[:-1]}  # the last was encoded first
    assert repaired["document"] < repaired["apart"]


def test_what_stands_behind_a_lead_counts_wherever_its_window_begins():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        texts = [f"{number}. {text}" for number in range(60) for text in CHUNKS]
        engine.encode([texts], head_of(engine), context=BEFORE)
        starts = [kept(engine, text).start for text in texts]
        begin = [at for at in range(1, len(texts)) if starts[at] < starts[at - 1]]
        assert len(begin) > 1  # each the first of its window, behind the end of the one before
        prompt = ask(*(texts[at] for at in begin[:3]))
        done = engine.prefill(prompt, method="auto")
        layout = done.plan.layout(4)
        done.release()
        assert layout.settled == layout.modules
        first = engine.prefill(ask(texts[begin[0]], texts[0]), method="auto")
        assert first.plan.layout(4).settled == first.plan.layout(4).modules[:1]
        first.release()


def test_a_document_longer_than_the_model_s_context_is_encoded_in_parts():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        room = engine.model.context_length
        texts = [f"{number}. {text}" for number in range(60) for text in CHUNKS]
        assert sum(len(ids_of(engine, text)) for text in texts) > 3 * room
        done = engine.encode([texts], head_of(engine), context=PRIMER)
        assert done.encoded == len(texts)
        assert all(kept(engine, one).start + len(ids_of(engine, one)) <= room for one in texts)


def test_a_context_that_differs_by_text_leaves_no_window(engine):
    texts = {CHUNKS[0]: [], CHUNKS[1]: [CHUNKS[2]], CHUNKS[2]: [CHUNKS[0]]}
    engine.encode([CHUNKS], head_of(engine), context=Context("own", texts.__getitem__))
    (behind,) = engine.library.encoded_after()
    for text, passages in texts.items():
        kv = engine.library.shelf.fetch(behind, ids_of(engine, text))
        assert kv.start == len(before(engine, behind, *passages))


def test_a_context_that_differs_by_text_needs_room_for_each_text_alone():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        one, other, before = (f"{word} {' '.join(CHUNKS * 5)}" for word in ("Leaf", "Twig", "Root"))
        length = len(ids_of(engine, other))
        assert 3 * length < engine.model.context_length < 4 * length
        passages = {one: [], other: [before, before]}
        context = Context("own", passages.__getitem__)
        assert engine.encode([[one, other]], head_of(engine), context=context).encoded == 2


@pytest.mark.parametrize("texts", ["a text", [["a text", 3]], [[["too", "deep"]]], [None]])
def test_what_is_no_text_is_refused(engine, texts):
    with pytest.raises(ConfigError, match="texts are"):
        engine.encode(texts)


@pytest.mark.parametrize("most", [LEAD_TOKENS + 1, LEAD_TOKENS + 200, 2048])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_windows_have_every_wanted_chunk_once_and_end_with_one(most, step):
    chunks = [(number,) * (20 + 37 * number % 300) for number in range(60)]
    wanted = set(chunks[::step])
    found = list(windows(chunks, wanted.__contains__, (0, 0), most))
    assert [c for one in found for c in one.chunks if c in wanted] == chunks[::step]
    for one in found:
        assert one.chunks[0] in wanted
        assert one.chunks[-1] in wanted
        at = chunks.index(one.chunks[0])
        assert one.lead == tuple(chunks[at - len(one.lead) : at])
        own = sum(len(ids) + 2 for ids in one.chunks) - 2
        room = min(LEAD_TOKENS, most - own)
        lead = sum(len(ids) + 2 for ids in one.lead)
        assert lead <= max(0, room)
        assert len(one.lead) == at or lead + len(chunks[at - len(one.lead) - 1]) + 2 > room
        assert own <= most - LEAD_TOKENS or len(one.chunks) == 1


@pytest.mark.parametrize("tokens", [128, 256, 512])
def test_only_the_first_chunk_of_a_document_has_none_before_it(tokens):
    chunks = [(number,) * tokens for number in range(20)]
    found = list(windows(chunks, lambda _: True, (0, 0), 2048))
    assert len(found) > 1
    assert [bool(one.lead) for one in found] == [False] + [True] * (len(found) - 1)
