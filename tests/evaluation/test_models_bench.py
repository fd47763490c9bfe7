"""The tables of docs/models.md: by architecture, and by model."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_model

from cached_rag.backends.transformers import prefill
from cached_rag.cli.terminal import plain
from cached_rag.errors import ModelError
from docs.experiments import architectures
from docs.experiments.__main__ import app
from docs.experiments.architectures import bench_architectures
from docs.experiments.commands.models import markdown
from docs.experiments.models import bench_models

pytestmark = pytest.mark.slow

# Of each outcome some that people run.
SERVED = {
    "all": "gemma3n_text gemma4_text gpt_oss lfm2 llama llama4_text mistral qwen3 smollm3",
    "all; no batches": "deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3",
    "exact beginnings": "bamba falcon_h1 granitemoehybrid nemotron_h qwen3_5_text qwen3_next",
    "full, prefix": "gpt2 opt",
    "without auto": "bloom falcon mpt stablelm",
    "refused: no attention": "mamba rwkv",
}


def test_every_architecture_has_what_the_docs_say():
    """And none fails with anything but a ModelError, or computes something else."""
    rows = {row.methods: row.families.split(", ") for row in bench_architectures()}
    assert not [methods for methods in rows if methods.startswith(("fails", "wrong"))]
    for methods, families in SERVED.items():
        found = [one for known, held in rows.items() if known.startswith(methods) for one in held]
        assert set(families.split()) <= set(found)
    assert len(rows["all"]) > 70


def test_in_bf16_models_compute_nearly_the_same():
    """They are examined in fp32, so a dtype that does not fit shows here alone."""
    only = tuple(f"{SERVED['all']} {SERVED['exact beginnings']} beam olmo2 olmo3".split())
    rows = bench_architectures(only, dtype=torch.bfloat16)
    assert {row.methods.partition(",")[0] for row in rows} == {"all", "exact beginnings"}


def test_what_is_computed_otherwise_is_told(monkeypatch):
    monkeypatch.setattr(prefill, "_BY_ROW", {"hidden_states": -2})
    (row,) = bench_architectures(("beam",))
    assert row.methods.startswith(("fails: ", "wrong: "))


def test_what_rounding_explains_is_no_fault(monkeypatch):
    """Gemma 4 with 35 random layers moves by 2e-3 when its weights are rounded otherwise."""
    monkeypatch.setattr(architectures, "_MOST_APART", {torch.float32: 1e-9})
    assert bench_architectures(("gemma4_text",))[0].methods == "all"
    monkeypatch.setattr(architectures, "_rounding", lambda *_: 1e-8)
    assert bench_architectures(("gemma4_text",))[0].methods.startswith("wrong: ")


def test_models_are_measured_each_in_a_process_of_its_own(model_folder):
    (row,) = bench_models([model_folder], dtype="float32", repeats=1)
    assert row.methods == "all"
    assert row.weights_bytes == 4 * tiny_model("llama").decoder.model.num_parameters()
    assert row.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert min(row.load_s, row.examine_s, row.full_ms, row.auto_ms, row.decode_ms) > 0
    assert row.prompt_tokens > 0
    table = markdown([plain(row)])
    assert len(table) == 3
    assert table[2].startswith(f"| {model_folder} |")
    assert f"| {row.weights_bytes / 1e6:.0f} MB |" in table[2]
    with pytest.raises(ModelError, match="no model folder"):
        bench_models(["./nowhere"])


def test_the_command_prints_them(capsys):
    app(["architectures", "llama", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [{"methods": "all", "families": "llama"}]
    assert found["machine"]["torch"]
