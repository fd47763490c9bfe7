"""Imports point one way, the core knows no framework, and the public names are there."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import cached_rag

ROOT = Path(cached_rag.__file__).parent
# A module may import what stands before it.
ORDER = (
    *(
        "errors",
        "model_thread",
        "selectors",
        "config",
        "fingerprint",
        "kv",
        "relocate",
        "assemble",
        "loading",
        "resolve",
        "gguf",
        "memory",
    ),
    *(
        "matmul_attention",
        "attention",
        "alibi",
        "observe",
        "drift",
        "row_cache",
        "row_pass",
        "store",
        "fuse",
        "full_precision",
        "recording",
        "inspection",
        "probe",
        "model",
        "reach",
        "controls",
        "prompt",
        "match",
    ),
    *(
        "context",
        "library",
        "plan",
        "encode",
        "encoder",
        "decode",
        "lse_attention",
        "relay",
        "row_kv",
        "slab",
        "batch_step",
    ),
    *("report", "answering", "live", "sequences"),
    *("write_back", "heads", "leftovers", "profile", "controller", "pml", "planner", "prefiller"),
    *("request", "running", "scheduler", "stream", "engine"),
    *(
        "documents",
        "prompts",
        "answer",
        "progress",
        "ingest",
        "settings",
        "rag",
        "serving",
        "examples",
        "plotting",
        "benchmarks",
        "evaluation",
        "doctor",
        "demo",
    ),
    *("terminal", "cli_documents", "cli_store", "cli_schema", "cli_eval", "cli_bench", "cli_serve"),
    "cli",
)
PUBLIC = ("cached_rag", "cached_rag.benchmarks", "cached_rag.evaluation", "cached_rag.pml")
FRAMEWORKS = ("langchain_core", "langchain", "llama_index", "langchain_cached_rag")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def part(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_upward(path):
    if path == ROOT / "__init__.py":
        return
    own = part(path)
    assert own in ORDER
    for name in imported(path):
        assert name.split(".")[0] not in FRAMEWORKS
        pieces = name.split(".")
        if pieces[0] == "cached_rag" and len(pieces) > 1 and pieces[1] in ORDER:
            assert ORDER.index(pieces[1]) <= ORDER.index(own), f"{own} imports {pieces[1]}"


def test_a_core_import_loads_no_framework_and_does_nothing():
    code = (
        "import sys, cached_rag; assert 'torch' not in sys.modules; cached_rag.CachedRAG;"
        f"assert not [m for m in {FRAMEWORKS!r} if m in sys.modules]"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_every_public_name_is_there():
    for name in cached_rag.__all__:
        assert getattr(cached_rag, name) is not None
    with pytest.raises(AttributeError):
        cached_rag.nothing  # noqa: B018


def test_integrations_use_public_names_only():
    for path in (ROOT.parent / "integrations").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cached_rag"):
                assert node.module in PUBLIC
                public = set(importlib.import_module(node.module).__all__)
                assert {alias.name for alias in node.names} <= public
