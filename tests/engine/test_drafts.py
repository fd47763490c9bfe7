"""Drafts: what is proposed, that answers stay what they were, and that it takes fewer passes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, UNMOVABLE, random_ids, tiny_model
from crowd import ASKED, DOCUMENTS, PARTS
from doubles import Plain, Recording

from cached_rag import BatchConfig, Engine, GenerationConfig, StoreConfig
from cached_rag.engine.decoding import Decoding
from cached_rag.engine.drafts import LONGEST, MOST, REST, SHORTEST, Chance, Drafts

EOS = 1


# What is proposed ------------------------------------------------------------------------------


def draft(prompt, answer, chunks=(), max_tokens=100):
    return Drafts(prompt, chunks, max_tokens).propose(answer)


def test_a_draft_follows_the_longest_run_of_last_tokens():
    prompt = [5, 6, 90, 7, 5, 6, 91, 4, 5, 6, 92]
    assert draft(prompt, [4, 5, 6])[:1] == [92]
    assert draft(prompt, [7, 5, 6])[:1] == [91]
    assert draft(prompt, [8, 5, 6])[:1] == [90]  # the first, where none is longer
    assert draft(prompt, [8, 8, 6]) == []  # one token is too few


def test_a_draft_comes_from_the_best_chunk_then_from_the_prompt_then_from_the_answer():
    prompt = [5, 6, 90, 0, 5, 6, 91, 0, 5, 6, 92]
    assert draft(prompt, [5, 6], [(8, 11), (4, 7)])[:1] == [91]
    assert draft(prompt, [5, 6], [(8, 11)])[:1] == [92]
    assert draft(prompt, [5, 6])[:1] == [90]
    assert draft([1, 2, 3], [5, 6, 7, 9, 5, 6]) == [7, 9, 5, 6]  # as far as the answer goes


def test_a_draft_is_as_long_as_the_answer_has_room_besides_one_token():
    prompt = random_ids(40)
    assert draft(prompt, prompt[:10], max_tokens=13) == prompt[10:12]
    assert draft(prompt, prompt[:10], max_tokens=11) == []
    assert 4 <= len(draft(prompt, prompt[:10])) <= MOST


def slow_twin(prompt, answer, chunks):
    """The place behind the best run, by comparing everything with everything."""
    ids = [*prompt, *answer]
    inside = {at for begin, end in chunks for at in range(begin, end)}

    def run(place):
        count = 0
        while count < min(place, LONGEST) and ids[place - 1 - count] == ids[-1 - count]:
            count += 1
        return count

    places = [p for p in range(1, len(ids)) if run(p) >= SHORTEST]
    best = min(places, key=lambda p: (-run(p), p not in inside, p), default=None)
    return None if best is None else ids[best]


def test_drafts_find_what_comparing_everything_finds():
    draw, hits = random.Random(3), 0
    for _ in range(200):
        prompt = draw.choices(range(4), k=draw.randint(1, 60))
        begin = draw.randrange(len(prompt))
        chunks = [(begin, draw.randint(begin, len(prompt)))]
        drafts, answer = Drafts(prompt, chunks, 40), []
        while len(answer) < 30:
            answer += draw.choices(range(4), k=draw.randint(1, 5))
            found = drafts.propose(answer)
            assert found[:1] == [t for t in [slow_twin(prompt, answer, chunks)] if t is not None]
            hits += bool(found)
    assert hits > 500


# When it pays ----------------------------------------------------------------------------------


def test_drafts_that_are_wrong_become_shorter_then_stop_and_are_tried_again_rarely():
    chance, counts = Chance(), []
    for _ in range(40 + 4 * (REST + 1)):
        counts.append(chance.worth(1 / 6))
        if counts[-1]:
            chance.learn(counts[-1], 0)
    stopped = counts.index(0)
    assert counts[:stopped] == sorted(counts[:stopped], reverse=True)
    assert stopped < 12
    assert Counter(counts[-2 * (REST + 1) :]) == {0: 2 * REST, 1: 2}


def test_drafts_that_are_right_grow_again():
    chance = Chance(0.0, 10.0)
    while not (count := chance.worth(1 / 6)):
        pass
    for _ in range(30):
        chance.learn(count, count)
        count = chance.worth(1 / 6)
    assert count == MOST


def test_drafts_are_shorter_the_more_answers_share_a_pass():
    prompt = random_ids(40)
    counts = [len(Drafts(prompt, (), 99).propose(prompt[:10], rows)) for rows in (1, 4, 8, 16)]
    assert counts == sorted(set(counts), reverse=True)
    assert counts[-1] == 0


# Answers stay what they were -------------------------------------------------------------------

PROMPT = f"{CHUNKS[0]} {CHUNKS[1]} {CHUNKS[0]} {CHUNKS[2]} Say all of it again."
SETTINGS = [
    {"max_tokens": 60, "ignore_eos": True},
    {"max_tokens": 60, "repetition_penalty": 1.3},
    {"max_tokens": 60, "stop": ("e", "on")},
    {"max_tokens": 7, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 0.7, "seed": 3, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 2.0, "top_k": 5, "top_p": 0.9, "seed": 4},
]
# One of each kind of layers; of all families `test_step.py` takes several tokens in a step.
KINDS = ("llama", "gpt2", "cohere", "lfm2")
BACKENDS = [*map(tiny_model, KINDS), Plain(tiny_model("llama"), can_append=True)]


def both(engine, prompt, **options):
    """The answers without drafts and with them, after comparing all that they say."""
    plain, found = (engine.generate(prompt, drafts=d, **options) for d in (False, True))
    assert found.token_ids == plain.token_ids
    assert (found.text, found.finish_reason) == (plain.text, plain.finish_reason)
    assert plain.report.drafted_tokens == plain.report.accepted_tokens == 0
    return plain, found


@pytest.mark.parametrize(
    "model", BACKENDS, ids=lambda model: f"{model.name}-{type(model).__name__}"
)
def test_answers_are_those_without_drafts(model):
    accepted = rejected = 0
    engine = Engine(model)
    engine.encode(CHUNKS, context=None)
    methods = ("full",) if model.name in UNMOVABLE else ("full", "reuse", "epic:anchor_tokens=8")
    for settings, method in zip(SETTINGS, methods * len(SETTINGS), strict=False):
        report = both(engine, PROMPT, method=method, **settings)[1].report
        accepted += report.accepted_tokens
        rejected += report.drafted_tokens - report.accepted_tokens
    assert rejected > 4
    assert accepted > 5 or model.name == "lfm2"  # a random one repeats nothing


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_schemas_answers_are_those_without_drafts(part):
    engine = Engine(tiny_model("llama"))
    found = both(engine, PARTS[part], max_tokens=60, ignore_eos=True)[1]
    assert found.report.accepted_tokens


def test_answers_are_those_of_transformers_with_and_without_its_own_lookup():
    for name in ("llama", "qwen2", "phi3", "gpt_neox"):
        model = tiny_model(name)
        engine = Engine(model)
        found = engine.generate(PROMPT, method="full", max_tokens=60, ignore_eos=True)
        ids = torch.tensor(
            [engine.tokenization.tokenize(engine.tokenization.template.render(PROMPT)).ids]
        )
        for lookup in ({}, {"prompt_lookup_num_tokens": 5}):
            own = model.decoder.model.generate(
                ids, max_new_tokens=60, do_sample=False, eos_token_id=-1, pad_token_id=0, **lookup
            )
            assert found.token_ids == tuple(own[0, ids.shape[1] :].tolist())
        assert found.report.accepted_tokens


def test_models_that_take_one_token_a_step_draft_nothing():
    model = Recording(tiny_model("mistral"))
    engine = Engine(model)
    report = both(engine, PROMPT, max_tokens=60, ignore_eos=True)[1].report
    assert report.drafted_tokens == report.accepted_tokens == 0
    assert not report.notes
    assert {count for rows in model.steps for count in rows} == {1}


# In fewer passes -------------------------------------------------------------------------------


class Script(Recording):
    """A model that says a given text, whatever it is asked: only its logits are made up.

    Attributes:
        said: the answer's token ids; begins behind the prompt's `length` tokens.
    """

    said, length = (), 0

    def _scores(self, slots):
        scores = torch.zeros(len(slots), self.model.vocab_size)
        for row, slot in enumerate(slots):
            scores[row, self.said[min(slot + 1 - self.length, len(self.said) - 1)]] = 9.0
        return scores

    def prefill(self, buffer, token_ids, *given, **options):
        done = self.model.prefill(buffer, token_ids, *given, **options)
        self.length = token_ids.shape[1]
        done.tail = self._scores([self.length - 1])[None]
        return done

    def step(self, batch):
        super().step(batch)
        ends = [(row.kv.length, row.num_logits) for row in batch]
        return self._scores([slot for end, n in ends for slot in range(end - n, end)])


def scripted(said, **settings):
    model = Script(tiny_model("llama"))
    model.said = said
    return Engine(model, **settings)


def ids_of(engine, prompt):
    return engine.tokenization.tokenize(engine.tokenization.template.render(prompt)).ids


def test_an_answer_that_copies_takes_a_pass_for_nine_tokens():
    prompt = " ".join([*CHUNKS, *DOCUMENTS, "Say it again."])
    engine = scripted((), store=NEW_PROMPTS)
    engine.model.said = ids_of(engine, prompt)[20:]
    plain, found = both(engine, prompt, method="full", max_tokens=64)
    assert found.token_ids == tuple(engine.model.said[:64])
    steps = engine.model.steps[len(plain.token_ids) - 1 :]
    assert len(steps) <= 64 / (MOST + 1) + 4  # the first tokens are too few to be found
    assert max(count for (count,) in steps) == MOST + 1
    report = found.report.to_dict()
    assert report["accepted_tokens"] == 64 - 1 - len(steps)
    assert report["drafted_tokens"] == sum(count - 1 for (count,) in steps)


def test_an_answer_may_end_within_a_draft():
    """With a token that ends answers, a stop string, or by its length: no more of it counts."""
    messages = [{"role": "user", "content": text} for text in (CHUNKS[0], DOCUMENTS[0])]
    store = StoreConfig(sequence_bytes=1 << 24)
    engines = [scripted((), store=store) for _ in range(2)]
    ids = ids_of(engines[0], messages)
    begin = ids.index(EOS) - 12  # the template ends a message with the token that ends answers
    for said, options in (
        (ids[begin:], {}),
        (ids[begin:], {"stop": (CHUNKS[0][-12:-9],)}),
        (ids[4:], {"max_tokens": 10}),
    ):
        found = []
        for engine, drafts in zip(engines, (False, True), strict=True):
            engine.model.said = said
            answer = engine.generate(messages, method="full", drafts=drafts, **options)
            kept = engine.sequences.nbytes
            found.append((answer.token_ids, answer.text, answer.finish_reason, kept))
        assert found[0] == found[1]
        assert kept
        assert len(found[1][0]) == 12 if not options else len(found[1][0]) <= 12
        assert answer.report.accepted_tokens >= 4


def test_an_answer_that_copies_nothing_takes_hardly_longer():
    """Pairs that the prompt has, each followed by something else, so that most drafts are wrong."""
    engine = scripted(())
    prompt = " ".join(CHUNKS)
    ids = ids_of(engine, prompt)
    draw = random.Random(1)
    said = []
    for _ in range(70):
        at = draw.randrange(10, len(ids) - 12)
        said += [*ids[at : at + 2], 2 + (ids[at + 2] - 1) % 200]
    engine.model.said = said
    report = both(engine, prompt, method="full", max_tokens=200)[1].report
    assert report.drafted_tokens
    assert report.drafted_tokens / 6 - report.accepted_tokens < 0.05 * 200  # in passes


def test_what_a_draft_left_is_not_read_by_later_prompts():
    answers = []
    for drafts in (False, True):
        engine = Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 26))
        options = {"method": "full", "drafts": drafts, "ignore_eos": True, "max_tokens": 40}
        first = engine.generate(PROMPT, **options)
        rejected = first.report.drafted_tokens - first.report.accepted_tokens
        more = f"{PROMPT}{first.text} And then?"
        second = engine.generate(more, **options)
        answers.append((first.token_ids, second.token_ids))
        assert second.report.cached_tokens > first.report.prompt_tokens
    assert answers[0] == answers[1]
    assert rejected


# In a batch ------------------------------------------------------------------------------------


def test_rows_with_and_without_drafts_go_through_one_pass():
    settings = [{**s, "drafts": n % 3 != 2} for n, s in enumerate(SETTINGS)]
    model = Recording(tiny_model("llama"))
    engine = Engine(model, batch=BatchConfig(prefill_tokens=64))
    asked = [f"{prompt}\n{PROMPT}" for prompt in ASKED]
    options = {"method": "full", "max_tokens": 40}
    expected = [
        engine.generate(p, **{**options, **s}) for p, s in zip(asked, settings, strict=True)
    ]
    model.steps.clear()
    streams = [engine.stream(p, **{**options, **s}) for p, s in zip(asked, settings, strict=True)]
    for stream in streams:
        stream.start()
    answers = [stream.result() for stream in streams]
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert any(1 in rows and set(rows) & set(range(2, MOST + 2)) for rows in model.steps)
    assert engine.scheduler.nbytes == 0


def test_drafts_outlive_a_pass_that_fails_for_another_answer():
    model = Recording(tiny_model("llama"))
    engine, options = Engine(model), {"method": "full", "max_tokens": 40, "ignore_eos": True}
    asked = [PROMPT, f"{PROMPT} Now!", f"{PROMPT} Please."]
    expected = [engine.generate(prompt, **options).token_ids for prompt in asked]
    broken = []

    def fails(batch):
        lengths = [len(row.token_ids) for row in batch]
        if len(batch) == 3 and max(lengths) > 1:
            broken.append(lengths)
            return RuntimeError("a pass")
        return None

    model.fails = fails
    assert [a.token_ids for a in engine.generate_batch(asked, **options)] == expected
    assert broken


# Sampling --------------------------------------------------------------------------------------


def test_sampled_tokens_are_as_probable_as_without_drafts():
    """Of two tokens drafted: each token as often as its probability, behind each that may be there.

    The bound is the chi-square distribution's at one in a thousand.
    """
    shares, trials = torch.tensor([0.5, 0.3, 0.15, 0.05]), 3000
    logits = torch.full((3, tiny_model("llama").vocab_size), -torch.inf)
    for row in range(3):
        logits[row, 10:14] = shares.roll(row).log()
    firsts, seconds, accepted = Counter(), Counter(), Counter()
    for seed in range(trials):
        decoding = Decoding(tiny_model("llama"), GenerationConfig(temperature=1.0, seed=seed))
        decoding.begin([5])
        accepted[decoding.take_drafted(logits, [11, 10])[1]] += 1
        firsts[decoding.token_ids[0]] += 1
        if decoding.token_ids[0] == 11:
            seconds[decoding.token_ids[1]] += 1
        assert len(decoding.token_ids) == 1 + (decoding.token_ids[0] == 11) + (
            decoding.token_ids[:2] == [11, 10]
        )
    for found, expected in ((firsts, shares), (seconds, shares.roll(1))):
        count = sum(found.values())
        wanted = (count * expected).tolist()
        statistic = sum((found[10 + n] - w) ** 2 / w for n, w in enumerate(wanted))
        assert statistic < 16.27  # 3 degrees of freedom
    assert accepted[0] == trials - firsts[11]
    assert accepted[2] == seconds[10]
