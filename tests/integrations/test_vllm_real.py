"""The connector inside a real vLLM, with a real model, and the prefill node before it.

Opt-in, as vLLM has an environment of its own and takes minutes to start: `CACHED_RAG_VLLM_PYTHON`
is the path of its Python (docs/vllm.md says what has to be installed there).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from langchain_openai import ChatOpenAI
from vllm_cached_rag.node import Handed, PrefillNode
from vllm_cached_rag.router import create_app

from cached_rag import PRIMER, Engine, StoreConfig, load_model
from cached_rag.server.run import bind

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("CACHED_RAG_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON, reason="CACHED_RAG_VLLM_PYTHON names no Python with vLLM"),
]
BLOCK = 32
WORDS = ["valve", "pump", "wheel", "oil", "lamp", "copper", "water", "left", "right", "slowly"]
START_SECONDS = 900


def section(number):
    draw = random.Random(number)
    said = (" ".join(draw.choices(WORDS, k=12)).capitalize() for _ in range(12))
    return f"Section {number}. {'. '.join(said)}."


CHUNKS = [section(number) for number in range(5)]


def body(order, question="Which section speaks of copper first?", tokens=12):
    said = "\n\n".join(CHUNKS[number] for number in order)
    messages = [
        {"role": "system", "content": "Answer from the sections."},
        {"role": "user", "content": f"{said}\n\n{question}"},
    ]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small model in a form that vLLM reads."""
    folder = str(tmp_path_factory.mktemp("model"))
    model = load_model("smollm2-135m", dtype="bfloat16", device="cpu", weights="bf16")
    model.decoder.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    store = StoreConfig(path=str(tmp_path_factory.mktemp("kv")), sequence_bytes=0)
    with Engine.load(folder, store=store, dtype="bfloat16", device="cpu") as engine:
        engine.encode(CHUNKS, engine.head(body(range(5))["messages"], CHUNKS[0]), context=PRIMER)
        yield engine


@pytest.fixture(scope="module")
def node(engine, tmp_path_factory):
    return PrefillNode(engine, str(tmp_path_factory.mktemp("prompts")))


class Vllm:
    """A vLLM server; `asked` counts the tokens that it took from us, and from its own cache."""

    def __init__(self, address):
        self.address = address

    def complete(self, request):
        """Status of the response, and for each token of the answer the log probabilities."""
        wanted = request | {"logprobs": True, "top_logprobs": 5}
        answer = httpx.post(f"{self.address}/v1/chat/completions", json=wanted, timeout=600)
        assert answer.status_code == 200, answer.text
        shown = answer.json()["choices"][0]["logprobs"]["content"]
        return [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in shown]

    def counts(self):
        found = httpx.get(f"{self.address}/metrics").text
        names = ("external_prefix_cache_hits_total", "prefix_cache_hits_total")
        return [
            int(float(re.search(rf"^vllm:{name}{{.*}} (\S+)$", found, re.MULTILINE)[1]))
            for name in names
        ]

    def asked(self, request):
        """(log probabilities, tokens from us, tokens from its own cache)."""
        before = self.counts()
        said = self.complete(request)
        ours, own = (after - was for after, was in zip(self.counts(), before, strict=True))
        return said, ours, own


