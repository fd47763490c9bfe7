"""`bench answers`: all peers get the same tokens, and what is said of their answers is so."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import pytest
import torch
from conftest import CHUNKS, random_ids, tiny_model
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner
from vllm_double import Server, served, tokens

from cached_rag import ConfigError, Engine
from cached_rag.backends import resolve
from cached_rag.backends.machine import peak_bytes
from cached_rag.backends.prompt_text import Rendered
from cached_rag.errors import ContextOverflowError, ModelError, ModelNotFoundError
from docs.experiments import __main__ as cli
from docs.experiments import memory
from docs.experiments.answers import Own, Transformers, bench_answers, make_questions
from docs.experiments.peers import Means, Question, Sample, open_peers, vllm
from docs.experiments.peers.llama_cpp import LlamaCpp, gguf_file
from docs.experiments.peers.llama_server import LlamaServer
from docs.experiments.peers.vllm import Vllm

pytestmark = pytest.mark.slow

CORPUS = "\n".join(f"{number}. {CHUNKS[number % 3]}" for number in range(120))
NUM_TOKENS = 12


def common(one, other):
    """How many characters two texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next(at for at, (mine, its) in pairs if mine != its)


def question(*ids):
    return Question(Rendered(""), ids)


# Questions -------------------------------------------------------------------------------------


def test_prompts_have_their_length_and_nothing_in_common_but_their_head(engine):
    lengths = (300, 700)
    found = make_questions(engine, CORPUS, lengths, chunk_tokens=100, new_tokens=8, rounds=4)
    head = found[0][0].prompt.text.index(CORPUS[:20])
    for length, questions in zip(lengths, found, strict=True):
        assert len(questions) == 4
        assert all(length - 40 < len(question.ids) <= length for question in questions)
        for pair in combinations([question.prompt.text for question in questions], 2):
            assert 0 < head <= common(*pair) < head + 10


def test_chunks_are_encoded_and_come_again_at_other_places(engine):
    (asked,) = make_questions(engine, CORPUS, (500,), chunk_tokens=100, new_tokens=8, rounds=3)
    reports = [engine.generate(one.prompt, method="auto", max_tokens=1).report for one in asked]
    assert [report.modules_hit for report in reports] == [5, 5, 5]
    assert [report.modules_missed for report in reports] == [0, 0, 0]
    assert [report.prompt_tokens for report in reports] == [len(one.ids) for one in asked]
    assert len(engine.library.table) == 5 + 2  # a new one a round, the others again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": (1020,)}, "do not fit the model's context of 1024"),
        ({"rounds": 0}, "a round at least"),
        ({"prompt_tokens": ()}, "a prompt length"),
        ({"rounds": 400}, "longer texts, fewer rounds"),
        ({"prompt_tokens": (130,), "chunk_tokens": 2}, "longer prompts of fewer chunks"),
    ],
)
def test_prompts_that_cannot_be_made_are_refused(engine, options, message):
    with pytest.raises(ConfigError, match=message):
        make_questions(engine, CORPUS, **{"prompt_tokens": (300,), "chunk_tokens": 100} | options)


# Figures ---------------------------------------------------------------------------------------


@dataclass
class Scripted:
    """A peer whose times and answers are known; its first answer is the one to warm up."""

    totals: tuple[float, ...]
    answers: tuple[tuple[int, ...], ...]
    about: str = "scripted"
    asked: list[Question] = field(default_factory=list)
    settled: int = 0
    is_closed: bool = False

    def answer(self, question, max_tokens):
        assert max_tokens == 4
        number = len(self.asked)
        assert self.settled == number
        self.asked.append(question)
        total = self.totals[number]
        return Sample(total / 4, total, self.answers[number])

    def settle(self):
        self.settled += 1

    def close(self):
        self.is_closed = True


def test_rows_are_medians_and_agreement_ends_at_the_first_other_token():
    same = (7, 8, 9, 1)
    slow = Scripted((9000, 400, 800, 1200), (same,) * 4)
    fast = Scripted((1, 80, 100, 200), ((0, 0, 0, 0), same, (7, 8, 0, 1), (0, 8, 9, 1)))
    asked = [question(*range(length)) for length in (5, 9, 6, 7)]
    rows = bench_answers({"fast": fast, "transformers": slow}, asked, 4)
    assert fast.asked == slow.asked == asked
    assert [row.peer for row in rows] == ["fast", "transformers"]
    first, yardstick = rows
    assert first.prompt_tokens == 9
    assert (first.ttft_ms, first.token_ms, first.total_ms) == (25, 25, 100)
    assert (first.speedup, first.spread) == (8, 1.2)
    assert first.agreement == pytest.approx((1 + 0.5 + 0) / 3)
    assert (yardstick.total_ms, yardstick.speedup, yardstick.agreement) == (800, 1, 1)


