"""Repair that goes on with the answer, against its parts one by one."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch
from conftest import CHUNKS, tiny_model

from cached_rag import BatchConfig, ConfigError, Engine, GenerationConfig, StoreConfig
from cached_rag.backends.base import RepairInput
from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.transformers.model import LanguageModel
from cached_rag.engine.decoding import answer_alone
from cached_rag.engine.sharing import Sharing
from cached_rag.engine.trace import Kind
from cached_rag.kv.buffer import KVBuffer
from cached_rag.methods import AnchorFlow, InfoFlow, Layout

FOLLOWS = "anchorflow:follow_tokens=3,follow_ratio=0.05"
TEXTS = [f"{chunk} {other}" for chunk, other in zip(CHUNKS, CHUNKS[1:] + CHUNKS, strict=False)]
PROMPTS = [
    "\n\n".join([*texts, question])
    for texts, question in ((TEXTS, "Why is it green?"), (TEXTS[::-1], "And who lit the lamp?"))
]
LENGTH = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def opened():
    with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=0, settle=False)) as engine:
        engine.encode(TEXTS, context=None)
        yield engine


@pytest.mark.parametrize("is_given", [True, False])
def test_followed_tokens_are_their_choice_and_then_plain_repair(opened, is_given):
    model = opened.model
    prefill = opened.prefill(PROMPTS[0], method=FOLLOWS, max_tokens=12, ignore_eos=True)
    layout, layers = prefill.plan.layout(model.shapes.num_layers), model.shapes.num_layers
    ids = [*prefill.tokens.ids, int(prefill.logits.argmax())]
    stale = layout.reused.clone()
    whole = [[*Kind].index(kind) for kind in (Kind.COMPUTED, Kind.REPAIRED)]
    stale[torch.isin(torch.from_numpy(prefill.trace_source.kinds).long(), torch.tensor(whole))] = (
        False
    )
    twin = KVBuffer(prefill.buffer.keys.clone(), prefill.buffer.values.clone())
    draft = [7, 8] if is_given else likeliest(model, twin, ids, 2)
    ids += draft
    fresh = torch.arange(len(ids)) >= len(ids) - 3
    each = -(-int(layout.reused.sum()) // 20)
    now = Layout(fresh, ~fresh & ~torch.cat([stale, stale.new_zeros(3)]), (), layers)
    share = (3 * each + 0.5) / int(stale.sum())
    chosen = model.choose(RepairInput(twin, torch.tensor([ids]), now, InfoFlow(share))).rows
    assert stale[chosen[:-3]].all()
    assert len(chosen) - 3 == 3 * each
    plain = model.prefill(twin, torch.tensor([ids]), chosen, num_logits=3)
    logits, drafted = prefill.follow(ids[-3:-2], draft if is_given else None)
    assert drafted == draft
    assert torch.allclose(logits, plain.tail[0], atol=1e-5)
    end = len(ids)
    for ours, theirs in zip(
        (prefill.buffer.keys, prefill.buffer.values), (twin.keys, twin.values), strict=True
    ):
        assert torch.allclose(ours[..., :end, :], theirs[..., :end, :], atol=1e-5)
    assert prefill.follow([*ids[-3:], 9]) is None  # all three were followed
    prefill.release()


def likeliest(model, buffer, ids, count):
    """The tokens that a plain loop says next."""
    said = list(ids)
    for _ in range(count):
        slots = torch.tensor([len(said) - 1])
        said.append(int(model.prefill(buffer, torch.tensor([said]), slots).logits.argmax()))
    return said[len(ids) :]


def test_answers_follow_and_cost_what_they_report(opened):
    plain = opened.generate(PROMPTS[0], method="anchorflow", **LENGTH).report
    found = opened.generate(PROMPTS[0], method=FOLLOWS, **LENGTH).report
    more = found.recomputed_tokens - plain.recomputed_tokens
    reused = plain.recomputed_tokens + plain.cached_tokens
    assert 0.12 * reused < more < 0.18 * reused + 3
    assert found.cached_tokens == plain.cached_tokens - more
    assert found.charged_recompute > plain.charged_recompute + more / found.prompt_tokens


def test_auto_follows_an_answer_where_entries_are_alike():
    parts = [f"Part {n * 37} costs {n * 91 % 101} EUR." for n in range(28)]
    texts = ["\n".join(parts[at : at + 7]) for at in range(0, 28, 7)]
    prompt = "\n\n".join([*texts, "What does part 37 cost?"])
    with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=0, settle=False)) as engine:
        engine.encode([*texts, *TEXTS], context=None)

        def answer(method, asked=prompt):
            return engine.generate(asked, method=method, **LENGTH)

        auto, four = answer("auto"), answer("anchorflow:follow_tokens=4")
        assert auto.token_ids == four.token_ids
        assert auto.report.charged_recompute == four.report.charged_recompute
        assert auto.report.recomputed_tokens > answer("anchorflow").report.recomputed_tokens
        plain = [answer(one, PROMPTS[0]).report for one in ("auto", "anchorflow")]
        assert plain[0].recomputed_tokens == plain[1].recomputed_tokens


def test_an_explanation_shows_what_following_recomputed(opened):
    plain = opened.generate(PROMPTS[0], method="anchorflow", **LENGTH)
    found = opened.generate(PROMPTS[0], method=FOLLOWS, **LENGTH)
    for one in (plain, found):
        counts = one.trace.counts
        assert counts[Kind.REPAIRED] == one.report.recomputed_tokens
        assert counts[Kind.MOVED] + counts[Kind.IN_PLACE] == one.report.cached_tokens
    assert found.trace.counts[Kind.REPAIRED] > plain.trace.counts[Kind.REPAIRED]


def test_a_trace_that_is_made_while_its_answer_is_followed_hides_nothing(opened, monkeypatch):
    options = {"method": FOLLOWS, **LENGTH, "temperature": 2.0, "seed": 3}
    stream = opened.stream(PROMPTS[0], **options)
    stream.start()
    while not stream.token_ids:
        opened.scheduler.turn()

    def slowly(key):
        while len(stream.token_ids) < 4:
            opened.scheduler.turn()

    monkeypatch.setattr("cached_rag.engine.trace.kept_profile", slowly)
    assert sum(stream.trace.counts.values()) == stream.report.prompt_tokens
    found = stream.result()
    assert found.trace.counts[Kind.REPAIRED] == found.report.recomputed_tokens


def test_nothing_is_left_when_a_token_chooses_all(opened):
    found = opened.generate(
        PROMPTS[0], method="anchorflow:follow_tokens=3,follow_ratio=1", **LENGTH
    ).report
    assert found.cached_tokens == 0


@pytest.mark.parametrize("drafts", [True, False])
def test_many_answers_are_each_ones_own(opened, drafts):
    config = {"method": FOLLOWS, **LENGTH, "drafts": drafts}
    alone = []
    for prompt in PROMPTS:
        prefill = opened.prefill(prompt, **config)
        with_config = GenerationConfig(**config)
        alone.append(
            on_model_thread(lambda p=prefill, c=with_config: answer_alone(opened.model, p, c))
        )
        prefill.release()
    together = opened.generate_batch(PROMPTS * 2, **config)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone] * 2
    single = [opened.generate(prompt, **config) for prompt in PROMPTS]
    assert [one.token_ids for one in single] == [one.token_ids for one in alone]
    for one, twin in zip(single, alone, strict=True):
        assert one.report.recomputed_tokens == twin.report.recomputed_tokens


def test_answers_that_are_set_back_are_the_same(opened, pages):
    """The second of two waits for the first; what its answer had repaired is repaired again."""
    model = opened.model
    long = {"method": FOLLOWS, "max_tokens": 240, "ignore_eos": True, "temperature": 2.0, "seed": 3}
    asked = [f"{text} Why?" for text in TEXTS[:2]]
    free = opened.generate_batch(asked, **long)
    room = (2 * 256 + 6) * model.shapes.bytes_per_token
    bound = BatchConfig(max_bytes=room, shares=False)
    with Engine(model, StoreConfig(sequence_bytes=0, settle=False), bound) as tight:
        tight.encode(TEXTS, context=None)
        found = tight.generate_batch(asked, **long)
    assert any("interrupted" in note for one in found for note in one.report.notes)
    assert [one.token_ids for one in found] == [one.token_ids for one in free]
    for one, twin in zip(found, free, strict=True):
        assert one.report.recomputed_tokens == twin.report.recomputed_tokens


@pytest.mark.parametrize("after", [1, 2])
def test_an_answer_set_back_while_it_is_followed_is_the_same(opened, after):
    # At random, the draft is mostly wrong, so each token is followed by itself.
    options = {"method": FOLLOWS, **LENGTH, "temperature": 2.0, "seed": 3}
    expected = opened.generate(PROMPTS[0], **options)
    scheduler, stream = opened.scheduler, opened.stream(PROMPTS[0], **options)
    stream.start()
    while len(stream.token_ids) < after:
        scheduler.turn()
    (request,) = scheduler._batch
    assert request.prompt.is_following
    spent = stream.report.fuse_ms
    with scheduler._turning:
        scheduler._batch.set_back(request)
    assert stream.result().token_ids == expected.token_ids
    assert stream.report.fuse_ms == spent  # a part of the time to the first token, which is over
    assert stream.report.recomputed_tokens == expected.report.recomputed_tokens


@pytest.mark.parametrize("ratio", [0.05, 1])
def test_an_answer_set_back_computes_its_last_token_though_it_is_drafted_now(
    opened, monkeypatch, ratio
):
    """As other KV may draft otherwise, such as what another prompt has left meanwhile."""
    options = {"method": f"anchorflow:follow_tokens=4,follow_ratio={ratio}", **LENGTH}
    options |= {"temperature": 2.0, "seed": 3}
    expected = opened.generate(PROMPTS[0], **options).token_ids
    scheduler, stream = opened.scheduler, opened.stream(PROMPTS[0], **options)
    stream.start()
    while len(stream.token_ids) < 2:
        scheduler.turn()
    (request,) = scheduler._batch
    with scheduler._turning:
        scheduler._batch.set_back(request)

    def right(model, buffer, token_ids, most):
        done = len(token_ids) - len(request.prompt.ids)
        return list(expected[done : done + most])

    monkeypatch.setattr("cached_rag.engine.prompt.likeliest", right)
    scheduler.turn()
    assert request.pending
    assert request.prompt.kv.length == len(request.prompt.ids) + len(stream.token_ids) - 1
    assert stream.result().token_ids[:2] == expected[:2]


def test_answers_share_once_they_are_followed_no_more(opened, monkeypatch):
    adopted, adopt = [], Sharing.adopt
    monkeypatch.setattr(Sharing, "adopt", lambda *args: (adopted.append(args[1]), adopt(*args)))
    answers = opened.generate_batch(PROMPTS, method=FOLLOWS, **LENGTH)
    assert len(adopted) == len(set(map(id, adopted))) == len(answers) == 2


def test_what_a_draft_brought_is_there_when_kv_is_shared():
    """An answer shares after it was followed, when the first of its drafts was just accepted."""
    words = " ".join(CHUNKS).split()
    head = " ".join(" ".join(random.Random(n).sample(words, len(words))) for n in range(3))
    options = {"method": "anchorflow:follow_tokens=4", "max_tokens": 20, "ignore_eos": True}
    asked = [f"{head}\n\n{text}\n\n{q}" for text in TEXTS[1:] for q in ("Why?", "Say it.")]
    for prompt in asked:
        with Engine(tiny_model("llama"), StoreConfig(sequence_bytes=0, settle=False)) as engine:
            engine.encode(TEXTS, context=None)
            alone = engine.generate(prompt, **options).token_ids
            stream = engine.stream(f"{head}\n\nWho?", max_tokens=300, ignore_eos=True)
            with closing(stream) as beside:
                next(beside)
                assert engine.generate(prompt, **options).token_ids == alone


def test_kv_of_an_answer_that_failed_half_repaired_is_not_kept(opened, monkeypatch):
    repair = LanguageModel.repair

    def fail(model, prompt):
        if not prompt.layout.modules:  # the answer is followed
            raise MemoryError("none left")
        return repair(model, prompt)

    with Engine(opened.model, StoreConfig(settle=False, keeps_repaired=True)) as engine:
        engine.encode(TEXTS, context=None)
        with monkeypatch.context() as patch:
            patch.setattr(LanguageModel, "repair", fail)
            with pytest.raises(MemoryError):
                engine.generate(PROMPTS[0], method=FOLLOWS, **LENGTH)
        asked = PROMPTS[0] + " Say it."
        assert engine.generate(asked, method=FOLLOWS, **LENGTH).report.kept_repaired_tokens == 0
        assert engine.generate(asked, method=FOLLOWS, **LENGTH).report.kept_repaired_tokens > 0


def test_where_nothing_can_be_watched_nothing_is_followed():
    with Engine(tiny_model("bloom"), StoreConfig(settle=False)) as engine:
        engine.encode(TEXTS, context=None)
        with pytest.raises(ConfigError, match="leave out follow_tokens"):
            engine.generate(PROMPTS[0], method="anchorflow:recompute_ratio=0,follow_tokens=3")


def test_what_an_answer_left_serves_its_own_method_only(opened):
    with Engine(opened.model, StoreConfig(settle=False, keeps_repaired=True)) as engine:
        engine.encode(TEXTS, context=None)
        engine.generate(PROMPTS[0], method=FOLLOWS, **LENGTH)
        other = engine.generate(PROMPTS[0] + " Say it.", method="anchorflow", **LENGTH)
        same = engine.generate(PROMPTS[0] + " Say it.", method=FOLLOWS, **LENGTH)
    assert other.report.kept_repaired_tokens == 0
    assert same.report.kept_repaired_tokens > 0


@pytest.mark.parametrize(
    "options", [{"follow_tokens": -1}, {"follow_tokens": 65}, {"follow_ratio": 1.5}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="follow_"):
        AnchorFlow(**options)


def test_a_joined_method_does_not_follow():
    with pytest.raises(ConfigError, match="follow_tokens"):
        GenerationConfig(method="anchorflow:follow_tokens=3+random")
