"""Imports point one way, the core knows no framework, and the public names are there."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cached_rag
from cached_rag import spi

ROOT = Path(cached_rag.__file__).parent
# From the ground up; a package may import those before it.
FLOORS = (
    *("errors", "options", "methods", "grammar", "config"),
    *("kv", "backends", "library", "engine"),
    *("pml", "rag", "frameworks", "server", "evaluation", "cli", "spi"),
)
PUBLIC = ("cached_rag", "cached_rag.errors", "cached_rag.pml", "cached_rag.spi")
FRAMEWORKS = (
    *("langchain_core", "langchain", "llama_index", "langchain_cached_rag"),
    *("ray", "ray_cached_rag"),
    *("vllm", "vllm_cached_rag"),
    "docs",
)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names
            if not names <= FILES.keys():  # else they are modules, and nothing of the package's own
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def named(folder, above):
    paths = [path for path in folder.rglob("*.py") if path != ROOT / "__init__.py"]
    names = [".".join(path.relative_to(above).with_suffix("").parts) for path in paths]
    return {name.removesuffix(".__init__"): p for name, p in zip(names, paths, strict=True)}


def arrows_between(files):
    return {n: {i for i in imported(p) if i in files and i != n} for n, p in files.items()}


FILES = named(ROOT, ROOT.parent)
INTEGRATIONS = named(ROOT.parent / "integrations", ROOT.parent / "integrations")


def test_imports_point_downward_and_not_in_circles():
    arrows = arrows_between(FILES)
    for name, found in arrows.items():
        for other in found:
            floors = [module.split(".")[1] for module in (other, name)]
            assert FLOORS.index(floors[0]) <= FLOORS.index(floors[1]), f"{name} imports {other}"
    TopologicalSorter(arrows).prepare()  # raises CycleError
    TopologicalSorter(arrows_between(INTEGRATIONS)).prepare()


def test_the_core_knows_no_framework():
    found = {name.split(".")[0] for path in FILES.values() for name in imported(path)}
    assert found.isdisjoint(FRAMEWORKS)


def test_a_core_import_loads_no_framework_and_does_nothing():
    code = (
        "import sys, cached_rag; assert 'torch' not in sys.modules; cached_rag.CachedRAG;"
        f"assert not [m for m in {FRAMEWORKS!r} if m in sys.modules]"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.parametrize("named", [cached_rag, spi])
def test_every_public_name_is_there(named):
    for name in named.__all__:
        assert getattr(named, name) is not None
    with pytest.raises(AttributeError):
        named.nothing  # noqa: B018


@pytest.mark.parametrize("named", [cached_rag, spi])
def test_every_public_name_is_the_one_that_type_checkers_see(named):
    (checked,) = (n for n in ast.parse(Path(named.__file__).read_text()).body if type(n) is ast.If)
    seen = {}
    for node in checked.body:
        module = importlib.import_module(node.module)
        seen |= {alias.name: getattr(module, alias.name) for alias in node.names}
    assert seen.keys() == set(named.__all__)
    assert [name for name, one in seen.items() if getattr(named, name) is not one] == []


def test_users_have_few_names_and_none_is_another_s():
    assert len(cached_rag.__all__) <= 26
    assert set(cached_rag.__all__).isdisjoint(spi.__all__)


def test_integrations_use_public_names_only():
    for path in INTEGRATIONS.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cached_rag"):
                assert node.module in PUBLIC
                module = importlib.import_module(node.module)
                public = set(getattr(module, "__all__", vars(module)))
                assert {alias.name for alias in node.names} <= public | {"spi"}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "spi":
                assert node.attr in spi.__all__


# What SQLite has only from 3.35 on; RHEL 9 and Debian 11 have 3.34.
NEWER_SQL = re.compile(r"\bRETURNING\b|\bON CONFLICT DO UPDATE\b|\bDROP COLUMN\b|\bMATERIALIZED\b")


def newer_sql(text):
    strings = (n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant))
    return [one for one in strings if isinstance(one, str) and NEWER_SQL.search(one)]


def test_statements_are_those_of_the_sqlite_that_old_systems_have():
    assert newer_sql('rows(f"DELETE FROM {table} RETURNING key")') != []  # control
    for path in [*FILES.values(), *INTEGRATIONS.values()]:
        assert newer_sql(path.read_text()) == []


def test_a_class_variable_says_its_type_without_which_pydantic_takes_it_for_a_field():
    """With Python 3.10, that is, for a model's private attribute; what a subclass says is lost."""
    for name, path in (FILES | INTEGRATIONS).items():
        assert not re.search(r": ClassVar\b(?!\[)", path.read_text()), name


# What runs or builds whatever it is given. `program.py` runs the user's own prompt functions.
UNSAFE = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("torch.load", "joblib.load", "shelve.open", "yaml.load", "yaml.unsafe_load", "dill.loads"),
}
ALLOWED = {("cached_rag.pml.program", "exec"), ("cached_rag.pml.program", "compile")}


def calls(tree):
    """(name, keywords) of each call, by the names that the file gives to what it imports."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            known |= {a.asname: a.name for a in node.names if a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, _, rest = ast.unparse(node.func).partition(".")
            name = f"{known.get(head, head)}.{rest}".removesuffix(".")
            yield name, {word.arg: ast.unparse(word.value) for word in node.keywords}


def unsafe(tree):
    wrong = {"shell": "True", "trust_remote_code": "True", "allow_pickle": "True"}
    for name, words in calls(tree):
        if name in UNSAFE or any(words.get(word) == value for word, value in wrong.items()):
            yield name


def test_nothing_runs_or_unpickles_what_it_is_given():
    files = FILES | INTEGRATIONS
    found = {(n, call) for n, p in files.items() for call in unsafe(ast.parse(p.read_text()))}
    assert found <= ALLOWED
    for line in (  # control: such calls are seen
        "import pickle as p; p.loads(x)",
        "from os import system as run; run(x)",
        "import numpy as np; np.load(x, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "eval(x)",
    ):
        assert list(unsafe(ast.parse(line)))


def test_help_and_list_load_no_pytorch_and_opening_an_index_no_model_library(tmp_path):
    code = f"""
import sys
from pathlib import Path
from cached_rag.cli.main import app
from cached_rag.rag.index import DocumentIndex
index = Path({str(tmp_path)!r})
DocumentIndex(index / "documents.sqlite").close()
for command in (["--help"], ["serve", "--help"], ["list", "--index", str(index)]):
    app(command, standalone_mode=False)
libraries = {{"torch", "transformers", "sentence_transformers", "faiss"}}
assert not libraries & set(sys.modules), command
from cached_rag import CachedRAG
CachedRAG.open(index).close()
assert not libraries - {{"torch"}} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, stdout=subprocess.DEVNULL
    )


def test_the_process_that_reads_documents_loads_no_model_library():
    code = (
        "import sys, cached_rag.rag.reading_process;"
        "assert not {'torch', 'numpy', 'transformers', 'faiss'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
