"""Databases that are damaged, in use, read-only, or of an earlier version."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import stat
import subprocess
import threading
from contextlib import closing, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from test_catalog import record
from test_stores import key, module, same

from cached_rag import CachedRAGError, StoreConfig
from cached_rag.errors import CorruptBlobError, StoreError
from cached_rag.kv import database
from cached_rag.kv.catalog import Catalog, ChunkRecord, Maker, pack
from cached_rag.kv.database import LAYOUT, Database
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.holdings import Removals
from cached_rag.library.library import Library
from cached_rag.library.matching import EncodedAfter
from cached_rag.rag.chunks import Chunk
from cached_rag.rag.index import DocumentIndex

pytestmark = pytest.mark.slow

BEHIND, IDS = EncodedAfter((7, 8)), module(1).token_ids


def opened(path):
    """With no room in memory, so that all comes from the disk."""
    config = StoreConfig(path=str(path), memory_bytes=1)
    return Library(config, Maker("model", "name", "float32"))


@pytest.fixture
def folder(tmp_path):
    """A store with a module, in two databases."""
    library = opened(tmp_path)
    library.put(BEHIND, module(1))
    library.add_encoded_after(BEHIND)
    library.add_chunks([record(1), record(2)])
    library.close()
    return tmp_path


VECTORS = np.eye(3, 4, dtype=np.float32)


def put_document(index):
    chunks = [Chunk("a.txt", "A title", n, f"A title\n\nchunk {n} says so") for n in range(3)]
    index.replace("a.txt", "digest", chunks, VECTORS, {"model": "m"})


@pytest.fixture
def documents(tmp_path):
    with closing(DocumentIndex(tmp_path / "documents.sqlite")) as index:
        put_document(index)
    return tmp_path / "documents.sqlite"


def change(path, *statements):
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def damages(path, step):
    """The file again and again, each time with another byte changed."""
    content = path.read_bytes()
    for at in range(0, len(content), step):
        for mask in (255, 4):
            changed = bytearray(content)
            changed[at] ^= mask
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            path.write_bytes(changed)
            yield at


# Damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["index.sqlite", "catalog.sqlite"])
def test_no_damage_to_the_cache_stops_a_question(folder, name, caplog):
    for _ in damages(folder / name, 307):
        library = opened_with_memory(folder)
        library.refresh(force=True)
        library.encoded_after()
        library.shelf.holds(BEHIND, IDS)
        library.other_makers([record(1)])
        library.register([record(3)])
        found = library.shelf.fetch(BEHIND, IDS)
        assert found is None or same(found, module(1))
        library.close()


def test_no_damage_to_documents_is_a_raw_error_or_another_text(documents):
    texts = {f"A title\n\nchunk {n} says so" for n in range(3)}
    stopped = 0
    for _ in damages(documents, 157):
        try:
            with closing(DocumentIndex(documents)) as index:
                index.settings(), index.roots.sources(), index.documents(), index.roots.all()
                index.count(), index.pending(), index.digest("a.txt"), index.check()
                for found in (index.texts("a.txt"), [h.text for h in index.search(VECTORS[0], 3)]):
                    assert set(found) <= texts
        except StoreError:
            stopped += 1
    assert stopped


@pytest.mark.parametrize("name", ["index.sqlite", "catalog.sqlite"])
def test_a_cache_that_cannot_be_opened_is_none_and_that_is_said_once(folder, name, caplog):
    (folder / name).write_bytes(b"no database" * 1000)
    with caplog.at_level(logging.WARNING):
        library = opened_with_memory(folder)
        for _ in range(3):
            library.refresh()
            assert library.shelf.fetch(BEHIND, IDS) is None
            library.register([record(3)])
    assert caplog.text.count("not a usable index") == 1
    with pytest.raises(StoreError, match="not a usable index"):
        library.check_kept()  # as `encode` does
    with pytest.raises(StoreError, match="not a usable index"):
        library.remove([record(1)])
    library.close()


def opened_with_memory(path):
    return Library(StoreConfig(path=str(path)), Maker("model", "name", "float32"))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE chunks SET text = replace(text, 'says', 'said') WHERE ordinal = 1",
        "UPDATE chunks SET text = CAST(X'FFFE41' AS TEXT) WHERE ordinal = 1",
        "UPDATE chunks SET text = NULL WHERE ordinal = 1",
        "UPDATE chunks SET vector = X'00' WHERE ordinal = 1",
        "UPDATE chunks SET ordinal = 'x' WHERE ordinal = 1",
    ],
)
def test_a_damaged_chunk_is_left_out_named_and_restored(documents, damage, caplog):
    change(
        documents,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql ="
        " replace(sql, 'text TEXT NOT NULL', 'text TEXT') WHERE name = 'chunks'",
    )
    change(documents, damage)
    with closing(DocumentIndex(documents)) as index, caplog.at_level(logging.WARNING):
        served = {hit.ordinal for hit in index.search(VECTORS.sum(0), 3)}
        assert served == {0, 2}
        assert len(index.texts("a.txt")) == 2
        assert "ingest the documents again" in caplog.text
        assert any("damaged" in problem.reason for problem in index.check())
        assert not index.digest("a.txt")
        put_document(index)
        assert len(index.search(VECTORS.sum(0), 3)) == 3
        assert index.check() == []
        assert index.digest("a.txt")


def test_damaged_titles_are_noticed(documents):
    change(documents, "UPDATE documents SET title = 'Another'")
    with closing(DocumentIndex(documents)) as index:
        assert index.search(VECTORS[0], 3) == []


@pytest.mark.parametrize("is_read_only", [False, True])
@pytest.mark.parametrize("layout", [0, LAYOUT + 1])
def test_what_another_version_made_is_left_alone_and_said(
    documents, monkeypatch, layout, is_read_only
):
    change(documents, f"PRAGMA user_version = {layout}")
    before = documents.read_bytes()
    if is_read_only:
        monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(StoreError, match=r"made by another version.*delete it and ingest again"):
        DocumentIndex(documents)
    assert documents.read_bytes() == before


def test_damaged_tokens_are_left_out_named_and_restored(folder, caplog):
    path = folder / "catalog.sqlite"
    change(
        path,
        "UPDATE modules SET token_ids = zeroblob(8) WHERE text_digest = 'digest 1'",
        "UPDATE encodings SET token_ids = 'text'",
    )
    with closing(Catalog(path, "model")) as catalog, caplog.at_level(logging.WARNING):
        assert [r for _, r in catalog.modules()] == catalog.find(["digest 1", "digest 2"])
        assert catalog.find(["digest 1", "digest 2"]) == [record(2)]
        assert catalog.prefixes() == []
        assert "damaged" in caplog.text
        assert len(catalog.check()) == 2
        catalog.add_chunks([record(1)])
        catalog.add_prefix((7, 8))
        assert catalog.find(["digest 1"]) == [record(1)]
        assert catalog.prefixes() == [((7, 8), "")]
        assert catalog.check() == []


@pytest.mark.parametrize("damaged", ["'text'", "7", "x'0102030405'"])
def test_damaged_tokens_without_a_checksum_are_left_out_and_said(folder, damaged, caplog):
    columns = f"'model', '', 'd', {damaged}"
    change(folder / "catalog.sqlite", f"INSERT INTO doomed VALUES (1, {columns}, '')")
    change(folder / "catalog.sqlite", f"INSERT INTO others VALUES ({columns}, 'c')")
    with closing(opened(folder)) as library, caplog.at_level(logging.WARNING):
        assert library.shelf.fetch(BEHIND, IDS) is not None
        assert "damaged and left out" in caplog.text
        assert len([*library._catalog.keys()]) > 4
    caplog.clear()
    opened(folder).close()
    assert not caplog.text  # what had to go is done with


# Others, and rights -----------------------------------------------------------------------------


@pytest.fixture
def stuck(folder):
    """A process that began to write both databases and never ends."""
    connections = [sqlite3.connect(folder / n) for n in ("index.sqlite", "catalog.sqlite")]
    library = opened(folder)
    for connection in connections:
        connection.execute("BEGIN IMMEDIATE")
    yield library
    for connection in connections:
        connection.close()
    library.close()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that were waited; nobody really waits."""
    waited = [0.0]
    time = SimpleNamespace(
        monotonic=lambda: waited[0], sleep=lambda s: waited.append(waited.pop() + s)
    )
    monkeypatch.setattr(database, "time", time)
    return waited


