"""The benchmark of stores with many chunks: what it counts is there, and what it refuses."""

from __future__ import annotations

import json

import pytest
from conftest import tiny_model
from typer.testing import CliRunner

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.errors import StoreError
from docs.experiments.__main__ import app
from docs.experiments.stored import bench_stored, chunk_text


def test_rows_count_what_is_stored(tmp_path):
    told = []
    model = tiny_model("llama")
    rows = bench_stored(model, tmp_path, [8, 20], per_prompt=4, prompts=2, progress=told.append)
    assert [row.chunks for row in rows] == [8, 20]
    assert told == [8, 12]
    assert rows[1].disk_gb > rows[0].disk_gb > 0
    for row in rows:
        assert row.chunk_kb * row.chunks == pytest.approx(row.disk_gb * 1e6)
        assert min(row.tokens_per_s, row.open_ms, row.match_ms, row.ttft_ms, row.full_ms) > 0
    with Engine(model, StoreConfig(path=str(tmp_path))) as engine:
        texts = [chunk_text(number) for number in range(20)]
        assert engine.encode(texts, context=None).present == 20


def test_a_store_that_lost_chunks_is_no_measurement(tmp_path, monkeypatch):
    from docs.experiments import stored

    real = stored._encode

    def encode_and_forget(engine, numbers, progress):
        rate = real(engine, numbers, progress)
        engine.forget([chunk_text(number) for number in numbers])
        return rate

    monkeypatch.setattr(stored, "_encode", encode_and_forget)
    with pytest.raises(StoreError, match="of 4 chunks were found"):
        bench_stored(tiny_model("llama"), tmp_path, [8], per_prompt=4, prompts=1)


@pytest.mark.parametrize("counts", [[], [8, 8], [20, 8], [2, 8]])
def test_counts_must_grow(counts, tmp_path):
    with pytest.raises(ConfigError, match="must grow"):
        bench_stored(tiny_model("llama"), tmp_path, counts, per_prompt=4)


def test_the_command_prints_a_row_a_count(model_folder):
    args = ["stored", "--model", model_folder, "--chunks", "4,6", "-k", "2"]
    done = CliRunner().invoke(app, [*args, "--prompts", "1", "--dtype", "float32", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["chunks"] for row in found["rows"]] == [4, 6]
    assert found["machine"]["commit"]
