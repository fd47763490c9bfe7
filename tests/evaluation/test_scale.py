"""The arithmetic of scale, against arithmetic by hand and sums by force."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from cached_rag import ConfigError
from docs.experiments import __main__ as cli
from docs.experiments.popularity import (
    LRU,
    earning,
    harmonic,
    hit_rates,
    hits,
    moving,
    with_ingestion,
    zipf_trace,
)
from docs.experiments.scale import Constants, answer_seconds, places, scale_row, uses_needed

pytestmark = pytest.mark.slow

KNOWN = Constants(tokens_per_s=1000, token_bytes=20_000, chunk_tokens=360, workers=10)


def test_a_million_chunks_by_hand():
    # 10^6 * 360 tokens / 1000 a second = 360000 s = 100 h of one worker, 10 h of ten, at 0.1 $;
    # 3.6e8 tokens * 20 kB = 7200 GB, at 3, 0.08 and 0.023 $
    row = scale_row(1_000_000, KNOWN)
    assert (row.hours, row.dollars, row.kv_gb) == pytest.approx((10, 10, 7200))
    assert (row.memory, row.disk, row.objects) == pytest.approx((21_600, 576, 165.6))
    # a chunk: 360 * 4 bytes of text, twice; 384 floats; 2000 bytes of a row
    assert row.index_gb == pytest.approx((2 * 1440 + 1536 + 2000) / 1000)


def test_an_answer_by_hand():
    # 5 * 360 tokens: 1.8 s of prefill; 36 MB at 1 GB a second
    assert answer_seconds(KNOWN, 5) == pytest.approx((1.8, 0.036))


def test_the_break_even_by_hand():
    # a token for a month on disk: 2e4 / 1e9 * 0.08 $ = 1.6e-6 $; to prefill it: 0.1 / 3.6e6 $
    assert uses_needed(KNOWN, KNOWN.disk) == pytest.approx(1.6e-6 * 3.6e7)
    kept = Constants(tokens_per_s=1000, token_bytes=20_000, chunk_tokens=77)
    assert uses_needed(kept, kept.disk) == uses_needed(KNOWN, KNOWN.disk)


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.3])
def test_sums_of_many_terms_are_those_by_force(exponent):
    for count in (1, 10, 3_000_000):
        by_force = (np.arange(1, count + 1, dtype=np.float64) ** -exponent).sum()
        assert harmonic(count, exponent) == pytest.approx(by_force, rel=1e-8)
    assert harmonic(0, exponent) == 0


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.4])
def test_chunks_that_earn_a_place_are_those_used_often_enough(exponent):
    chunks, uses, needed = 5000, 40_000, 6.5
    weights = np.arange(1, chunks + 1, dtype=np.float64) ** -exponent
    own = uses * weights / weights.sum()
    count, share = earning(chunks, uses, needed, exponent)
    assert count == (own >= needed).sum()
    assert share == pytest.approx(own[:count].sum() / uses)
    assert earning(chunks, uses, 1e-9, exponent) == (chunks, 1)
    assert earning(chunks, uses, 1e9, exponent) == (0, 0)


def test_the_cheaper_a_tier_the_more_chunks_earn_a_place():
    rows = places([1_000_000], 6e6, KNOWN)
    assert [row.tier for row in rows] == ["memory", "disk", "objects"]
    memory, disk, objects = (row.earning for row in rows)
    assert 0 < memory < disk < objects
    assert rows[1].kv_gb == pytest.approx(disk * 360 * 20_000 / 1e9)


def test_a_trace_has_the_law_it_is_drawn_by():
    trace = zipf_trace(1000, 200_000, 1.0, seed=3)
    found = np.bincount(trace, minlength=1000)[:20] / len(trace)
    assert np.allclose(found, 1 / np.arange(1, 21) / harmonic(1000, 1.0), atol=0.003)
    assert (trace == zipf_trace(1000, 200_000, 1.0, seed=3)).all()


def test_an_lru_of_two_by_hand():
    # warm: 0 1; then 0 hits, 2 misses (1 goes), 1 misses (0 goes), 2 hits
    assert hits(np.array([0, 1, 0, 2, 1, 2]), LRU(2), warm=2) == 0.5


def test_counting_beats_the_last_used_and_knowing_beats_both():
    trace = zipf_trace(500, 20_000)
    for row in hit_rates(trace, 500, [0.02, 0.1, 0.5]):
        assert row.lru < row.store < row.known
        assert row.lru < row.counted < row.known + 0.01
    for other in (moving(trace, 500), with_ingestion(trace, 500)):
        (row,) = hit_rates(other, 500, [0.1])
        assert row.lru < row.store
    (whole,) = hit_rates(trace, 500, [1.0])
    assert whole.counted == whole.known == 1
    assert 0.98 < whole.lru < 1  # each chunk's first use finds nothing


def test_a_constant_that_is_not_positive_is_refused():
    with pytest.raises(ConfigError, match="worker_hour must be more than 0"):
        Constants(1000, 20_000, worker_hour=0)


def test_the_command_measures_what_it_is_not_told(model_folder):
    run = CliRunner().invoke
    options = ["--chunks=1e4", "--kept=0.1", "--uses=2000", "--chunk-tokens=32", "--json"]
    given = ["--tokens-per-s", "1000", "--token-bytes", "20000"]
    told = json.loads(run(cli.app, ["scale", *given, *options]).stdout)
    assert told["scale"][0]["kv_gb"] == 6.4
    assert [row["tier"] for row in told["places"]] == ["memory", "disk", "objects"]
    measure = ["--model", model_folder, "--dtype", "float32", *given[:2]]
    found = run(cli.app, ["scale", *measure, *options])
    assert found.exit_code == 0, found.output
    bare = 4 * 2 * 2 * 16 * 4  # layers, sides, heads, their width, float32
    assert bare < json.loads(found.stdout)["constants"]["token_bytes"] < 2 * bare
    shown = run(cli.app, ["scale", *given, *options[:-1]])
    assert "earn their place" in shown.stdout