def test_without_transformers_the_first_peer_is_the_yardstick():
    peers = {name: Scripted((1, total), ((1,) * 4,) * 2) for name, total in (("a", 6), ("b", 2))}
    rows = bench_answers(peers, [question(1), question(2)], 4)
    assert [row.speedup for row in rows] == [1, 3]
    with pytest.raises(ConfigError, match="nothing to measure"):
        bench_answers(peers, [question(1)], 4)


# This library and transformers -----------------------------------------------------------------


def test_methods_and_transformers_answer_the_same_tokens(model_folder, tmp_path):
    ids = tuple(random_ids(40))
    with torch.inference_mode():
        logits = tiny_model("llama").decoder.model(torch.tensor([ids])).logits[0, -1]
    # It would end with the first token, and not repeat any: peers must do neither.
    folder = shutil.copytree(model_folder, tmp_path / "model")
    ends = {"eos_token_id": int(logits.argmax()), "repetition_penalty": 3.0, "max_length": 20}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    with Engine.load(str(folder), dtype="float32", device="cpu") as engine:
        assert engine.model.eos_ids == {ends["eos_token_id"]}
        (asked,) = make_questions(engine, CORPUS, (300,), chunk_tokens=100, rounds=1)
        plain = Transformers(engine)
        answers = [p.answer(asked[0], NUM_TOKENS) for p in (plain, Own(engine, "full"))]
        ended = plain.answer(question(*ids), NUM_TOKENS)
        assert "sdpa" in plain.about
        plain.close()
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].token_ids) == len(ended.token_ids) == NUM_TOKENS
    assert ended.token_ids[0] == ends["eos_token_id"]
    for sample in answers:
        assert 0 < sample.ttft_ms < sample.total_ms
        assert sample.token_ms == (sample.total_ms - sample.ttft_ms) / (NUM_TOKENS - 1)


def test_transformers_has_modules_of_its_own_and_no_thread(model_folder):
    with Engine.load(model_folder, dtype="float32", device="cpu") as engine:
        kept = engine.model.decoder.model
        peer, threads = Transformers(engine), []
        own = peer._model
        assert own.config._attn_implementation == "sdpa" != kept.config._attn_implementation
        mine = {weights.data_ptr() for weights in own.parameters()}
        assert mine.isdisjoint(weights.data_ptr() for weights in kept.parameters())
        own.register_forward_pre_hook(lambda *_: threads.append(threading.current_thread()))
        peer.answer(question(2, 3), 2)
    assert set(threads) == {threading.main_thread()}  # where an engine computes for this caller


def test_other_tokens_than_the_others_have_are_an_error(engine):
    with pytest.raises(ModelError, match="the others are given 1"):
        Own(engine, "full").answer(Question(Rendered("The lighthouse keeper"), (1,)), 2)


# vLLM ------------------------------------------------------------------------------------------


def test_vllm_is_given_ids_and_its_tokens_count_when_they_come(monkeypatch):
    came = threading.Event()

    class Watch(vllm.Stopwatch):
        def add(self, *token_ids):
            super().add(*token_ids)
            came.set()

    monkeypatch.setattr(vllm, "Stopwatch", Watch)
    # The second event is sent only when the first token was noted.
    events = (tokens(5), tokens(6, 7), {"choices": [], "usage": {}})
    with served(Server(events=events, before={1: came})) as server:
        peer = Vllm(server.url + "/")
        sample = peer.answer(question(3, 1, 4), 3)
    assert sample.token_ids == (5, 6, 7)
    assert peer.about.startswith("vLLM 0.32.0, model 'm' at ")
    (asked,) = server.asked
    wanted = {"model": "m", "prompt": [3, 1, 4], "max_tokens": 3, "temperature": 0}
    assert wanted.items() <= asked.items()
    assert asked["ignore_eos"] is asked["stream"] is True


def test_vllm_may_end_its_answer_where_traffic_lets_it():
    with served(Server(events=(tokens(5), tokens(6)))) as server:
        peer = Vllm(server.url)
        with pytest.raises(ConfigError, match="2 token ids instead of 9"):
            peer.answer(question(1), 9)
        sample = peer.answer(question(1), 9, may_end=True)
    assert sample.token_ids == (5, 6)
    assert len(sample.gaps_ms) == 1
    assert [asked["ignore_eos"] for asked in server.asked] == [True, False]


def test_a_server_that_does_not_do_as_asked_is_an_error():
    with (
        served(Server(status=400)) as server,
        pytest.raises(ConfigError, match=r"answers 400: .*too long"),
    ):
        Vllm(server.url).answer(question(1), 3)
    silent = Server(events=({"choices": [{"index": 0, "text": "x"}]},))
    with served(silent) as server, pytest.raises(ConfigError, match="0 token ids instead of 3"):
        Vllm(server.url).answer(question(1), 3)
    with pytest.raises(ConfigError, match="no vLLM server answers"):
        Vllm(server.url)  # it is closed by now
    for wrong in ("127.0.0.1:8000", "file:///etc/passwd", "", "http://[", "http://a:99999"):
        with pytest.raises(ConfigError, match="no address of a server"):
            Vllm(wrong)