def test_a_question_does_not_wait_for_a_stuck_writer(stuck, clock, caplog):
    stuck.refresh(force=True)
    for _ in range(60):
        assert same(stuck.shelf.fetch(BEHIND, IDS), module(1))
    assert clock == [0.0]
    for _ in range(10):
        stuck.shelf.fetch(BEHIND, IDS)
    stuck.register([record(3)])
    assert clock[0] < 1


class Interrupted(sqlite3.Connection):
    """Ctrl-C comes when the first transaction is just begun."""

    is_over = False

    def execute(self, *asked):
        found = super().execute(*asked)
        if asked[0].startswith("BEGIN") and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return found


def test_a_transaction_that_is_interrupted_when_it_begins_leaves_none_open(tmp_path):
    own = Database(tmp_path / "x.sqlite", "CREATE TABLE IF NOT EXISTS t (x)")
    own._connection = sqlite3.connect(own.path, check_same_thread=False, factory=Interrupted)
    with pytest.raises(KeyboardInterrupt), own.transaction():
        pass
    with own.transaction() as connection:
        connection.execute("INSERT INTO t VALUES (1)")
    assert own.rows("SELECT x FROM t") == [(1,)]
    own.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_what_a_forked_child_writes_is_not_lost_when_its_parent_has_closed(tmp_path):
    path, (ready, go) = tmp_path / "x.sqlite", os.pipe()
    own = Database(path, "CREATE TABLE IF NOT EXISTS t (x)")
    child = os.fork()
    if not child:
        with suppress(BaseException):  # nothing may leave this process
            os.read(ready, 1)
            with own.transaction() as connection:
                connection.execute("INSERT INTO t VALUES (1)")
            os._exit(7 if own.rows("SELECT * FROM t") == [(1,)] else 1)
        os._exit(1)
    own.close()  # the last one that uses the file, as far as SQLite knows
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with closing(Database(path, "")) as later:
        assert later.rows("SELECT * FROM t") == [(1,)]


