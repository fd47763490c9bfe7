"""The tables of docs/models.md: by architecture, and by model."""

from __future__ import annotations

import json

import pytest
import transformers
from conftest import tiny_model
from packaging.version import Version

from cached_rag.cli.terminal import plain
from cached_rag.errors import ModelError
from docs.experiments.__main__ import app
from docs.experiments.architectures import bench_architectures
from docs.experiments.commands.models import markdown
from docs.experiments.models import bench_models

REFUSED = {"Qwen 3 Next", "LFM 2", "Mamba"}
UNMOVABLE = {"GPT-2", "OPT", "DeepSeek 3"}
UNWATCHED = {"Falcon", "Falcon with ALiBi", "MPT", "BLOOM", "StableLM", "gpt-oss"}
if Version(transformers.__version__) < Version("5.24"):
    UNWATCHED |= {"GPT-J"}


def test_every_architecture_has_what_the_docs_say():
    rows = {row.family: row for row in bench_architectures()}
    assert {family for family, row in rows.items() if row.refused} == REFUSED
    assert {f for f, row in rows.items() if row.methods == "full, prefix"} == UNMOVABLE
    assert {f for f, row in rows.items() if row.methods.startswith("without auto")} == UNWATCHED
    others = rows.keys() - REFUSED - UNMOVABLE - UNWATCHED
    assert len(others) > 20
    assert all(rows[family].methods.startswith("all") for family in others)
    assert "position-free in 1 layers" in rows["SmolLM 3"].position_rule


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
    app(["architectures", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["family"] == "Llama 2, 3"
    assert found["machine"]["torch"]
