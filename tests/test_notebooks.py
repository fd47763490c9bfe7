"""Every notebook runs from top to bottom, and is kept with its outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code), "kept without outputs; run it and save it"
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": path.parent}}).execute()
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]


def test_there_are_notebooks():
    assert NOTEBOOKS
