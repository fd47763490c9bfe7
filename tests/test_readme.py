"""The code in README and docs is code: it parses, its imports, commands and files exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cached_rag import CachedRAG, Engine, cli

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
