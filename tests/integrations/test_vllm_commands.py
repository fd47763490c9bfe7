"""`python -m vllm_cached_rag`: what vLLM is told, and the benchmark against a server's double."""

from __future__ import annotations

import json

import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from typer.testing import CliRunner
from vllm_cached_rag.__main__ import app
from vllm_cached_rag.agreed import Settings, ticket_of
from vllm_double import Server, served, tokens

from cached_rag import CachedRAGError, ConfigError, Engine, load_model
from cached_rag.kv.holdings import FOLDER
from docs.experiments.vllm import bench

pytestmark = pytest.mark.slow


def test_describe_prints_what_the_connector_takes(model_folder, tmp_path):
    options = ["--model", model_folder, "--store", str(tmp_path), "--dtype", "float32"]
    done = CliRunner().invoke(app, ["describe", *options], catch_exceptions=False)
    config = json.loads(done.stdout.splitlines()[-1])
    settings = Settings.of(config["kv_connector_extra_config"])
    assert settings.fingerprint == load_model(model_folder, dtype="float32").fingerprint
    assert (settings.handoff, settings.dtype) == (str(tmp_path / "handoff"), "float32")
    assert settings.num_layers == 4


@pytest.mark.parametrize("folder", ["", FOLDER])
def test_prompts_are_not_handed_over_where_the_store_has_its_own_kv(tmp_path, folder):
    options = ["--model", "m", "--store", str(tmp_path), "--handoff", str(tmp_path / folder)]
    with pytest.raises(ConfigError, match="--handoff another folder"):
        CliRunner().invoke(app, ["describe", *options], catch_exceptions=False)


def test_a_model_that_is_not_there_is_an_error_of_ours(tmp_path):
    options = ["--model", str(tmp_path / "none"), "--store", str(tmp_path)]
    with pytest.raises(CachedRAGError):
        CliRunner().invoke(app, ["describe", *options], catch_exceptions=False)


def test_the_benchmark_asks_vllm_with_and_without_tickets(tmp_path, monkeypatch):
    monkeypatch.setattr("docs.experiments.peers.vllm.PAUSE_S", 0.0)
    corpus = " ".join(f"{number} {chunk}" for number in range(8) for chunk in CHUNKS)
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    sizes = {"chunk_tokens": 90, "new_tokens": 2, "rounds": 2, "pause": 0.0}
    with served(Server(events=(tokens(5), tokens(6)))) as server:
        rows = bench(engine, str(tmp_path), server.url, corpus, [300], ("reuse",), **sizes)
    assert [row["peer"] for row in rows] == ["vllm", "reuse"]
    assert rows[0]["prefill_ms"] is None
    assert rows[1]["prefill_ms"] + rows[1]["handoff_ms"] <= rows[1]["ttft_ms"] + 1
    tickets = [ticket_of(r.get("kv_transfer_params"), r.get("cache_salt")) for r in server.asked]
    assert sum(ticket is not None for ticket in tickets) == len(tickets) / 2 == 3
    assert not list(tmp_path.rglob("*.safetensors"))  # the KV of all went again
