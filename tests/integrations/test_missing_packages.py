"""Parts that need packages which are not there say so, and how to get them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cached_rag import CachedRAGError, MissingPackageError

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys
sys.modules[{missing!r}] = None  # as if it was not installed
from cached_rag import MissingPackageError
try:
    import {module}
except MissingPackageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("langchain_cached_rag", "langchain_core", "langchain"),
        *(
            (f"llama_index.{part}.cached_rag", "llama_index.core", "llama-index")
            for part in ("llms", "retrievers", "vector_stores", "response_synthesizers")
        ),
    ],
)
def test_an_integration_names_its_extra(module, missing, extra):
    code = WITHOUT.format(module=module, missing=missing)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert missing in done.stdout
    assert f'pip install -e ".[{extra}]"' in done.stdout


def test_it_is_an_error_of_ours_and_of_imports():
    error = MissingPackageError("a part", "extra", ImportError("no module"))
    assert isinstance(error, CachedRAGError)
    assert isinstance(error, ImportError)


def test_nobody_is_sent_to_an_index_for_this_library():
    paths = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    paths += [*ROOT.glob("cached_rag/**/*.py"), *ROOT.glob("integrations/**/*.py")]
    assert len(paths) > 100
    for path in paths:
        assert not re.search(r"install[^\n]*cached-rag\[", path.read_text()), path
