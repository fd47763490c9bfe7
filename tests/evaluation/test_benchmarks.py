"""Benchmarks: the loop that all share, and that what they compare is what it is called."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from doubles import Recording

from cached_rag import ConfigError, Engine, GenerationConfig
from cached_rag.backends.transformers import kernels
from cached_rag.backends.transformers.kernels import KV, reference
from cached_rag.errors import EvaluationError
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.timing import make_texts, medians, take_turns
from cached_rag.kv.layers import KVShapes, LayerShape
from cached_rag.kv.rows import LONGEST_SLAB
from cached_rag.methods.base import Layout
from cached_rag.rag.answer import Prompts
from docs.experiments import mmlu
from docs.experiments.attention import intensity, make_steps, theory
from docs.experiments.cold import cold_ms
from docs.experiments.map_reduce import SYSTEM, bench_chains
from docs.experiments.serving import METHODS, Workload
from docs.experiments.traffic import bench_traffic, drawn

KV_HEADS, HEADS, DIM = 2, 6, 16


def test_the_loop_takes_turns_and_drops_the_rounds_to_warm_up():
    called, told = [], []

    def variant(name):
        def call():
            called.append(name)
            return len(called)

        return call

    samples = take_turns(
        {name: variant(name) for name in "abc"},
        3,
        warm_up=1,
        on_round=lambda: told.append(len(called)),
    )
    # every variant once a round, each round beginning with the next one
    assert "".join(called) == "abc" + "bca" + "cab" + "abc"
    assert samples == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}
    assert told == [3, 6, 9, 12]


def test_the_loop_gives_the_median_of_every_figure():
    figures = iter([(900, 9), (3, 0), (1, 5), (20, 7)])

    def call():
        return dict(zip(("ms", "tokens"), next(figures), strict=True))

    assert medians({"only": call}, 3) == {"only": {"ms": 3, "tokens": 5}}


def test_the_loop_refuses_what_measures_nothing():
    for variants, rounds in (({}, 1), ({"a": dict}, 0)):
        with pytest.raises(ConfigError, match="nothing to measure"):
            take_turns(variants, rounds)


def test_short_calls_are_warmed_up_twice_and_timed_without_gradients():
    modes = {"a": [], "b": []}
    variants = {
        name: lambda name=name: modes[name].append(torch.is_inference_mode_enabled())
        for name in modes
    }
    found = cold_ms(variants, 3, torch.device("cpu"))
    assert modes == {"a": [True] * 5, "b": [True] * 5}
    assert list(found) == ["a", "b"]
    assert min(found.values()) > 0


def shapes(dtype=torch.float32):
    return KVShapes((LayerShape(KV_HEADS, DIM, DIM),), dtype, torch.device("cpu"))


@pytest.mark.parametrize("shared", [40, LONGEST_SLAB])  # only short copies lie in a slab
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_relayed_and_copied_attention_give_the_same(shared, batch):
    steps = make_steps(shapes(), HEADS, batch, shared, private=7)
    relayed, copied = steps["relay"].attend(), steps["copied"].attend()
    assert torch.allclose(relayed, copied, atol=1e-5)
    cache, query = steps["relay"].cache, steps["relay"].query
    (common,), (own, *_) = cache.shared, cache.private
    ahead = common.keys[0], common.values[0]
    keys, values = (
        torch.cat([run, mine[0][own.rows[0]][None, :, :7]], 2)
        for run, mine in zip(ahead, (own.keys, own.values), strict=True)
    )
    token = int(own.tokens[0])
    folded = query[:, :, token].view(1, KV_HEADS, -1, DIM)
    expected, _ = reference(folded, KV(keys, values), DIM**-0.5)
    assert torch.allclose(relayed[0, :, token], expected.reshape(HEADS, DIM), atol=1e-5)
    alone, _ = reference(folded, KV(*ahead), DIM**-0.5)
    assert not torch.allclose(relayed[0, :, token], alone.reshape(HEADS, DIM), atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "shared", "relay", "copied"),
    [
        (torch.float32, 100, "flash, padded", "padded"),
        (torch.float32, LONGEST_SLAB + 1, "flash, padded", "flash"),
        (torch.bfloat16, LONGEST_SLAB, "flash, padded", "flash"),
        (torch.bfloat16, LONGEST_SLAB + 1, "matmul, padded", "flash"),  # all rows, or one
        (torch.bfloat16, 2 * LONGEST_SLAB, "matmul, padded", "matmul"),
    ],
)
def test_the_kernels_named_are_those_of_the_scheduler(dtype, shared, relay, copied, monkeypatch):
    monkeypatch.setattr(kernels, "flash_has_matrix_units", lambda: False)
    monkeypatch.setattr(kernels, "FLASH_KEYS", ((1, LONGEST_SLAB + 20), (9, LONGEST_SLAB)))
    steps = make_steps(shapes(dtype), HEADS, 4, shared, private=7)
    assert (steps["relay"].kernels(), steps["copied"].kernels()) == (relay, copied)


def test_the_theory_is_equation_10():
    assert theory(1, 100, 50) < 1  # the merge costs, and nothing is shared
    assert theory(10**9, 1000, 50) == pytest.approx(1052 / 57)  # the shared part is read for free
    assert theory(16, 2048, 128) > theory(8, 2048, 128) > theory(8, 1024, 128)


def test_the_intensity_is_equation_3():
    m, n, k = 6, 2048, 64
    assert intensity(m, n, k) == pytest.approx(2 * m * n * k / (2 * (m * k + n * k + m * n)))
    assert intensity(1, n, k) < 1 < intensity(m, n, k) < m  # one query: memory is the bound


def test_all_ways_of_serving_give_the_same_answers():
    work = Workload.made(tiny_model("qwen3"), shared_tokens=200, private_tokens=20, requests=3)
    config = GenerationConfig(method="prefix", max_tokens=12)
    answers = {name: work.engines[name].generate_batch(work.prompts, config) for name in METHODS}
    tokens = {name: [answer.token_ids for answer in found] for name, found in answers.items()}
    assert all(found == tokens["relay"] for found in tokens.values())
    assert len(set(tokens["relay"])) > 1  # control: prompts differ, and so do answers
    shared = {name: found[-1].report.shared_kv_bytes for name, found in answers.items()}
    assert [name for name, nbytes in shared.items() if nbytes] == ["relay"]
    computed = {name: found[0].report.charged_recompute for name, found in answers.items()}
    assert computed["recomputed"] == 1.0 > 0.3 > computed["copied"]
    work.close()


def test_mmlu_counts_the_first_letter_of_an_answer(tmp_path, monkeypatch):
    asked = '"So, ""is"" it 2?",1,2,3,4,B\n' * 3
    for part, rows in (("dev", "Is it 1?,1,2,3,4,A\n" * 5), ("test", asked)):
        (tmp_path / part).mkdir()
        (tmp_path / part / f"odd_sums_{part}.csv").write_text(rows)
    served, prompts = mmlu.serve, []

    def answered(engine, asked, config):
        found = served(engine, asked, config)
        assert all(answer.text for answer in found.answers)
        prompts.append(asked)
        texts = ("I say B, not A", "A or B", "none of these")
        given = zip(found.answers, texts, strict=True)
        return replace(found, answers=[replace(answer, text=text) for answer, text in given])

    monkeypatch.setattr(mmlu, "serve", answered)
    rows = mmlu.bench_mmlu(tiny_model("qwen3"), tmp_path, ["odd_sums"], shots=2, limit=3)
    assert [(row.method, row.questions, row.accuracy) for row in rows] == [
        (name, 3, pytest.approx(1 / 3)) for name in ("relay", "copied", "recomputed")
    ]
    assert prompts[0][0].count("Answer: A") == 2
    assert prompts[0][0].endswith('So, "is" it 2?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:')
    with pytest.raises(EvaluationError, match="give the folder of MMLU"):
        mmlu.load_subject(tmp_path, "virology", 5, 1)


def test_traffic_is_answered_with_and_without_drafts():
    with Engine(Recording(tiny_model("llama")), NEW_PROMPTS) as engine:
        drafted = []
        for drafts in (False, True):
            engine.model.steps.clear()
            options = {"methods": ["full"], "new_tokens": 60, "clients": [1], "drafts": drafts}
            bench_traffic(engine, [(CHUNKS, "Why?")], **options)
            drafted.append(max(count for rows in engine.model.steps for count in rows))
    assert drafted[0] == 1 < drafted[1]


def test_drawn_questions_keep_their_number_of_chunks_and_share_a_few():
    asked = [([f"chunk {3 * n + k}" for k in range(3)], f"question {n}") for n in range(9)]
    shared = drawn(asked, 6)
    assert [(len(chunks), question) for chunks, question in shared] == [
        (3, question) for _, question in asked
    ]
    used = [chunk for chunks, _ in shared for chunk in chunks]
    assert set(used) == {f"chunk {n}" for n in range(6)}
    assert all(len(set(chunks)) == 3 for chunks, _ in shared)
    assert shared == drawn(asked, 6)  # the same for all methods, and in every run
    with pytest.raises(ConfigError, match="a question has 3 chunks, and there are 2"):
        drawn(asked, 2)


def test_one_after_another_stays_so_however_many_rows_the_others_have():
    sizes = {"shared_tokens": 20, "private_tokens": 4, "requests": 3}
    with closing(Workload.made(tiny_model("qwen3"), **sizes, max_rows=2)) as work:
        rows = {name: engine.scheduler.config.max_rows for name, engine in work.engines.items()}
    assert rows == {"relay": 2, "copied": 2, "recomputed": 2, "sequential": 1}


def test_chains_ask_about_each_chunk_and_take_the_answer_that_is_surest():
    model, question = tiny_model("qwen2"), "Why?"
    asked: dict[str, float] = {}
    with Engine(model, NEW_PROMPTS) as engine:
        prompts = Prompts(engine, SYSTEM)
        for chunk in CHUNKS:
            chat = prompts.rendered(prompts.messages(question, [chunk]))
            answer = engine.generate(chat, method="full", max_tokens=8, logprobs=0)
            asked[answer.text] = sum(one.logprob for one in answer.logprobs) / 8
        whole = prompts.rendered(prompts.messages(question, CHUNKS))
        stuffed = engine.generate(whole, method="full", max_tokens=8).text
    surest, least = max(asked, key=asked.get), min(asked, key=asked.get)
    assert asked[surest] > asked[least]
    ways = ("full", "mapreduce", "maprerank")

    def row(wanted):
        example = Example("a", question, (wanted,), tuple(CHUNKS))
        return {one.way: one for one in bench_chains(model, [example], ways, 8)}

    assert row(surest)["maprerank"].right == 1
    assert row(least)["maprerank"].right == 0
    rows = row(stuffed)
    assert rows["full"].right == rows["full"].computed == 1
    # Chunks are known, so that of the map step little but questions is computed.
    assert 0 < rows["maprerank"].computed < rows["mapreduce"].computed


def test_made_texts_are_no_table_of_numbers():
    """Else `auto` would compute all of them, and its times would say nothing of prose."""
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        words = " ".join(make_texts(engine, 3000, 3000)).split()
    known = {word: number for number, word in enumerate(sorted(set(words)))}
    ids = torch.tensor([known[word] for word in words])
    fresh = torch.arange(len(ids)) >= len(ids) - 10
    layout = Layout(fresh, torch.zeros_like(fresh), ((0, len(ids) - 10),), 4, ids=ids)
    assert not layout.is_alike
    assert dataclasses.replace(layout, ids=ids % 26).is_alike