@pytest.fixture(scope="module")
def vllm(folder, node, tmp_path_factory):
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    bound.close()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", "4096"]
    command += ["--port", str(port), "--host", "127.0.0.1", "--block-size", str(BLOCK)]
    command += ["--kv-transfer-config", json.dumps(node.settings.transfer_config())]
    env = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("OMP_NUM_THREADS", None)
    omp = Path(PYTHON).parents[1] / "lib" / "libiomp5.so"
    if omp.is_file():
        env["LD_PRELOAD"] = str(omp)
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=env, stdout=file, stderr=file, start_new_session=True
        )
    server = Vllm(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(server.address):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def answers(address):
    try:
        return httpx.get(f"{address}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def handed_over(node, request):
    handed = node.prefill(request)
    assert isinstance(handed, Handed)
    return handed, request | handed.ticket.fields(handed.token_ids)


def distance(first, second):
    """The largest difference of log probabilities that both show for an answer's first token."""
    return max(abs(first[0][token] - second[0][token]) for token in first[0].keys() & second[0])


def test_vllm_takes_all_but_the_last_block_and_answers_as_the_engine(vllm, engine, node):
    request = body([3, 0, 4, 1, 2])
    handed, ticketed = handed_over(node, request)
    said, ours, _ = vllm.asked(ticketed)
    assert ours == (len(handed.token_ids) - 1) // BLOCK * BLOCK
    assert handed.report.cached_tokens > len(handed.token_ids) / 2
    own = engine.generate(request["messages"], max_tokens=1, logprobs=5).logprobs[0]
    tokenizer = engine.model.tokenizer
    expected = [{tokenizer.decode([token]): logprob for token, logprob in own.top}]
    assert max(said[0], key=said[0].get) == max(expected[0], key=expected[0].get)
    assert distance(said, expected) < 0.25  # bf16: logits of about 16 have steps of 1/8


def test_full_prefill_handed_over_answers_as_vllm_itself(vllm, engine, node):
    full = PrefillNode(engine, node.settings.handoff, "full")
    request = body([1, 3, 2, 0, 4])
    _, ticketed = handed_over(full, request)
    said, ours, _ = vllm.asked(ticketed)
    assert ours
    assert distance(said, vllm.complete(request)) < 0.25


def test_approximate_kv_serves_nobody_else(vllm, node):
    request = body([2, 4, 0, 3, 1])
    before, _, _ = vllm.asked(request)
    again, _, own = vllm.asked(request)
    _, ticketed = handed_over(node, request)
    _, ours, mixed = vllm.asked(ticketed)
    assert (mixed, ours) == (0, own)  # nothing of vLLM's under our salt
    after, none, hits = vllm.asked(request)
    assert (none, hits) == (0, own)  # as if nothing had been
    assert after == again
    assert distance(after, before) < 0.25
    other = body([4, 2, 0, 3, 1])
    _, ticketed = handed_over(node, other)
    vllm.complete(ticketed)
    assert vllm.asked(other)[2] < BLOCK * 2  # only the head, which the exact prompts had, too


def test_a_ticket_without_its_salt_is_refused(vllm, node):
    request = body([0, 4, 3, 2, 1])
    _, ticketed = handed_over(node, request)
    del ticketed["cache_salt"]
    said, ours, _ = vllm.asked(ticketed)
    assert ours == 0
    assert distance(said, vllm.complete(request)) < 0.25


def test_vllm_computes_what_is_damaged(vllm, node):
    request = body([3, 4, 0, 1, 2])
    _, ticketed = handed_over(node, request)
    for path in Path(node.settings.handoff, "blobs").rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    said, _, _ = vllm.asked(ticketed)
    assert distance(said, vllm.complete(request)) < 0.25


def test_langchain_reaches_vllm_by_the_node(vllm, node):
    app = create_app(node, vllm.address)
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    work = server.serve(sockets=[bound])
    thread = threading.Thread(target=lambda: asyncio.run(work), daemon=True)
    thread.start()
    request = body([2, 0, 1, 4, 3])
    address = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    llm = ChatOpenAI(model="m", base_url=address, api_key="none", temperature=0, max_tokens=12)
    before = vllm.counts()[0]
    said = "".join(piece.text for piece in llm.stream(request["messages"]))
    assert said.strip()
    assert vllm.counts()[0] - before > 500
    assert llm.invoke(request["messages"]).text == said
    server.should_exit = True
    thread.join(30)


def test_vllm_goes_on_without_the_folder(vllm, node):
    request = body([4, 3, 1, 0, 2])
    _, ticketed = handed_over(node, request)
    shutil.rmtree(node.settings.handoff)
    said, ours, _ = vllm.asked(ticketed)
    assert ours == 0
    assert distance(said, vllm.complete(request)) < 0.25
