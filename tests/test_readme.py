"""The code in README and docs is code: it parses, its imports and commands exist, scripts run."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import CHUNKS
from fresh import run_fresh
from typer.testing import CliRunner

from cached_rag import CachedRAG, Engine
from cached_rag.cli import main as cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
DOCS = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    block
    for text in (README, *DOCS)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
COMMANDS = re.findall(r"^cached-rag ([^#\n]+)", README + QUICKSTART, re.MULTILINE)


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


NINE_LINES, *FRAMEWORKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
WHOLE = re.findall(r"```python\n(.*?)```", QUICKSTART, re.DOTALL)
SCRIPTS = [NINE_LINES, *WHOLE]


def statements(block):
    """A block's statements, as code alone, without imports."""
    nodes = [node for node in ast.parse(block).body if not isinstance(node, ast.ImportFrom)]
    return {ast.unparse(node) for node in nodes}


@pytest.mark.parametrize("block", FRAMEWORKS, ids=range(len(FRAMEWORKS)))
def test_lines_for_a_framework_are_those_of_a_whole_script(block):
    assert any(statements(block) <= statements(script) for script in WHOLE)


# The tiny model under the name of the small one, and an embedding without weights; then the file
# as it is, but for longer answers, and how many tokens its answers had from cache.
RUNNER = """
import runpy, sys
import numpy as np
from cached_rag.engine import request
from cached_rag.backends import resolve
from cached_rag.methods.question import Auto
from cached_rag.rag.chunks import Embedder

class Words:
    def encode(self, texts, **_):
        rows = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(rows, texts):
            for word in text.lower().split():
                row[sum(map(ord, word)) % 64] += 1
        return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1)

resolve.ALIASES.clear()
# It stands for a large one, and its tokens, which are letters, for words.
Auto.least_weights, Auto.enough_for = 0, float("inf")
Embedder.embed = lambda _, texts: Words().encode(texts)
Embedder.load = lambda _: None
made, begin = [], request.Request.__post_init__

def begin_short(self):
    begin(self)
    most = min(self.decoding._config.max_tokens, 8)
    self.decoding._config = self.decoding._config.replace(max_tokens=most)
    made.append(self)

request.Request.__post_init__ = begin_short
runpy.run_path(sys.argv[1], run_name="__main__")
print()
print(*(one.prompt.report.cached_tokens for one in made))
"""


LIBRARIES = sorted(
    {
        node.module
        for script in SCRIPTS
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.ImportFrom)
    }
)


def run_script(folder):
    modules = " ".join(["transformers.models.llama.modeling_llama", *LIBRARIES])
    done = run_fresh(RUNNER, "script.py", cwd=folder, modules=modules)
    assert done.returncode == 0, done.stderr
    *shown, counts = done.stdout.splitlines()
    return shown, list(map(int, counts.split()))


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_snippet_runs_and_its_second_run_reuses(script, model_folder, tmp_path):
    for name in ("smollm2-135m", "qwen2.5-coder-0.5b"):
        folder = shutil.copytree(model_folder, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = 8192  # so that the scripts' texts fit
        (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "manuals").mkdir()
    (tmp_path / "manuals" / "valve.txt").write_text(f"The valve\n\n{CHUNKS[0]} {CHUNKS[1]}")
    (tmp_path / "script.py").write_text(script)
    shown, first = run_script(tmp_path)
    assert first
    assert any(line.strip() for line in shown)  # a script that says nothing shows nobody anything
    _, second = run_script(tmp_path)
    assert len(second) == len(first)
    assert all(second)