def test_who_waits_for_another_process_holds_up_nobody_here(tmp_path, monkeypatch):
    path, is_waiting, may_go, errors = (
        tmp_path / "d.sqlite",
        threading.Event(),
        threading.Event(),
        [],
    )
    monkeypatch.setattr(database.time, "sleep", lambda _: is_waiting.set() or may_go.wait(20))

    def write():
        try:
            with shared.transaction() as connection:
                connection.execute("INSERT INTO t VALUES (1)")
        except BaseException as error:
            errors.append(error)

    with closing(Database(path, "CREATE TABLE IF NOT EXISTS t (a);")) as shared:
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            writing = threading.Thread(target=write)
            writing.start()
            assert is_waiting.wait(20)
            assert shared.rows("SELECT * FROM t") == []
            other.rollback()
        may_go.set()
        writing.join()
        assert errors == []
        assert shared.rows("SELECT * FROM t") == [(1,)]


def test_a_read_only_store_serves_and_is_not_touched(folder, documents, monkeypatch, caplog):
    def content():
        return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    access = os.access
    monkeypatch.setattr(database.os, "access", lambda p, mode: mode != os.W_OK and access(p, mode))
    before = content()
    library = opened(folder)
    with caplog.at_level(logging.WARNING):
        for _ in range(70):
            assert same(library.shelf.fetch(BEHIND, IDS), module(1))
            library.register([record(3)])
    assert caplog.text.count("cannot be written") == 1
    assert "delete" not in caplog.text
    assert library.encoded_after() == [BEHIND]
    with pytest.raises(StoreError, match="cannot be written"):
        library.put(BEHIND, module(1))
    assert library.shelf.disk.check() == []
    library.close()
    with closing(DocumentIndex(documents)) as index:
        assert len(index.search(VECTORS[0], 3)) == 3
        with pytest.raises(StoreError, match="cannot be written"):
            index.delete("a.txt")
    changed = {p.name for p, data in content().items() if before.get(p) != data}
    assert changed <= {"drafts.lock"}


def test_a_reader_that_may_not_read_for_a_while_goes_on_when_it_may(tmp_path, monkeypatch):
    path, connect = tmp_path / "t.sqlite", sqlite3.connect
    schema = "CREATE TABLE IF NOT EXISTS t (n)"
    Database(path, schema).close()
    with monkeypatch.context() as reader:
        reader.setattr(database.os, "access", lambda *_: False)
        shared = Database(path, schema)

    def forbidden(*_, **__):
        raise sqlite3.OperationalError("unable to open database file")

    with closing(shared), closing(connect(path)) as owner:
        assert shared.rows("SELECT * FROM t") == []
        owner.execute("INSERT INTO t VALUES (1)")  # makes a log
        owner.commit()
        monkeypatch.setattr(sqlite3, "connect", forbidden)
        for _ in range(2):
            with pytest.raises(StoreError, match="allow this user"):
                shared.rows("SELECT * FROM t")
        monkeypatch.setattr(sqlite3, "connect", connect)
        assert shared.rows("SELECT * FROM t") == [(1,)]
        owner.close()  # and the log goes with the last who has it
        assert shared.rows("SELECT * FROM t") == [(1,)]


