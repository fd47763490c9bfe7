"""The documentation as a site: it builds, and each of its links leads somewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def built(config, site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", str(config), "--site-dir", str(site)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )


def test_it_has_all_pages_and_the_reference_and_only_links_that_lead_nowhere_are_errors(tmp_path):
    for path in ROOT.iterdir():
        if path.name in ("docs", "notebooks"):
            shutil.copytree(path, tmp_path / path.name)
        elif path.name == "mkdocs.yml":
            shutil.copy(path, tmp_path)
        elif path.name not in (".git", ".venv", "build"):
            os.symlink(path, tmp_path / path.name)
    with (tmp_path / "docs/explain.md").open("a") as page:
        page.write("\n[x](nowhere.md)\n[x](store.md#nowhere)\n[x](../nowhere.py)\n")
    done = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    for target in ("nowhere.md", "store.md#nowhere", "nowhere.py"):
        assert target in said
    assert "with 3 warnings" in said
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.parent.name for path in (tmp_path / "site").glob("*/index.html")} > pages
    assert "StoreConfig" in (tmp_path / "site/api/index.html").read_text()
    notebooks = list((tmp_path / "site/notebooks").glob("*/index.html"))
    assert len(notebooks) == len(list((ROOT / "notebooks").glob("*.ipynb")))
