"""A disk that is full: `store prune` makes the room that it needs itself."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import pytest
from conftest import CHUNKS, tiny_model
from indexes import WordEmbedding
from typer.testing import CliRunner

from cached_rag import CachedRAG, Engine, StoreConfig
from cached_rag.cli.main import app
from cached_rag.errors import StoreError, StoreFullError
from cached_rag.kv.database import Database
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.holdings import Removals


@pytest.fixture
def index(tmp_path):
    path = tmp_path / "index"
    engine = Engine(tiny_model("llama"), StoreConfig(path=str(path / "kv")))
    with engine, CachedRAG.open(path, engine=engine, embedding=WordEmbedding()) as rag:
        rag.add_texts(dict(zip("abc", CHUNKS, strict=True)), progress=False)
    return path


@pytest.fixture
def full(index, monkeypatch):
    """A disk where no database can be written until a file of KV is gone."""
    doom, files = Removals.doom, num_files(index)

    def doomed(self, *given):
        if num_files(index) == files:
            raise StoreFullError("no room")
        doom(self, *given)

    monkeypatch.setattr(Removals, "doom", doomed)


def num_files(index):
    return len(list((index / "kv" / "blobs").glob("*/*.safetensors")))


def prune(index, *options):
    arguments = ["store", "prune", "--index", str(index), "--json", *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return json.loads(result.stdout)


@pytest.mark.parametrize("options", [(), ("--max-bytes", str(1 << 30)), ("--max-bytes", "0")])
def test_prune_makes_room_before_it_writes(index, full, options):
    files, nbytes = num_files(index), sum(f.stat().st_size for f in (index / "kv").rglob("*.saf*"))
    pruned = prune(index, *options)
    assert (pruned["files"], pruned["bytes"]) == (files, nbytes)  # all are less than it needs
    assert num_files(index) == 0


def test_prune_takes_no_more_than_it_needs(index, full, monkeypatch):
    monkeypatch.setattr("cached_rag.cli.store._ROOM", 1 - 2 * sizes(index))
    files = num_files(index)
    assert prune(index)["files"] == 1
    assert num_files(index) == files - 1


def sizes(index):
    return sum(p.stat().st_size for p in (index / "documents.sqlite", index / "kv/catalog.sqlite"))


def test_prune_makes_room_where_no_database_can_even_be_opened(index, monkeypatch):
    files, connect = num_files(index), Database._connect

    def full(self):
        if num_files(index) == files:
            raise sqlite3.OperationalError("disk I/O error")
        connect(self)

    monkeypatch.setattr("cached_rag.cli.store._ROOM", 1)
    monkeypatch.setattr(Database, "_connect", full)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    with pytest.raises(StoreError, match="look after the disk"):
        prune(index)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    assert prune(index)["files"] == 1
    assert num_files(index) == files - 1
    with closing(DiskStore(index / "kv")) as store:
        assert store.check() == []


def test_where_nothing_may_go_prune_says_that_the_disk_is_full(index, full, monkeypatch):
    monkeypatch.setattr(DiskStore, "prune", lambda *_: (0, 0))
    with pytest.raises(StoreFullError):
        prune(index)
