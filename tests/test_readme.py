"""The code in README and docs is code: it parses, its imports, commands and files exist."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHUNKS
from typer.testing import CliRunner

from cached_rag import CachedRAG, Engine
from cached_rag.cli import main as cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    block
    for text in (README, *DOCS)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
COMMANDS = re.findall(r"^cached-rag ([^#\n]+)", README, re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_import_what_exists(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name)


def test_methods_named_in_the_readme_exist():
    for owner, name in re.findall(r"\b(rag|engine)\.(\w+)\(", "".join(BLOCKS)):
        assert callable(getattr({"rag": CachedRAG, "engine": Engine}[owner], name))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_options_exist(command):
    words = [word for word in command.split() if not word.startswith('"')]
    name = words[:2] if words[0] in ("store", "schema") else words[:1]
    shown = CliRunner().invoke(cli.app, [*name, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for option in re.findall(r"--[\w-]+", command):
        assert option in shown.output


def test_files_named_in_the_tree_exist():
    tree = README.split("## Files")[1].split("```")[1]
    names = re.findall(r"\b\w+\.py\b", tree)
    assert len(names) > 20
    for name in names:
        assert list(ROOT.glob(f"cached_rag/**/{name}")), name


SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# The tiny model under the name of the small one, and an embedding without weights; then the file
# as it is, and how many tokens its answers had from cache.
RUNNER = """
import runpy, sys
import numpy as np
from cached_rag.engine import request
from cached_rag.backends import resolve
from cached_rag.rag import Embedder

class Words:
    def encode(self, texts, **_):
        rows = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(rows, texts):
            for word in text.lower().split():
                row[sum(map(ord, word)) % 64] += 1
        return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1)

resolve.ALIASES.clear()
Embedder._loaded = lambda _: Words()
made, begin = [], request.Request.__post_init__
request.Request.__post_init__ = lambda self: (begin(self), made.append(self))[0]
runpy.run_path(sys.argv[1], run_name="__main__")
print()
print(*(one.report.cached_tokens for one in made))
"""


def run_script(folder):
    command = [sys.executable, "-W", "ignore", "-c", RUNNER, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *shown, counts = done.stdout.splitlines()
    return shown, list(map(int, counts.split()))


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_snippet_of_the_readme_runs_and_its_second_run_reuses(script, model_folder, tmp_path):
    (tmp_path / "smollm2-135m").symlink_to(model_folder, target_is_directory=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "valve.txt").write_text(f"The valve\n\n{CHUNKS[0]} {CHUNKS[1]}")
    (tmp_path / "script.py").write_text(script)
    shown, first = run_script(tmp_path)
    assert first
    assert any(line.strip() for line in shown)  # a script that says nothing shows nobody anything
    _, second = run_script(tmp_path)
    assert len(second) == len(first)
    assert all(second)
