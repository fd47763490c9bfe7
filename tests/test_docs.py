"""What the docs say of the code, of each other and of the papers is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from test_architecture import FLOORS

from cached_rag.methods import SELECTORS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
WORDS = (
    *("prefill", "KV", "TTFT", "chunk", "module", "method", "primer", "head", "row", "slot"),
    *("sequence", "position", "relocation", "repair", "anchor", "charge"),
)


def anchors(page):
    """The fragments that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_to_files_and_headings(page):
    for target, _, heading in re.findall(
        r"\]\((?!https?://)([^)#]*)(#?)([^)]*)\)", page.read_text()
    ):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not heading or heading in anchors(file), f"{target}#{heading}"


def test_every_page_is_reached_from_the_readme():
    linked = re.findall(r"\]\((docs/\w+\.md)", (ROOT / "README.md").read_text())
    assert {f"docs/{page.name}" for page in PAGES if page.parent.name == "docs"} == set(linked)


def test_every_long_table_is_reached_from_the_page_of_experiments():
    text = (ROOT / "docs" / "experiments.md").read_text()
    linked = re.findall(r"\]\(experiments/(\w+\.md)", text)
    assert {page.name for page in PAGES if page.parent.name == "experiments"} == set(linked)


def test_the_rooms_are_those_of_the_code_in_their_order():
    rooms = re.findall(r"^\| `(\w+)/` \|(.*)$", ARCHITECTURE, re.MULTILINE)
    floors = [name for name in reversed(FLOORS) if (ROOT / "cached_rag" / name).is_dir()]
    assert [name for name, _ in rooms] == floors
    for name, row in rooms:
        for file in re.findall(r"`(\w+\.py)`", row):
            assert (ROOT / "cached_rag" / name / file).exists(), f"{name}/{file}"


def test_files_named_in_the_tree_exist():
    tree = ARCHITECTURE.split("```\ncached_rag/")[1].split("```")[0]
    names = re.findall(r"\b\w+\.py\b", tree)
    assert len(names) > 20
    for name in names:
        assert list(ROOT.glob(f"cached_rag/**/{name}")), name


def test_a_request_has_eight_steps():
    steps = re.findall(r"^(\d)\. \*\*", ARCHITECTURE, re.MULTILINE)
    assert steps == list("12345678")


def test_the_glossary_has_the_words():
    glossary = ARCHITECTURE.split("## Glossary")[1]
    found = re.findall(r"^\| \*\*([\w ]+)\*\*", glossary, re.MULTILINE)
    assert set(WORDS) <= set(found)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("name", SELECTORS)
def test_a_method_says_what_why_and_whose_and_its_page_agrees(name):
    told = inspect.getdoc(SELECTORS[name])
    assert told.startswith("Recomputes ")
    for word in ("Paper:", "Cost:", "Use it"):
        assert word in told
    links = re.findall(r"https://arxiv\.org/abs/\d{4}\.\d{5}", told)
    assert links or "Paper: none" in told
    page = (ROOT / "docs" / "methods.md").read_text()
    assert all(f"({link})" in page for link in links)


def test_the_page_of_methods_names_no_other():
    page = (ROOT / "docs" / "methods.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == set(SELECTORS)
