"""What `make test-gpu` runs, here on the CPU and with a tiny model."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from docs.experiments.__main__ import app
from docs.experiments.gpu import PARTS, SMALL, run_apart
from docs.experiments.random_model import random_model


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_figures(part):
    for rows in PARTS[part](random_model("tiny", "cpu"), SMALL):
        assert rows
        assert all(getattr(row, "speedup", 1.0) > 0 for row in rows)


@pytest.mark.slow
def test_a_part_that_fails_takes_no_other_with_it(tmp_path, capfd):
    assert run_apart(["no-such-part", "answers"], "tiny", "cpu", tmp_path, 120.0) == 1
    assert "no-such-part: FAILED" in capfd.readouterr().out
    assert "there is no part ['no-such-part']" in (tmp_path / "no-such-part.txt").read_text()
    assert "auto" in (tmp_path / "answers.txt").read_text()


def test_a_part_without_time_is_ended(tmp_path):
    assert run_apart(["answers"], "tiny", "cpu", tmp_path, 0.0) == 1
    assert (tmp_path / "answers.txt").read_text() == ""


def test_what_cannot_be_timed_is_refused():
    for words, says in (
        (["--device", "mps"], "would not wait for the device"),
        (["relay", "no-such-part"], "there is no part"),
        (["--shape", "70b"], "is not one of tiny, 0.5b, 7b"),
        (["relay", "batches", "--device", "cpu", "--json"], "--json is for one part"),
    ):
        found = CliRunner().invoke(app, ["gpu", *words])
        assert says in str(found.exception)
