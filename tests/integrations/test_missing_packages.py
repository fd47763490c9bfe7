"""Parts that need packages which are not there say so, and how to get them."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cached_rag import CachedRAG, CachedRAGError, Embedder
from cached_rag.errors import BusyError, MissingPackageError, PMLError, needs_extra
from cached_rag.evaluation.summary import new_figure

pytestmark = pytest.mark.slow

ROOT, TESTS = Path(__file__).parents[2], Path(__file__).parents[1]
RAG = (
    *("chardet", "docutils", "faiss", "markdown_it", "pypdf"),
    "sentence_transformers",
)
EXTRAS = (
    *(*RAG, "fastapi", "uvicorn", "rouge_score", "matplotlib"),
    *("langchain_core", "llama_index", "ray"),
)
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))  # None: as if they were not installed
{code}
"""
ENGINE = """
from conftest import CHUNKS, tiny_model
from cached_rag import CachedRAG, Engine, Schema
engine = Engine(tiny_model("llama"))
engine.encode(CHUNKS)
answer = engine.generate(f"{CHUNKS[0]}\\n\\nWho?", method="reuse", max_tokens=4)
assert answer.report.modules_hit == 1
schema = Schema.from_string(f'<schema name="s"><module name="m">{CHUNKS[1]}</module></schema>')
assert schema.encode(engine)
print("answered")
"""
# What all commands and imports say, one after the other, each behind a line of its own.
COMMANDS = """
from cached_rag.cli.main import main
for arguments in {every!r}:
    print("----", file=sys.stderr)
    sys.argv = ["cached-rag", *arguments]
    try:
        main()
    except SystemExit as end:
        assert end.code == 1
"""
IMPORTS = """
import importlib, traceback
for module in {every!r}:
    print("----", file=sys.stderr)
    try:
        importlib.import_module(module)
    except ImportError:
        traceback.print_exc()
"""


def run(missing, code):
    code = WITHOUT.format(missing=missing, code=code)
    command = [sys.executable, "-W", "ignore", "-c", code]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_an_engine_needs_no_extra():
    done = run(EXTRAS, ENGINE)
    assert done.stdout == "answered\n", done.stderr


@pytest.mark.parametrize("missing", RAG)
def test_an_index_names_its_extra(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingPackageError, match=rf"'{missing}'.*pip install -e \"\.\[rag\]\""):
        CachedRAG.open(tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_embeddings_name_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingPackageError, match=r"embedding texts.*\[rag\]"):
        Embedder().embed(["copper"])


def test_errors_are_the_same_in_another_process():
    missing = MissingPackageError("a plot", "bench", ImportError("no matplotlib"))
    for error in (missing, PMLError("a tag", (2, 3, "a.pml")), BusyError("later", 2.0)):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert vars(again) == vars(error)


def test_a_plot_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"a plot.*\[bench\]"):
        new_figure()


def test_a_package_of_another_version_names_its_extra():
    """Of what it lacks Python says whose it is; what has no name is an error of something else."""
    lacks = pytest.raises(MissingPackageError, match=r"import name 'no_such'.*\[docs\]")
    with lacks, needs_extra("docs", "reading"):
        from json import no_such  # noqa: F401
    with pytest.raises(MissingPackageError), needs_extra("docs", "reading"):
        raise ModuleNotFoundError("said by this library, which knows no module's name")
    for other in (ImportError("a model needs more"), MissingPackageError("a", "b", ImportError())):
        with pytest.raises(ImportError) as raised, needs_extra("docs", "reading"):
            raise other
        assert raised.value is other


def test_a_command_names_its_extra(tmp_path):
    ingest = ["ingest", str(ROOT / "docs"), "--index", str(tmp_path / "index")]
    commands = [
        ("rag", ingest),
        ("ray", [*ingest, "--ray", "local"]),
        ("rag", ["demo", "--index", str(tmp_path / "index")]),
        ("serve", ["serve"]),
        ("bench", ["eval", "--data", "set.jsonl"]),
    ]
    done = run(EXTRAS, COMMANDS.format(every=[arguments for _, arguments in commands]))
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    for (extra, _), said in zip(commands, done.stderr.split("----")[1:], strict=True):
        assert f'pip install -e ".[{extra}]"' in " ".join(said.split())


def test_an_integration_names_its_extra():
    modules = [
        ("langchain_cached_rag", "langchain_core", "langchain"),
        ("ray_cached_rag", "ray", "ray"),
        *(
            (f"llama_index.{part}.cached_rag", "llama_index.core", "llama-index")
            for part in (
                *("llms", "retrievers", "vector_stores"),
                *("response_synthesizers", "postprocessor"),
            )
        ),
    ]
    missing = {package for _, package, _ in modules}
    done = run(missing, IMPORTS.format(every=[module for module, _, _ in modules]))
    for (_, package, extra), said in zip(modules, done.stderr.split("----")[1:], strict=True):
        assert "cached_rag.errors.MissingPackageError: the integration with " in said
        assert package in said.splitlines()[-1]
        assert f'pip install -e ".[{extra}]"' in said.splitlines()[-1]


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
