"""The command line as a user has it, on the tiny model saved to a folder."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from unittest.mock import Mock

import pytest
from conftest import CHUNKS
from fastapi.testclient import TestClient
from fresh import run_fresh
from indexes import WordEmbedding
from typer.testing import CliRunner

from cached_rag import CachedRAG, ConfigError, Engine, __version__
from cached_rag.cli import main as cli
from cached_rag.cli.ask import _asked
from cached_rag.cli.bench import Comparing
from cached_rag.cli.terminal import plain, print_json, sooner
from cached_rag.errors import ContextOverflowError, DocumentError, EvaluationError, StoreError
from cached_rag.evaluation.machine import machine
from cached_rag.rag.chunks import Embedder
from cached_rag.rag.folder import SYSTEM
from docs.experiments import __main__ as experiments

pytestmark = pytest.mark.slow

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def words(monkeypatch, tmp_path):
    monkeypatch.setattr(Embedder, "embed", WordEmbedding.embed)
    monkeypatch.setattr(Embedder, "load", lambda _: None)
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def index(tmp_path, model_folder):
    for name, chunk in zip("abc", CHUNKS, strict=True):
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "docs" / f"{name}.txt").write_text(chunk)
    path = tmp_path / "index"
    options = ["--index", str(path), "--model", model_folder, "--dtype", "float32", "--json"]
    result = run(cli.app, ["ingest", str(tmp_path / "docs"), *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["encoded"] == 3
    return path


def test_ask_prints_one_object_with_text_sources_and_report(index):
    arguments = ["ask", "copper green?", "--index", str(index), "-k", "2", "--max-tokens", "5"]
    result = run(cli.app, [*arguments, "--dtype", "float32", "--json", "--compare"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert set(answer) == {"text", "sources", "report", "full"}
    assert answer["report"]["modules_hit"] == 2
    assert answer["full"]["report"]["method"] == "full"
    shown = run(cli.app, [*arguments, "--dtype", "float32", "--compare"])
    assert "than full prefill" in shown.stdout
    nothing = run(cli.app, [*arguments, "--min-score", "1", "--compare"])
    assert nothing.exit_code == 0, nothing.exception
    assert "Full prefill's answer: Nothing about this was found" in nothing.stdout


def test_ask_drafts_unless_it_is_told_not_to(index):
    arguments = ["ask", "copper green?", "--index", str(index), "--max-tokens", "60", "--json"]
    plain, found = (
        json.loads(run(cli.app, [*arguments, "--dtype", "float32", *more]).stdout)
        for more in (["--no-drafts"], [])
    )
    assert found["text"] == plain["text"]
    assert found["report"]["drafted_tokens"] > plain["report"]["drafted_tokens"] == 0


@pytest.mark.parametrize(
    ("ratio", "said"), [(2.5, "2.5x sooner"), (1.0, "1.0x sooner"), (0.5, "2.0x later")]
)
def test_sooner_says_later_below_one(ratio, said):
    assert sooner(ratio) == said


def test_store_commands_count_verify_and_prune(index):
    where = ["--index", str(index), "--json"]
    stats = json.loads(run(cli.app, ["store", "stats", *where]).stdout)
    assert stats["texts"] == 7  # three chunks twice, and their prefix
    shown = run(cli.app, ["store", "stats", "--index", str(index)]).stdout
    assert "7 encodings of 3 chunks and the prompt's head, " in shown
    assert run(cli.app, ["store", "verify", *where]).exit_code == 0
    victim = next((index / "kv" / "blobs").glob("*/*"))
    victim.write_bytes(victim.read_bytes()[:-1])
    found = run(cli.app, ["store", "verify", *where])
    assert found.exit_code == 1
    assert len(json.loads(found.stdout)["problems"]) == 1
    pruned = json.loads(run(cli.app, ["store", "prune", *where, "--max-bytes", "0"]).stdout)
    assert pruned["files"] == 7


def test_store_stats_names_a_folder_as_it_is_called(index, tmp_path):
    odd = index.rename(tmp_path / ("x" * 200 + "[bold]"))
    shown = run(cli.app, ["store", "stats", "--index", str(odd)])
    assert shown.exit_code == 0, shown.exception
    assert str(odd) in shown.stdout


def test_prune_keeps_no_less_than_nothing(index):
    refused = run(cli.app, ["store", "prune", "--index", str(index), "--max-bytes", "-5"])
    assert refused.exit_code == 2
    stats = run(cli.app, ["store", "stats", "--index", str(index), "--json"])
    assert json.loads(stats.stdout)["texts"] == 7


def test_demo_names_its_folder_as_it_is_called(tmp_path, monkeypatch, model_folder):
    monkeypatch.setattr("cached_rag.cli.bench.DOCUMENTS", ())
    monkeypatch.setattr("cached_rag.cli.bench._compared", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(CachedRAG, "ask", lambda *_, **__: None)
    odd = tmp_path / ("x" * 200 + "[bold]")
    shown = run(cli.app, ["demo", "--index", str(odd), "--model", model_folder])
    assert shown.exit_code == 0, shown.exception
    assert f"The index is in {odd};" in shown.stdout


def test_demo_refuses_a_file_where_its_folder_would_be(tmp_path, model_folder):
    (tmp_path / "file").write_text("")
    refused = run(cli.app, ["demo", "--index", str(tmp_path / "file"), "--model", model_folder])
    assert isinstance(refused.exception, ConfigError)
    assert "is a file, and an index is a folder" in str(refused.exception)


def test_who_interrupts_an_ingestion_is_told_how_it_goes_on(index, tmp_path, monkeypatch):
    (tmp_path / "docs" / "new.txt").write_text(CHUNKS[0][::-1])
    monkeypatch.setattr(CachedRAG, "ingest", Mock(side_effect=KeyboardInterrupt))
    stopped = run(cli.app, ["ingest", str(tmp_path / "docs"), "--index", str(index)])
    assert stopped.exit_code == 130
    assert "the same command goes on from there" in " ".join(stopped.stderr.split())


def test_ingest_says_what_it_made_and_what_it_did_not_find(index, tmp_path, monkeypatch):
    options = ["--index", str(index), "--dtype", "float32"]
    shown = " ".join(run(cli.app, ["ingest", str(tmp_path / "docs"), *options]).stdout.split())
    assert "3 unchanged" in shown
    assert re.search(r"the index has \d+ MiB of KV of \S", shown)
    (tmp_path / "empty").mkdir()
    nothing = run(cli.app, ["ingest", str(tmp_path / "empty"), *options])
    assert "there is no file of a known kind" in nothing.stderr
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    missing = run(cli.app, ["ingest", str(tmp_path / "nowhere"), *options])
    assert isinstance(missing.exception, DocumentError)


def test_explain_says_before_it_answers_that_it_cannot_write(index, tmp_path, monkeypatch):
    monkeypatch.setattr(CachedRAG, "ask", lambda *_, **__: pytest.fail("it was asked"))
    for page in (tmp_path / "nowhere" / "a.html", tmp_path):
        result = run(cli.app, ["explain", "q", "--index", str(index), "--html", str(page)])
        assert isinstance(result.exception, ConfigError)
        assert str(page) in str(result.exception)


@pytest.mark.parametrize("command", ["stats", "verify", "prune"])
def test_store_refuses_a_key_that_no_store_can_have(command, index, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_SIGNING_KEY", "k" * 65)
    (index / "kv" / "prompts").mkdir(parents=True, exist_ok=True)
    result = run(cli.app, ["store", command, "--index", str(index)])
    assert isinstance(result.exception, ConfigError), result.exception


def test_commands_that_open_a_store_sign_it(tmp_path, monkeypatch):
    class OpenedError(Exception):
        """With this key."""

    def opened(*_, **how):
        raise OpenedError(how.get("signing_key") or how["store"].signing_key)

    monkeypatch.setenv("CACHED_RAG_SIGNING_KEY", "k" * 32)
    monkeypatch.setattr(CachedRAG, "open", opened)
    monkeypatch.setattr(Engine, "load", opened)
    (tmp_path / "a.xml").write_text('<schema name="a"><module name="m">Copper.</module></schema>')
    (tmp_path / "documents.sqlite").touch()
    schema, here = str(tmp_path / "a.xml"), ["--index", str(tmp_path)]
    asking = [[name, "q", *here] for name in ("ask", "explain", "search", "delete")]
    for command in (
        *asking,
        ["hold", "q", "--pinned", *here],
        ["demo", *here],
        ["chat", *here],
        ["serve", *here, "--port", "0"],
        ["serve", "--store", str(tmp_path), "--port", "0"],
        ["ingest", schema, *here],
        ["schema", "encode", schema, "--store", str(tmp_path)],
        ["schema", "run", schema, '<prompt schema="a"><m/>Hi</prompt>'],
    ):
        result = run(cli.app, command)
        assert repr(result.exception) == repr(OpenedError("k" * 32)), command


def test_a_page_that_cannot_be_written_is_said(index):
    command = ["explain", "copper", "--index", str(index), "--dtype", "float32"]
    result = run(cli.app, [*command, "--max-tokens", "2", "--html", "/dev/full"])
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written to /dev/full: No space left" in str(result.exception)


def test_schema_encode_fails_where_nothing_can_be_kept(tmp_path, model_folder):
    (tmp_path / "a.xml").write_text(
        '<schema name="a"><module name="m">Copper turns green in the air.</module></schema>'
    )
    (tmp_path / "file").write_text("")  # where the folder would be
    command = ["schema", "encode", str(tmp_path / "a.xml"), "--model", model_folder]
    command += ["--dtype", "float32", "--json", "--store"]
    lost = run(cli.app, [*command, str(tmp_path / "file")])
    assert isinstance(lost.exception, StoreError)
    kept = run(cli.app, [*command, str(tmp_path / "kv")])
    assert kept.exit_code == 0, kept.output
    assert json.loads(kept.stdout)["encoded"] > 0


def test_verify_looks_into_all_three_databases(index):
    where = ["--index", str(index), "--json"]

    def problems():
        found = run(cli.app, ["store", "verify", *where])
        assert found.exit_code == 1, found.output
        return [problem["key"] for problem in json.loads(found.stdout)["problems"]]

    for path, change in (
        (index / "documents.sqlite", "UPDATE chunks SET text = 'other' WHERE id = 1"),
        (index / "kv" / "catalog.sqlite", "UPDATE modules SET token_ids = x'00' WHERE id = 1"),
    ):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(change)
            connection.commit()
    assert problems() == ["documents.sqlite chunks", "catalog.sqlite modules"]
    for path in (index / "kv" / "index.sqlite", index / "kv" / "catalog.sqlite"):
        path.write_bytes(b"no database" * 1000)
    assert problems() == ["documents.sqlite chunks", "catalog.sqlite", "index.sqlite"]


def test_ingest_of_an_empty_path_is_not_of_this_folder(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "docs")
    for more in ([], ["--watch"]):
        arguments = ["ingest", "", "--index", str(index), "--dtype", "float32", *more]
        result = run(cli.app, arguments)
        assert isinstance(result.exception, DocumentError)
        assert "the path is empty" in str(result.exception)


def test_ingest_says_in_one_line_what_it_passed_over(index, tmp_path):
    for name in ("a.bin", "b.bin", "c.png", "Makefile", ".hidden.bin"):
        (tmp_path / "docs" / name).write_text("text")
    command = ["ingest", str(tmp_path / "docs"), "--index", str(index), "--dtype", "float32"]
    shown = " ".join(run(cli.app, command).stderr.split())
    assert "4 files passed over: 2 .bin, " in shown
    assert "1 .png" in shown
    assert "1 without suffix" in shown
    assert "known kinds: .c, .cbl, .cc," in shown
    found = json.loads(run(cli.app, [*command, "--json"]).stdout)
    assert found["passed_over"][0] == [".bin", 2]
    assert found["skipped"] == []


def test_prune_drops_kv_of_other_dtypes_and_says_what(index, tmp_path, model_folder):
    where = ["--index", str(index), "--json"]
    again = run(cli.app, ["ingest", str(tmp_path / "docs"), "--dtype", "bfloat16", *where])
    assert json.loads(again.stdout)["encoded"] == 3

    def prune(*options):
        return run(cli.app, ["store", "prune", *options, *where])

    unused = ["--unused", "--dtype", "float32"]
    trial = json.loads(prune(*unused, "--dry-run").stdout)
    assert [(one["model"], one["dtype"], one["files"]) for one in trial["unused"]] == [
        (model_folder, "bfloat16", 7)
    ]
    assert json.loads(prune(*unused, "--dtype", "bfloat16").stdout)["files"] == 0
    assert json.loads(prune(*unused).stdout) == trial | {"is_dry_run": False}
    assert json.loads(prune(*unused).stdout)["files"] == 0
    assert json.loads(run(cli.app, ["store", "stats", *where]).stdout)["texts"] == 7
    shown = run(cli.app, ["store", "prune", *unused, "--index", str(index)]).stdout
    assert "0 files removed" in shown
    for bad in (["--dry-run"], ["--dtype", "float32"], ["--unused", "--dtype", "float16"]):
        assert isinstance(prune(*bad).exception, ConfigError)


def test_a_dtype_for_all_commands_is_what_prune_keeps(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cached-rag.toml").write_text(f'index = "{index}"\ndtype = "float32"')
    for options in ([], ["--unused"]):
        pruned = run(cli.app, ["store", "prune", *options, "--json"])
        assert pruned.exit_code == 0, pruned.output
        assert json.loads(pruned.stdout)["files"] == 0


def test_ask_prints_what_the_user_should_know(index):
    arguments = ["ask", "copper green?", "--index", str(index), "--dtype", "bfloat16"]
    shown = " ".join(run(cli.app, [*arguments, "--max-tokens", "2"]).stderr.split())
    assert "in float32; this engine is" in shown
    assert "`cached-rag ingest`" in shown


def test_documents_are_listed_and_deleted(index, tmp_path):
    where = ["--index", str(index)]
    listed = json.loads(run(cli.app, ["list", *where, "--json"]).stdout)["documents"]
    assert [one["source"] for one in listed] == ["docs/a.txt", "docs/b.txt", "docs/c.txt"]
    assert listed[1] == {
        "source": "docs/b.txt",
        "title": CHUNKS[1],
        "chunks": 1,
        "is_encoded": True,
    }
    assert "docs/c.txt" in run(cli.app, ["list", *where]).stdout
    refused = run(cli.app, ["delete", "docs/a.txt", "docs/d.txt", *where])
    assert isinstance(refused.exception, DocumentError)
    gone = run(
        cli.app, ["delete", "docs/a.txt", str(tmp_path / "docs" / "b.txt"), *where, "--json"]
    )
    assert gone.exit_code == 0, gone.output
    deleted = json.loads(gone.stdout)["deleted"]
    assert deleted == [
        {"source": "docs/a.txt", "chunks": 1, "kvs": 2},
        {"source": "docs/b.txt", "chunks": 1, "kvs": 2},
    ]
    left = json.loads(run(cli.app, ["list", *where, "--json"]).stdout)["documents"]
    assert [one["source"] for one in left] == ["docs/c.txt"]


# Where fp32 is the fastest, few bits are read in bf16 all the same.
@pytest.mark.parametrize("options", [("--dtype", "float32"), ("--weights", "int4")])
def test_doctor_reports_the_rule_and_passes_its_self_test(model_folder, options):
    result = run(cli.app, ["doctor", "--model", model_folder, *options, "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert "half rotary" in facts["position_rule"]
    assert facts["texts"] == 0
    assert facts["prefill_tokens_per_s_512"] >= facts["prefill_tokens_per_s_1024"] > 0
    assert all(test["passed"] for test in facts["self_test"])


def test_bench_prints_rows_and_the_machine(model_folder):
    sizes = ["--chunks", "3", "--chunk-tokens", "64", "--question-tokens", "8", "--repeats", "2"]
    sizes += ["--methods", "reuse,cacheblend", "--new-tokens", "3"]
    result = run(
        cli.app, ["bench", "--model", model_folder, *sizes, "--dtype", "float32", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["method"] for row in found["rows"]] == [
        "transformers",
        "full",
        "reuse",
        "cacheblend",
    ]
    full, reuse, blend = (row["charged_recompute"] for row in found["rows"][1:])
    assert reuse < 0.3 < blend < full == 1  # of four layers the first two are computed in full
    plain, *answered = found["rows"]
    assert plain["total_ms"] is None
    assert all(row["total_ms"] > row["ttft_ms"] for row in answered)
    assert found["rows"][0]["prompt_tokens"] == pytest.approx(3 * 64 + 8, rel=0.15)
    assert found["ingest"]["tokens_per_s"] > 0
    assert found["machine"]["cores"]


def bench(*arguments, app=experiments.app):
    result = run(app, [*map(str, arguments), "--dtype", "float32", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["rows"]


def test_files_for_results_are_looked_at_before_anything_is_measured(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "rows.csv"):
        done = run(cli.app, ["eval", "--data", "no.jsonl", "--model", "none", "--plot", path])
        assert "name a file in a folder that is there" in str(done.exception)


def test_bench_serving_prints_a_row_for_each_way(model_folder):
    sizes = ["--shared-tokens", 600, "--private-tokens", 20, "--new-tokens", 4, "--repeats", 1]
    rows = bench("serving", "--model", model_folder, *sizes, "--requests", "3,5")
    ways = ["relay", "copied", "recomputed", "sequential"]
    assert [row["method"] for row in rows] == ways * 2
    assert [row["requests"] for row in rows] == [3] * 4 + [5] * 4
    assert {row["shared_tokens"] for row in rows} == {600}
    relay, copied, recomputed, sequential = rows[4:]
    assert relay["kv_bytes"] < copied["kv_bytes"] / 2
    assert copied["kv_bytes"] > 4 * sequential["kv_bytes"]
    # Each of five prompts computes its beginning, 600 tokens and more, or none does.
    assert recomputed["computed_tokens"] - copied["computed_tokens"] >= 5 * 600
    assert copied["computed_tokens"] == sequential["computed_tokens"] < 5 * 60
    assert relay["computed_tokens"] <= copied["computed_tokens"]
    arriving = bench(
        "serving", "--model", model_folder, *sizes, "--rates", "50", "--methods", "relay"
    )
    assert arriving[0]["requests_per_s"] > 0
    for wrong in (["--methods", "magic"], ["--methods", "magic", "--rates", "1"]):
        bad = run(experiments.app, ["serving", "--model", model_folder, *wrong])
        assert isinstance(bad.exception, ConfigError)


def test_bench_attention_prints_the_theory(model_folder, tmp_path):
    sizes = ["--batches", "1,8", "--shared-tokens", "64,256", "--plot", tmp_path / "plot.png"]
    rows = bench("attention", "--model", model_folder, *sizes)
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert [(row["batch"], row["shared_tokens"]) for row in rows] == [
        (1, 64),
        (8, 64),
        (1, 256),
        (8, 256),
    ]
    # Eight rows of 64 + 128 or 256 + 128 keys: the scheduler has them in a slab, copied or not.
    kernels = {(row["relay_kernels"], row["copied_kernels"]) for row in rows}
    assert kernels == {("flash, padded", "padded")}


def test_bench_kernels_times_both_for_rows_and_keys(model_folder):
    sizes = ["--tokens", "1,3", "--keys", "16,2000", "--repeats", 1]
    rows = bench("kernels", "--model", model_folder, *sizes)
    # Four heads, two of them keys': a token is two rows. In fp32 only flash is ever taken.
    assert [(row["tokens"], row["rows"], row["keys"], row["taken"]) for row in rows] == [
        (1, 2, 16, "flash"),
        (3, 6, 16, "flash"),
        (1, 2, 2000, "flash"),
        (3, 6, 2000, "flash"),
    ]
    assert all(row["flash_ms"] > 0 and row["matmul_ms"] > 0 for row in rows)
    bad = run(experiments.app, ["kernels", "--model", model_folder, "--keys", "0"])
    assert isinstance(bad.exception, ConfigError)


def test_bench_traffic_compares_methods(tmp_path, model_folder):
    write_set(tmp_path / "set.jsonl", "Why is copper green?", "Who?", "Where?")
    rows = bench(
        "traffic",
        tmp_path / "set.jsonl",
        "--model",
        model_folder,
        "--clients",
        "1,2",
        "--new-tokens",
        3,
    )
    ways = [(method, clients) for method in ("full", "prefix", "auto") for clients in (1, 2)]
    assert [(row["method"], row["clients"]) for row in rows] == ways
    assert rows[4]["cached"] > rows[0]["cached"]
    for row in rows:
        assert row["ttft_p50_ms"] < row["ttft_p95_ms"]
        assert 0 <= row["gap_p50_ms"] <= row["gap_p95_ms"]  # 0: tokens that came together
        assert 1 <= row["answer_tokens"] <= 3
    nobody = run(
        experiments.app,
        [
            "traffic",
            str(tmp_path / "set.jsonl"),
            "--model",
            model_folder,
            "--clients",
            "0",
        ],
    )
    assert isinstance(nobody.exception, ConfigError)


def test_bench_chat_prints_every_turn_of_every_method(model_folder):
    sizes = ["--documents", "3", "--document-tokens", "40", "--question-tokens", "12"]
    rows = bench(
        *("chat", "--model", model_folder, *sizes),
        *("--turns", "3", "--new-tokens", "6", "--repeats", "1"),
    )
    turns = [(row["method"], row["turn"]) for row in rows]
    methods = ("full, nothing kept", "full", "prefix", "auto")
    assert turns == [(method, turn) for method in methods for turn in (1, 2, 3)]
    for row in rows:
        is_kept = row["turn"] > 1 and row["method"] != methods[0]
        assert (row["kept"] > 0.5) == is_kept  # every chat begins as a new one
    first = {row["method"]: row["cached"] for row in rows if row["turn"] == 1}
    assert first[methods[0]] == first["full"] == 0 < first["prefix"] < first["auto"]


def test_bench_traffic_takes_a_single_question(tmp_path, model_folder):
    path = write_set(tmp_path / "set.jsonl", "Why is copper green?", "Who?")
    options = ["--model", model_folder, "--limit", 1, "--new-tokens", 2, "--methods", "full"]
    (row,) = bench("traffic", path, *options)
    assert row["ttft_p50_ms"] == row["ttft_p95_ms"] > 0


def test_bench_traffic_has_requests_arrive(tmp_path, model_folder):
    path = write_set(tmp_path / "set.jsonl", "Why is copper green?", "Who?", "Where?")
    options = ["--model", model_folder, "--new-tokens", 2, "--methods", "auto"]
    rows = bench("traffic", path, *options, "--rates", "20,200")
    assert [(row["clients"], row["rate"]) for row in rows] == [(0, 20), (0, 200)]
    assert [row["requests"] for row in rows] == [3, 3]
    assert all(row["requests_per_s"] > 0 for row in rows)
    none = run(experiments.app, ["traffic", str(path), *map(str, options), "--rates", "0"])
    assert isinstance(none.exception, ConfigError)


def test_bench_loading_computes_what_a_slow_device_would_give_later(
    model_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sizes = ["--chunks", 3, "--chunk-tokens", 64, "--repeats", 1, "--paces", "0.5"]
    reuse, full = bench("loading", "--model", model_folder, *sizes, "--methods", "reuse")
    assert (reuse["brought"], full["brought"]) == (0, 0)


@pytest.mark.real  # for the embedding model
def test_order_has_prompts_begin_alike(tmp_path, model_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_set(tmp_path / "set.jsonl", "Who lit the lamp?", "Why is copper green?")
    rows = bench("order", path, "--model", model_folder, "--methods", "full")
    assert [row["order"] for row in rows] == ["ranked", "kept"]
    ranked, kept = rows
    assert 0.3 < kept["from_earlier"] > ranked["from_earlier"]  # the second begins as the first
    assert kept["charged"] < ranked["charged"]


def test_deviation_is_what_repair_takes_away(tmp_path, model_folder):
    path = write_set(tmp_path / "set.jsonl", "Why is copper green?")
    methods = "reuse,cacheblend:recompute_ratio=0.3,cacheblend:recompute_ratio=1.0"
    arguments = ["deviation", path, "--model", model_folder, "--methods", methods]
    found = run(experiments.app, [*map(str, arguments), "--dtype", "float32", "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    none, some, all_ = (row["deviation"] for row in told["rows"])
    assert none == pytest.approx(1)
    assert all_ == pytest.approx(0, abs=1e-4)
    assert all_ < some < none
    assert all(0.1 < layer["of_the_few"] <= 1 for layer in told["layers"])
    assert all(-1 <= layer["correlation"] <= 1 for layer in told["layers"][:-1])


@pytest.mark.parametrize(
    "arguments",
    [
        ["serving", "--requests", "3,many"],
        ["serving", "--rates", "often"],
        ["attention", "--batches", "1,x"],
        ["kernels", "--keys", "1.5"],
        ["answers", "--prompt-tokens", "1k"],
    ],
)
def test_bench_says_which_numbers_are_none(arguments, model_folder):
    result = run(experiments.app, [*arguments, "--model", model_folder])
    assert isinstance(result.exception, ConfigError)
    assert "numbers, comma-separated" in str(result.exception)


def test_bench_takes_methods_with_several_options(model_folder):
    sizes = ["--chunks", "2", "--chunk-tokens", "32", "--question-tokens", "8", "--repeats", "1"]
    methods = "cacheblend:score=kv,gradual=true,reuse"
    rows = bench("bench", "--model", model_folder, *sizes, "--methods", methods, app=cli.app)
    names = ["transformers", "full", "cacheblend:score=kv,gradual=true", "reuse"]
    assert [row["method"] for row in rows] == names


def test_bench_refuses_a_bad_ratio_whether_or_not_a_method_takes_it(model_folder):
    result = run(cli.app, ["bench", "--model", model_folder, "--methods", "auto", "--ratio", "2"])
    assert "ratio must be 0 to 1, not 2.0" in str(result.exception)


def test_bench_refuses_prompts_that_no_context_holds_before_it_encodes(model_folder):
    result = run(cli.app, ["bench", "--model", model_folder, "--chunks", "900000"])
    assert isinstance(result.exception, ContextOverflowError)
    assert "900000 chunks of 512 tokens" in str(result.exception)


def test_hold_asks_how_long(index):
    result = run(cli.app, ["hold", "q", "--index", str(index)])
    assert "--no-pinned or --ttl-seconds" in str(result.exception)


def test_figures_are_rounded_to_four_where_they_are_printed():
    @dataclasses.dataclass
    class Row:
        name: str
        count: int
        long_ms: float
        short_ms: float
        none: float | None

    row = plain(Row("a", 12345, 7632.44, 0.0123456, None))
    assert row == {
        "name": "a",
        "count": 12345,
        "long_ms": 7632,
        "short_ms": 0.01235,
        "none": None,
    }


def test_serve_refuses_what_cannot_be(model_folder, index):
    both = ["--index", str(index)]
    for options in ([*both, "--store", "x"], ["--api-key", "red:"]):
        result = run(cli.app, ["serve", "--model", model_folder, *options])
        assert isinstance(result.exception, ConfigError)


def test_serve_serves_an_index_until_it_is_stopped(index, monkeypatch):
    def asked_once(server, sockets):
        assert sockets[0].getsockname()[0] == "0.0.0.0"
        settings = server.config.app.state.service.engine.settings
        assert (settings.sequence_bytes, settings.keeps_repaired) == (5000, False)
        server._ready()
        with TestClient(server.config.app) as client:
            asked = [{"role": "system", "content": SYSTEM}]
            asked += [{"role": "user", "content": f"{CHUNKS[0]} Why?"}]
            body = {"model": "m", "messages": asked}
            response = client.post("/v1/chat/completions", json=body | {"max_tokens": 3})
            answers.append(response.json())

    answers = []
    monkeypatch.setattr("cached_rag.server.run.Server.run", asked_once)
    options = ["--name", "m", "--host", "0.0.0.0", "--port", "0", "--dtype", "float32"]
    refused = run(cli.app, ["serve", "--index", str(index), *options])
    assert isinstance(refused.exception, ConfigError)
    assert "--no-keys" in str(refused.exception)
    options += ["--no-keys", "--sequence-bytes", "5000", "--keeps-repaired", "false"]
    result = run(cli.app, ["serve", "--index", str(index), *options])
    assert result.exit_code == 0, result.output
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    loading, disk = (result.stderr.index(said) for said in ("Loading ", "GiB of KV on disk ("))
    assert loading < disk
    assert "serving m at http://0.0.0.0:" in result.stderr


@pytest.mark.parametrize("options", [(), ("--no-first-exact",)])
def test_served_documents_are_encoded_behind_the_head_alone_unless_told_otherwise(
    model_folder, monkeypatch, options
):
    def encoded(server, sockets):
        engine = server.config.app.state.service.engine
        with TestClient(server.config.app, "http://127.0.0.1") as client:
            body = {"texts": [CHUNKS[0]], "messages": [{"role": "user", "content": "{documents}?"}]}
            assert client.post("/v1/documents", json=body).status_code == 200
        found.extend(bool(behind.context) for behind in engine.library.encoded_after())
        server._ready()

    found = []
    monkeypatch.setattr("cached_rag.server.run.Server.run", encoded)
    result = run(cli.app, ["serve", "--model", model_folder, "--port", "0", *options])
    assert result.exit_code == 0, result.output
    assert sorted(found) == ([True] if options else [False, True])


def write_set(path, *questions):
    rows = [
        {"id": q, "question": q, "answers": ["copper"], "chunks": [{"text": c} for c in CHUNKS]}
        for q in questions
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_eval_prints_rows_and_writes_files(model_folder, tmp_path, monkeypatch):
    sets = [write_set(tmp_path / f"{name}.jsonl", "What is green?", "Who?") for name in "ab"]
    files = ["--plot", str(tmp_path / "out.png")]
    options = ["--methods", "full,reuse,epic,auto", "--ratio", "0.1,0.2", "--limit", "1"]
    command = ["eval", "--data", *sets, *options, "--model", model_folder, "--dtype", "float32"]
    result = run(cli.app, [*command, *files, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["data"], row["method"], row["ratio"]) for row in rows[:5]] == [
        ("a", "full", 1.0),
        ("a", "reuse", 0.0),
        ("a", "epic", 0.1),
        ("a", "epic", 0.2),
        ("a", "auto", 0.3),
    ]
    assert len(rows) == 15  # of either set, and of both together
    assert (tmp_path / "out.png").stat().st_size > 1000
    again = run(cli.app, [*command, "--json"])  # from the journal: the very same
    assert json.loads(again.stdout)["rows"] == rows
    shown = run(cli.app, command)
    assert "fewer than 30 questions" in shown.stdout
    there = machine() | {"threads": 77}
    monkeypatch.setattr("cached_rag.evaluation.machine.machine", lambda _: there)
    more = run(cli.app, [*command, "--limit", "2"])
    assert ", 77 threads" in more.stdout


def test_eval_judges_all_of_its_files_before_a_model_is_loaded(tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(Engine, "load", lambda *_, **__: loaded.append(1))
    path = tmp_path / "set.jsonl"
    write_set(path, "What is green?", "Who?", "Where?")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "{broken"]))
    command = ["eval", "--data", str(path), "--limit", "2"]
    result = run(cli.app, command)
    assert isinstance(result.exception, EvaluationError)
    assert "line 3" in str(result.exception)
    assert not loaded
    lines[0] = json.dumps(json.loads(lines[0]) | {"answers": []})
    path.write_text("\n".join(lines))
    said = " ".join(run(cli.app, command).stderr.split())
    assert f"{path}: 1 of 3 questions have no answers" in said


def test_eval_writes_into_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = Comparing(journal="~/kept.jsonl", plot="~/out.png")
    assert (found.journal, found.plot) == (tmp_path / "kept.jsonl", tmp_path / "out.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "q", "--index", "nowhere"], "there is no index at nowhere"),
        (["store", "stats", "--index", "nowhere"], "there is no index at nowhere"),
        (["doctor", "--model", "./no-model"], "there is no model folder"),
        (["eval", "--data", "x.jsonl", "--methods", "nope"], "method 'nope' is not one of"),
        (["eval", "--data", "x.jsonl", "--ratio", "much"], "a ratio is a number"),
        (["eval", "--data", "x.jsonl", "--ratio", ","], "a ratio is a number"),
        (["doctor", "--model", "x.gguf"], "there is no GGUF file"),
        (["doctor", "--model", "smollm2-135m", "--dtype", "int7"], "dtype 'int7' is not one of"),
    ],
)
def test_errors_are_one_line_and_exit_1(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["cached-rag", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "command",
    [
        "",
        "ingest",
        "ask",
        "list",
        "delete",
        "demo",
        "doctor",
        "bench",
        "serve",
        "store stats",
        "store verify",
        "store prune",
    ],
)
def test_every_command_has_help(command):
    result = run(cli.app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_every_experiment_has_help():
    names = [
        command.name or command.callback.__name__ for command in experiments.app.registered_commands
    ]
    assert len(names) > 15
    for name in names:
        result = run(experiments.app, [name.replace("_", "-"), "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.stdout


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ("4,-1", "clients are whole numbers, 1 or more"),
        (",", "clients are whole numbers, comma-separated"),
    ],
)
def test_experiments_refuse_numbers_that_are_none(clients, said):
    result = run(experiments.app, ["traffic", "x.jsonl", "--clients", clients])
    assert said in str(result.exception)


def test_chat_answers_turn_by_turn_and_shows_what_it_used(index):
    arguments = ["chat", "--index", str(index), "-k", "1", "--max-tokens", "3", "--no-condense"]
    said = "copper green?\n/sources\nand lighthouses?\n/new\n/sources\n\nnever asked\n"
    result = run(cli.app, [*arguments, "--dtype", "float32"], input=said)
    assert result.exit_code == 0, result.output
    assert result.output.count("prompt tokens from cache") == 2
    said = " ".join(result.output.split()) + " "  # without the breaks of narrow terminals
    _, first, shown, _, new, none, _ = said.split("> ")
    assert CHUNKS[1][:40] in first
    assert shown.count(CHUNKS[1][:40]) == 2  # as a title, and as a text
    assert shown.count(CHUNKS[1]) == 1  # titles are cut
    assert new == none == ""


def test_a_chat_does_not_take_commands_for_questions(index):
    arguments = ["chat", "--index", str(index), "-k", "1", "--max-tokens", "3", "--no-condense"]
    said = "/help\n/halp me\n /etc is copper?\n/quit\nnever asked\n"
    result = run(cli.app, [*arguments, "--dtype", "float32"], input=said)
    assert result.exit_code == 0, result.output
    assert result.output.count("/new begins anew") == 3
    assert "there is no /halp" in result.output
    assert result.output.count("prompt tokens from cache") == 1


def test_a_last_question_that_fails_is_an_exit_code(index):
    arguments = ["chat", "--index", str(index), "-k", "1", "--max-tokens", "100000"]
    result = run(cli.app, [*arguments, "--dtype", "float32"], input="copper green?\n")
    assert result.exit_code == 1
    assert "error: " in result.output


def test_a_question_that_is_no_text_is_an_error_and_no_traceback(index, monkeypatch, capsys):
    arguments = ["chat", "--index", str(index), "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", ["cached-rag", *arguments])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9?\n"), encoding="utf-8"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert "error: a question has half of a surrogate pair" in capsys.readouterr().err


def test_a_chat_without_an_input_ends(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # as behind <&-
    assert _asked() == ""


def test_workers_of_a_cluster_need_a_cluster(tmp_path):
    arguments = ["ingest", str(tmp_path), "--index", str(tmp_path / "index"), "--ray-workers", "3"]
    result = run(cli.app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "go with --ray" in str(result.exception)


def test_an_interrupt_while_libraries_load_is_no_error():
    load = "import sys, cached_rag.cli as cli\nsys.modules['cached_rag.cli.main'] = Interrupted()\n"
    class_ = "class Interrupted:\n    def __getattr__(self, name): raise KeyboardInterrupt\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{class_}{load}cli.run()"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_an_interrupt_while_python_ends_ends_it_at_once():
    code = """