# Who is there ----------------------------------------------------------------------------------


def test_who_is_not_there_is_said_or_an_error_if_asked_for_by_name(model_folder):
    with Engine.load(model_folder, dtype="float32", device="cpu") as engine:
        means = Means(engine, model_folder, context=400)
        peers, missing = open_peers(means)
        assert list(peers) == ["transformers", "full", "auto"]
        assert "--gguf FILE" in missing["llama.cpp"]
        assert "--vllm URL" in missing["vllm"]
        assert model_folder in missing["vllm"]
        assert peers["auto"].about == f"Cached RAG, method auto, {model_folder}, no drafts"
        for name, message in (("vllm", "--vllm URL"), ("llama.cpp", "--gguf"), ("fill", "full")):
            with pytest.raises(ConfigError, match=message):
                open_peers(means, ["full", name])
        named, missing = open_peers(means, ["reuse", "epic:anchor_tokens=4"])
        assert (list(named), missing) == (["reuse", "epic:anchor_tokens=4"], {})


def test_those_opened_before_one_that_is_not_there_are_closed(engine):
    opened = []

    class OnlyOne(Means):
        def make(self, name):
            if name == "second":
                raise ModelError("it is not there")
            opened.append(Scripted((), ()))
            return opened[0]

    with pytest.raises(ModelError, match="not there"):
        open_peers(OnlyOne(engine, "", 10), ["first", "second"])
    assert opened[0].is_closed


def test_a_model_that_is_in_memory_only_has_no_second_copy(engine):
    with pytest.raises(ModelNotFoundError, match="in memory only"):
        open_peers(Means(engine, "llama", 10), ["transformers"])


