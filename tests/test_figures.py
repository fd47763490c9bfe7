"""Figures in pages: tables are what a command printed, and no figure stands without its command."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cached_rag.cli.main import app
from docs.experiments.__main__ import app as experiments

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
figures = importlib.util.module_from_spec(_SPEC)
sys.modules["figures"] = figures  # its dataclass looks there
_SPEC.loader.exec_module(figures)

BLOCKS = [block for page in figures.PAGES for block in figures.blocks(page)]
# What was measured: times, ratios, rates, sizes, intervals. Not: settings and limits.
FIGURE = re.compile(
    r"(?<![\w.])\d[\d,]*(?:\.\d+)?\s?(?:ms|x)\b"
    r"|\d(?:\.\d+)? times (?:as|faster|sooner)"
    r"|tokens (?:a|per) second|[+-]?\d*\.\d+ ?[\[(][+-]\.?\d"
)
COMMAND = re.compile(
    r"`[^`]*\b(?:cached-rag|make|pytest|python -m)\s[^`]+`|^(?:cached-rag|python) ", re.M
)
COMMIT = re.compile(r"[Cc]ommits?\s+`?[0-9a-f]{7}")


def sections(page):
    """Heading and text of each section, without blocks of code."""
    text = re.sub(r"<!-- figures:.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    parts = re.split(r"^(#+ .+)$", text, flags=re.MULTILINE)
    return [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


@pytest.mark.parametrize("block", BLOCKS, ids=[block.name for block in BLOCKS])
def test_a_table_is_what_its_command_printed(block):
    assert block.shown == block.drawn()
    kept = json.loads((figures.KEPT / f"{block.name}.json").read_text())
    assert kept["command"] == block.command
    for fact in ("commit", "processor", "threads"):
        assert kept["machine"][fact]
    words = shlex.split(block.command)
    command, rest = typer.main.get_command(app), [*words[1:], "--json"]
    if words[:3] == ["python", "-m", "docs.experiments"]:
        command, rest = typer.main.get_command(experiments), [*words[3:], "--json"]
    elif words[:2] == ["python", "-m"]:
        module = typer.Typer()
        module.command()(importlib.import_module(words[2]).main)
        command, rest = typer.main.get_command(module), words[3:]
    else:
        assert words[0] == "cached-rag"
    while isinstance(command, typer.core.TyperGroup) and rest and rest[0] in command.commands:
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(words[0], rest, resilient_parsing=True)


def git(*words, **how):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, **how).stdout


IN_HISTORY = pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository").strip() != "false", reason="no history here"
)


@IN_HISTORY
def test_commits_that_are_named_exist():
    assert figures.COMMIT.findall("commits d04b14af and 1c69f9d") == ["d04b14af", "1c69f9d"]
    named = {one.commit for one in figures.sources()}
    named |= set(re.findall(r"([0-9a-f]{7}) \|$", figures.TRIALS.read_text(), re.M))
    assert len(named) > 20
    found = git("cat-file", "--batch-check", input="\n".join(sorted(named)))
    assert [line for line in found.splitlines() if " commit " not in line] == []


@IN_HISTORY
def test_no_figure_is_older_than_this_round():
    assert figures.is_new("HEAD")
    assert not figures.is_new(f"{figures.SINCE}~1")  # control
    assert not [one for one in figures.sources() if not figures.is_new(one.commit)]


def test_a_name_means_one_command_and_nothing_is_kept_for_nothing():
    names = {block.name for block in BLOCKS}
    assert len({(block.name, block.command) for block in BLOCKS}) == len(names)
    assert {path.stem for path in figures.KEPT.glob("*.json")} == names
    assert len({(block.page, block.head) for block in BLOCKS}) == len(BLOCKS)


@pytest.mark.parametrize("page", figures.PAGES, ids=[page.name for page in figures.PAGES])
def test_figures_outside_of_tables_stand_with_a_command_and_a_commit(page):
    lonely = [
        f"{heading}: {found[0]}"
        for heading, text in sections(page)
        if (found := FIGURE.search(re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
        and not (COMMAND.search(text) and COMMIT.search(text))
    ]
    assert lonely == []


def test_a_figure_is_noticed():
    for text in ("1.5x", "12 ms", "3 times as fast", "40 tokens a second", "+.008 (-.044, +.067)"):
        assert FIGURE.search(text), text
    for text in ("0.3.1", "max 12", "8 chunks", "`--limit 3`"):
        assert not FIGURE.search(text), text


def test_a_table_is_drawn_from_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "KEPT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n<!-- figures: mine\ncached-rag bench\nname: `{name}`\ntime: {ms:.1f} ms\n"
        "only: name=a c\n-->\nold\n<!-- end -->\nrest\n"
    )
    facts = {"commit": "abc", "processor": "P", "threads": 2, "torch": "2"}
    rows = [{"name": n, "ms": ms} for n, ms in (("a", 1.25), ("b", 2), ("c", None))]
    said = {"command": "cached-rag bench", "date": "2026-01-02", "rows": rows, "machine": facts}
    (tmp_path / "mine.json").write_text(json.dumps(said))
    (block,) = figures.blocks(page)
    figures.write(block)
    assert page.read_text().endswith(
        "-->\n| name | time |\n| --- | --- |\n| `a` | 1.2 ms |\n| `c` |  |\n\n"
        "(`cached-rag bench`, 2026-01-02, commit abc, P, 2 threads, torch 2)\n<!-- end -->\nrest\n"
    )
    (again,) = figures.blocks(page)
    assert again.shown == again.drawn()