import atexit, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
atexit.register(signal.raise_signal, signal.SIGINT)  # as while torch ends
from cached_rag.cli import run
sys.argv = ["cached-rag", "--version"]
run()
"""
    done = run_fresh(code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (-2, __version__, "")


def test_search_shows_the_nearest_chunks(index):
    arguments = ["search", "copper green?", "--index", str(index), "-k", "1"]
    found = json.loads(run(cli.app, [*arguments, "--json"]).stdout)["hits"]
    assert [hit["source"] for hit in found] == ["docs/b.txt"]
    shown = " ".join(run(cli.app, [*arguments, "--where", "source=*c.txt"]).stdout.split())
    assert CHUNKS[2] in shown
    assert CHUNKS[1] not in shown


def test_where_chooses_the_chunks(index):
    arguments = ["ask", "copper green?", "--index", str(index), "--max-tokens", "2", "--json"]
    result = run(cli.app, [*arguments, "--dtype", "float32", "--where", "source=docs/[bc].txt"])
    names = [hit["source"] for hit in json.loads(result.stdout)["sources"]]
    assert sorted(names) == ["docs/b.txt", "docs/c.txt"]
    for wrong, says in (("source", "FIELD=VALUE"), ("page=1", "no chunk has a field 'page'")):
        result = run(cli.app, [*arguments, "--dtype", "float32", "--where", wrong])
        assert isinstance(result.exception, ConfigError)
        assert says in str(result.exception)


def test_ingest_watch_goes_on_until_interrupted(index, tmp_path, monkeypatch):
    seen = []

    def interrupted(self, path):
        seen.append(path)
        yield self.ingest(path, progress=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(CachedRAG, "watch", interrupted)
    result = run(cli.app, ["ingest", str(tmp_path / "docs"), "--index", str(index), "--watch"])
    assert result.exit_code == 0, result.output
    assert "3 unchanged" in result.output
    assert seen == [str(tmp_path / "docs")]
    named = ["ingest", str(tmp_path), "--index", str(index), "--watch", "--name", "x"]
    assert isinstance(run(cli.app, named).exception, ConfigError)


def test_one_object_is_in_a_pipe_at_once(monkeypatch):
    with monkeypatch.context() as patch:
        reading, writing = os.pipe()
        with open(writing, "w") as pipe, open(reading) as other:
            patch.setattr(sys, "stdout", pipe)
            os.set_blocking(reading, False)
            print_json({"added": 1})
            assert other.read() == '{"added": 1}\n'


def test_a_home_is_found_where_the_shell_leaves_it(index, monkeypatch):
    monkeypatch.setenv("HOME", str(index.parent))
    for arguments in (["list"], ["store", "stats"], ["store", "verify"]):
        result = run(cli.app, [*arguments, f"--index=~/{index.name}", "--json"])
        assert result.exit_code == 0, result.exception
    nobody = run(cli.app, ["list", "--index=~nobody-of-that-name/x"])
    assert isinstance(nobody.exception, ConfigError)


def test_machines_share_kv_by_remote(index, tmp_path, model_folder):
    """Another machine has the documents, but no KV: it gets that from the shared store."""
    shared = tmp_path / "shared"
    where = ["--index", str(index), "--dtype", "float32", "--json", "--remote", f"file://{shared}"]
    docs = str(tmp_path / "docs")
    sent = json.loads(run(cli.app, ["ingest", docs, *where]).stdout)
    assert (sent["encoded"], sent["unsent"]) == (0, 0)  # what was there already is sent
    for blob in (index / "kv" / "blobs").rglob("*.safetensors"):
        blob.unlink()
    found = run(cli.app, ["ask", "copper green?", *where, "-k", "3", "--max-tokens", "2"])
    assert json.loads(found.stdout)["report"]["modules_hit"] == 3
    before = len(list(shared.rglob("*.raw")))
    gone = ["delete", "docs/a.txt", *where[:2], *where[4:]]
    assert run(cli.app, gone).exit_code == 0
    # Its KV behind the primer, and that behind the head alone.
    assert len(list(shared.rglob("*.raw"))) == before - 2


def test_a_code_page_that_lacks_a_character_fails_no_command(tmp_path):
    name = "m\N{SNOWMAN}"
    code = (
        "import sys; from cached_rag.cli import run\n"
        "for stream in (sys.stdout, sys.stderr): stream.reconfigure(encoding='cp1252')\n"
        "try: run()\n"
        "except SystemExit as shown: sys.argv.append('--json'); print('---', shown.code)\n"
        "run()"
    )
    (tmp_path / "a.xml").write_text(f'<schema name="s"><module name="{name}"/></schema>', "utf-8")
    done = run_fresh(code, "schema", "check", "a.xml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    shown, as_json = done.stdout.split("--- 1")
    assert "'m?'" in shown
    assert "'m?'" not in as_json


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", "the output cannot be written: No space"),
        ("sys.stdout = None", "standard output is closed"),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_exit_1(tmp_path, place, said):
    (tmp_path / "a.xml").write_text("<schema>")
    code = f"import os, sys; {place}\nfrom cached_rag.cli import run; run()"
    for more in ([], ["--json"]):
        done = run_fresh(code, "schema", "check", "a.xml", *more, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {said}")
        assert done.stderr.count("\n") == 1


def test_the_terminal_is_looked_at_where_it_is_closed():
    code = "import sys; sys.stdout = None; import cached_rag.cli.terminal"
    assert run_fresh(code, modules="rich").returncode == 0


def test_the_version_is_an_option():
    said = run(cli.app, ["--version"])
    assert (said.exit_code, said.stdout) == (0, f"{__version__}\n")