def test_the_command_prints_a_row_for_each_peer_and_length(model_folder, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(CORPUS)
    options = ["--model", model_folder, "--texts", tmp_path / "texts", "--chunk-tokens", 100]
    options += ["--prompt-tokens", "200,400", "--new-tokens", 6, "--repeats", 1]
    options += ["--dtype", "float32", "--json"]
    result = CliRunner().invoke(cli.app, ["answers", *map(str, options)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["peer"] for row in found["rows"]] == ["transformers", "full", "auto"] * 2
    assert found["rows"][0]["prompt_tokens"] <= 200 < found["rows"][3]["prompt_tokens"] <= 400
    assert [row["agreement"] for row in found["rows"] if row["peer"] != "auto"] == [1.0] * 4
    assert set(found["machine"]["peers"]) == {"transformers", "full", "auto"}
    assert set(found["machine"]["missing"]) == {"llama.cpp", "vllm"}
    assert "without vllm: " in result.stderr
    bad = CliRunner().invoke(cli.app, ["answers", "--texts", str(tmp_path / "none")])
    assert "no folder of texts" in str(bad.exception)


def test_memory_is_measured_in_processes_of_their_own(model_folder, llama_gguf, tmp_path):
    (tmp_path / "a.txt").write_text(CORPUS)
    options = ["--model", llama_gguf, "--backend", "llama.cpp", "--texts", tmp_path]
    options += ["--chunk-tokens", 100, "--prompt-tokens", 200, "--new-tokens", 4, "--repeats", 1]
    options += ["--peers", "llama.cpp,auto", "--json"]
    result = CliRunner().invoke(cli.app, ["memory", *map(str, options)])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["peer"] for row in rows] == ["llama.cpp", "auto"]
    for row in rows:
        assert 0 < row["imports"] <= row["loaded"] <= row["peak"]
        assert row["ratio"] == pytest.approx(row["peak"] / rows[0]["peak"], rel=1e-2)


def test_memory_of_other_programs_is_measured_without_an_engine(model_folder, monkeypatch):
    options = {"dtype": "float32", "device": "cpu"}
    sizes = {"chunk_tokens": 100, "new_tokens": 4, "rounds": 2}
    work = memory.Workload(model_folder, CORPUS, 200, 300, options, **sizes)
    prepared = memory._apart(memory._prepared, work)
    assert len(prepared.questions) == 2
    monkeypatch.setattr(memory.Workload, "engine", lambda _: pytest.fail("it loads an engine"))
    for peer in ("transformers", "langchain-huggingface", "llama-index-llms-huggingface"):
        imports, loaded, peak = memory._measured(work, peer, prepared)
        assert 0 < imports <= loaded <= peak
    for elsewhere in ("vllm", "auto@llama.cpp"):
        with pytest.raises(ConfigError, match="cannot be seen from here"):
            memory.bench_memory(work, ["full", elsewhere])


def test_a_process_does_not_inherit_the_peak_of_who_started_it():
    held = b"x" * (300 << 20)
    code = "from cached_rag.backends.machine import peak_bytes; print(peak_bytes())"
    alone, child = peak_bytes(), subprocess.check_output([sys.executable, "-c", code])
    assert int(child) < alone - len(held) // 2


# llama.cpp -------------------------------------------------------------------------------------


def test_the_gguf_file_is_found_or_joined_from_its_pieces(tmp_path, monkeypatch, model_folder):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    single = tmp_path / "a.gguf"
    single.write_bytes(b"GGUF and more")
    assert gguf_file(str(single)) == single
    pieces = [tmp_path / "1.bin", tmp_path / "2.bin"]
    for piece, data in zip(pieces, (b"GGUF", b" and more"), strict=True):
        piece.write_bytes(data)
    monkeypatch.setattr(resolve, "wheel_file", lambda name, _: tmp_path / f"{name}.bin")
    for name, digest in (("whole", hashlib.sha256(b"GGUF and more").hexdigest()), ("bad", "0")):
        alias = resolve.Alias("hub/id", ("1", "2"), ".bin", digest)
        monkeypatch.setitem(resolve.ALIASES, name, alias)
    joined = gguf_file("whole")
    assert joined.read_bytes() == b"GGUF and more"
    pieces[0].unlink()
    pieces[0].touch()
    assert gguf_file("whole") == joined  # it is joined once
    with pytest.raises(ModelError, match="install the wheels again"):
        gguf_file("bad")
    assert list(joined.parent.parent.iterdir()) == [joined.parent]
    with pytest.raises(ConfigError, match="--gguf FILE"):
        gguf_file(model_folder)


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", Kind.F32)


@pytest.mark.real
def test_llama_cpp_answers_as_transformers_does_whatever_it_kept(llama_gguf):
    where = {"pretrained_model_name_or_path": str(llama_gguf.parent), "gguf_file": llama_gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    head = random_ids(30, seed=9)
    prompts = [tuple(head + random_ids(length, seed=length)) for length in (60, 90, 20)]
    with closing(LlamaCpp(llama_gguf, context=200, threads=1)) as peer:
        assert "tiny.gguf" in peer.about
        for ids in (*prompts, prompts[2], prompts[2][:40], prompts[0]):
            found = peer.answer(question(*ids), NUM_TOKENS)
            assert found.token_ids == greedy(model, ids)
            assert 0 < found.ttft_ms < found.total_ms
        further = (*prompts[0], *found.token_ids, 5, 6)
        assert peer.answer(question(*further), NUM_TOKENS).token_ids == greedy(model, further)


@pytest.mark.real
def test_llama_cpps_server_answers_as_its_library_does(llama_gguf):
    head = random_ids(300, seed=9)
    prompts = [tuple(head + random_ids(length, seed=length)) for length in (30, 20)]
    with (
        closing(LlamaCpp(llama_gguf, context=400, threads=1)) as library,
        closing(LlamaServer(llama_gguf, context=400, threads=1)) as server,
    ):
        assert "cache-reuse 256" in server.about
        for ids in prompts:
            expected, found = (one.answer(question(*ids), NUM_TOKENS) for one in (library, server))
            assert found.token_ids == expected.token_ids
            assert 0 < found.ttft_ms < found.total_ms
        with pytest.raises(ConfigError, match="answers 400"):
            server.answer(question(), 3)


@torch.inference_mode()
def greedy(model, ids):
    """The likeliest tokens after a prompt, each by a pass over all before it."""
    found = list(ids)
    for _ in range(NUM_TOKENS):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return tuple(found[len(ids) :])


@pytest.mark.real
def test_what_llama_cpp_cannot_do_is_an_error_and_it_goes_on(llama_gguf, tmp_path):
    with closing(LlamaCpp(llama_gguf, context=200, threads=1)) as peer:
        before = peer.answer(question(5, 6, 7), 4)
        for ids, error, message in (
            (range(2, 202), ContextOverflowError, "tokens"),
            ((5, 6, 100_000), ModelError, "another model's"),
            ((5, -1, 6), ModelError, "another model's"),
        ):
            with pytest.raises(error, match=message):
                peer.answer(question(*ids), 100)
        assert peer.answer(question(5, 6, 7), 4).token_ids == before.token_ids
    with pytest.raises(ConfigError, match="needs a token"):
        LlamaCpp(llama_gguf, context=-5, threads=1)
    (tmp_path / "bad.gguf").write_bytes(Path(llama_gguf).read_bytes()[:2000])
    with pytest.raises(ModelError, match="cannot load"):
        LlamaCpp(tmp_path / "bad.gguf", context=200, threads=1)
