"""Every notebook runs from top to bottom, and is kept with the outputs that it has today.

They run with a cut model, which takes as many tokens from cache and says something else; with the
whole one they run when they are written (`make notebooks`).
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import nbformat
import pytest
from cut_model import write_cut_wheel
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook, new_output

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# Times, rates and scores differ from machine to machine; whole numbers are counts and do not, but
# for those of drafts, which follow the answers' words.
MEASURED = re.compile(
    r"(?:_(?:ms|bytes)|(?:drafted|accepted)_tokens)'?[:=] ?[\d.]+"
    r"|-?\d+\.\d+|\b\d+(?= ?(?:ms|s|%)(?!\w))"
)
# What stays of a cell that prints answers, or what else a rounding may turn: how much was reused.
COUNTED = re.compile(r"\d+(?: of \d+)? prompt tokens(?: from cache)?|\d+ chunks hit, \d+ missed")


def facts(cell):
    """What a cell puts out on every machine: kinds of outputs, and text but for measurements.

    Cells tagged "varies" print answers: of their text only counts of tokens and modules stay.
    """
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            if output.name == "stdout":  # in as many pieces as it happens to come
                is_more = found and found[-1][0] == "stdout"
                found.append(("stdout", (found.pop()[1] if is_more else "") + output.text))
            continue
        kinds = sorted(output.get("data", {}))
        found.append((" ".join([output.output_type, *kinds]), _plain(output)))
    is_free = "varies" in cell.metadata.get("tags", [])
    return [(kind, COUNTED.findall(text) if is_free else _masked(text)) for kind, text in found]


def _plain(output):
    return output.get("data", {}).get("text/plain", "")


def _masked(text):
    return [" ".join(MEASURED.sub("#", line).split()) for line in text.splitlines()]


def stale(kept, fresh):
    """Code cells whose kept outputs are not those of today: (source, kept facts, today's)."""
    pairs = zip(kept.cells, fresh.cells, strict=True)
    every = [(a.source, facts(a), facts(b)) for a, b in pairs if a.cell_type == "code"]
    return [cell for cell in every if cell[1] != cell[2]]


@pytest.fixture(scope="module")
def cut_wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    write_cut_wheel(folder)
    return str(folder)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_its_outputs_are_todays(path, cut_wheel, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", cut_wheel, prepend=os.pathsep)
    kept = nbformat.read(path, as_version=4)
    fresh = copy.deepcopy(kept)
    NotebookClient(fresh, timeout=900, resources={"metadata": {"path": path.parent}}).execute()
    assert not stale(kept, fresh), "kept outputs are not today's; run: make notebooks"


def test_there_are_notebooks_with_outputs():
    assert len(NOTEBOOKS) >= 5
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert any(facts(cell) for cell in cells if cell.cell_type == "code"), path


def printed(*texts, tags=()):
    outputs = [new_output("stream", name="stdout", text=text) for text in texts]
    return new_code_cell("x", outputs=outputs, metadata={"tags": list(tags)})


def differ(first, second):
    return bool(stale(new_notebook(cells=[first]), new_notebook(cells=[second])))


REPORT = "{'prompt_tokens': %d, 'load_ms': %s}"
LINE = "%s\nreuse: %d of 48 prompt tokens from cache (46%%), 2 chunks hit, 0 missed; after %s ms"


@pytest.mark.parametrize(
    ("kept", "fresh", "is_stale"),
    [
        (printed("46 chunks in 15 s\n"), printed("46 chunks", " in 9 s\n"), False),
        (printed("46 chunks in 15 s\n"), printed("47 chunks in 15 s\n"), True),
        (printed("  6.5 times, 99%"), printed("10.25 times, 7%"), False),
        (printed(REPORT % (7, "1.5")), printed(REPORT % (7, "22")), False),
        (printed(REPORT % (7, "1.5")), printed(REPORT % (8, "1.5")), True),
        (printed("dict_keys(['a'])"), printed("dict_keys(['a', 'b'])"), True),
        (printed("The 3 words"), printed("The 3 other words"), True),
        (printed(LINE % ("Yes.", 22, 157)), printed(LINE % ("No.", 22, 157)), True),
        (
            printed(LINE % ("Yes.", 22, 157), tags=["varies"]),
            printed(LINE % ("No, 12 of them.", 22, 9), tags=["varies"]),
            False,
        ),
        (
            printed(LINE % ("Yes.", 22, 157), tags=["varies"]),
            printed(LINE % ("Yes.", 23, 157), tags=["varies"]),
            True,
        ),
        (printed("x"), new_code_cell("x"), True),
        (printed("x", tags=["varies"]), new_code_cell("x"), True),
        (
            new_code_cell("x", outputs=[new_output("display_data", {"image/png": "a"})]),
            new_code_cell("x", outputs=[new_output("display_data", {"image/png": "b"})]),
            False,
        ),
        (
            new_code_cell("x", outputs=[new_output("display_data", {"image/png": "a"})]),
            new_code_cell("x", outputs=[new_output("display_data", {"text/plain": "a"})]),
            True,
        ),
    ],
)
def test_what_makes_a_notebook_stale(kept, fresh, is_stale):
    assert differ(kept, fresh) == is_stale