def test_a_folder_that_cannot_be_written_is_said_to_be_so(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be written") as caught:
        DiskStore(tmp_path / "file" / "kv")
    assert "delete" not in str(caught.value)
    assert isinstance(caught.value, CachedRAGError)


def test_nobody_else_may_read_a_database(tmp_path):
    tmp_path.chmod(0o755)
    path = tmp_path / "documents.sqlite"
    before = os.umask(0)
    try:
        with closing(DocumentIndex(path)) as index:
            put_document(index)
            made = [p for p in tmp_path.iterdir() if p.is_file()]
            assert len(made) == 3
            assert {stat.S_IMODE(p.stat().st_mode) for p in made} == {0o600}
        path.chmod(0o644)  # as earlier versions left it
        with closing(DocumentIndex(path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_damage_in_one_codec_leaves_the_other(tmp_path):
    with closing(DiskStore(tmp_path)) as raw, closing(DiskStore(tmp_path, "int8")) as small:
        raw.put(key(1), module(1))
        (file,) = (tmp_path / "blobs").rglob("*.safetensors")
        small.put(key(1), module(1))
        file.write_bytes(b"damaged")
        with pytest.raises(CorruptBlobError):
            raw.get(key(1), IDS)
        assert key(1) not in raw
        assert key(1) in small
        assert small.check() == []
        assert small.delete(key(1))


@pytest.mark.parametrize("compacts", [True, False])
def test_nothing_of_deleted_rows_is_left_where_they_once_were(tmp_path, monkeypatch, compacts):
    """SQLite moves rows between pages, and overwrites only where they were in the end."""
    if not compacts:
        monkeypatch.setattr(Database, "compact", lambda _: None)
    schema = "CREATE TABLE t (text TEXT PRIMARY KEY)"
    found, chance = 0, random.Random(0)
    with closing(Database(tmp_path / "a.sqlite", schema)) as made:
        for number in range(500):
            mark = f"mark {number} "
            with made.transaction() as connection:
                connection.execute(
                    "INSERT INTO t VALUES (?)", (chance.choice("0123456789abcdef") + mark * 90,)
                )
            with made.transaction() as connection:
                for _ in range(8):  # pages are divided
                    text = chance.randbytes(chance.randrange(50, 900)).hex()
                    connection.execute("INSERT INTO t VALUES (?)", (text,))
            with made.transaction() as connection:  # and joined
                others = "SELECT text FROM t WHERE text NOT LIKE '%mark%' ORDER BY text"
                gone = [row for row in connection.execute(others) if chance.random() < 0.6]
                connection.executemany("DELETE FROM t WHERE text = ?", gone)
            with made.transaction() as connection:
                connection.execute("DELETE FROM t WHERE text LIKE ?", (f"%{mark}%",))
            made.scrub()
            found += mark.encode() in subprocess.check_output(["cat", tmp_path / "a.sqlite"])
    assert (found == 0) == compacts


def test_who_may_only_read_sees_what_the_owner_writes(tmp_path, monkeypatch):
    def text(number):
        return ChunkRecord(f"d{number}", "anchor", 40, pack(range(500)), pack(range(500)))

    def owner():
        return closing(Catalog(tmp_path / "catalog.sqlite", "model"))

    with owner() as catalog:
        catalog.add_chunks([text(number) for number in range(500)])
    with monkeypatch.context() as patched:
        patched.setattr(database.os, "access", lambda _, mode: mode != os.W_OK)
        reader = Catalog(tmp_path / "catalog.sqlite", "model")
    with closing(reader):
        assert len(reader.text_digests()) == 500
        before = reader.database.version()
        with owner() as catalog:
            catalog.add_chunks([text(500)])
            assert reader.database.version() != before  # the owner has a log now
            before = reader.database.version()
            assert len(reader.text_digests()) == 501
        with owner() as catalog:
            Removals(catalog, lambda _: True).remove({f"d{number}" for number in range(490)})
        assert reader.database.version() != before
        assert len(list(reader.modules())) == 11
        with pytest.raises(StoreError, match="read-only for this user"):
            reader.add_chunks([text(1)])
