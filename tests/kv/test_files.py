"""What files suffer from those who share them: prune, delete, eviction, truncation, damage."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNKS, tiny_model
from test_stores import key, module, same

from cached_rag import Engine, StoreConfig
from cached_rag.backends.machine import kept_profile, profile_key, profile_of
from cached_rag.backends.resolve import file_digest
from cached_rag.errors import CorruptBlobError, StoreError
from cached_rag.kv import database, holdings
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.catalog import Catalog, Maker
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.tensor_file import TensorFile
from cached_rag.kv.tiers import MemoryStore, Terms, TieredStore
from cached_rag.library.library import Library
from cached_rag.library.matching import EncodedAfter
from cached_rag.rag.index import DocumentIndex

pytestmark = pytest.mark.slow

KEY = "sixteen or more random characters"


@pytest.fixture
def store(tmp_path):
    with closing(DiskStore(tmp_path)) as made:
        made.put(key(1), module(1))
        yield made


@pytest.fixture
def other(store):
    with closing(DiskStore(store.path)) as made:
        yield made


def the_file(store):
    (path,) = store.path.glob("blobs/*/*.safetensors")
    return path


# Writers, and those who clean up ----------------------------------------------------------------


def test_prune_and_verify_leave_alone_what_others_are_writing(tmp_path):
    done, found = threading.Event(), []

    def clean():
        with closing(DiskStore(tmp_path)) as cleaner:
            while not done.is_set():
                found.extend(cleaner.check())
                cleaner.prune()

    cleaning = threading.Thread(target=clean)
    with closing(DiskStore(tmp_path)) as writer:
        cleaning.start()
        try:
            for seed in range(150):
                writer.put(key(seed % 50), module(seed))
        finally:
            done.set()
            cleaning.join()
        kept = [writer.get(key(s % 50), module(s).token_ids) for s in range(100, 150)]
        assert all(kv is not None for kv in kept)
    assert found == []


def test_a_draft_is_litter_only_when_its_writer_is_dead(store, other):
    with store._drafts.open() as draft:
        draft.write_bytes(b"half of it")
        assert other.check() == []
        assert other.prune() == (0, 0)
        assert draft.exists()
    code = (
        "import os, sys; from pathlib import Path; from cached_rag.kv.disk import DiskStore\n"
        "with DiskStore(sys.argv[1])._drafts.open() as draft:\n"
        "    Path(draft).write_bytes(b'half of it'); os._exit(9)"
    )
    child = [sys.executable, "-W", "ignore", "-c", code, str(store.path)]
    assert subprocess.run(child, check=False).returncode == 9
    (problem,) = other.check()
    assert "litter" in problem.reason
    assert other.prune() == (1, 10)
    assert other.check() == []


def test_prune_drops_rows_without_a_file(store):
    """As a process leaves them that is killed between the two."""
    for seed in (1, 2):
        store.put(key(seed), module(seed))
    (path,) = store.path.glob(f"blobs/*/{key(1)}.*")
    held = store.nbytes
    path.unlink()
    assert "is missing" in store.check()[0].reason
    assert store.prune() == (0, 0)
    assert store.check() == []
    assert store.nbytes == held // 2
    assert store.get(key(2), module(2).token_ids) is not None


@pytest.mark.parametrize("remove", [lambda s: s.delete(key(1)), lambda s: s.prune(0)])
def test_a_file_put_anew_does_not_go_with_the_old_one(store, other, monkeypatch, remove):
    """What another process puts while a file is removed is there, or it is told that it is not."""
    unlink, is_put = Path.unlink, []

    def late(path, **options):
        if not is_put:
            is_put.append(False)
            with suppress(StoreError):
                other.put(key(1), module(5))
                is_put[:] = [True]
        unlink(path, **options)

    monkeypatch.setattr(database, "time", SimpleNamespace(monotonic=count().__next__, sleep=id))
    monkeypatch.setattr(Path, "unlink", late)
    remove(store)
    monkeypatch.undo()
    assert is_put == [store.get(key(1), module(5).token_ids) is not None]
    assert store.check() == []


def test_a_reader_is_not_misled_by_a_file_replaced_while_it_looks(store, other, monkeypatch):
    read, kv = TensorFile.at, module(1)
    latest = [ModuleKV(kv.token_ids, 3, kv.values, kv.keys)]

    def late(*arguments):
        if latest:
            store.put(key(1), latest.pop())
        return read(*arguments)

    monkeypatch.setattr(TensorFile, "at", late)
    assert other.get(key(1), kv.token_ids).start == 3
    assert len(list(store.path.glob("blobs/*/*"))) == 1
    assert store.check() == []


def test_what_is_no_file_of_a_store_is_named_and_left_alone(store, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "precious").write_bytes(b"not litter")
    (store.path / "blobs" / "zz").symlink_to(outside)
    (the_file(store).parent / "folder").mkdir()
    (the_file(store).parent / "link").symlink_to(outside / "precious")
    assert store.prune() == (0, 0)
    assert (outside / "precious").exists()
    assert sorted(problem.key for problem in store.check()) == ["folder", "link", "zz"]


def test_eviction_goes_by_uses_and_not_by_the_clock(store, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    store.put(key(2), module(2))
    store.max_bytes = store.nbytes
    store.put(key(3), module(3))
    assert store.sizes().keys() == {key(2), key(3)}


# Content ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"start":"1"', b'"start":"2"'),
        (b'"dtype":"float32"', b'"dtype":"float64"'),
        (b"[3,2,8,4]", b"[3,4,8,2]"),
    ],
)
def test_the_whole_header_is_signed(store, other, was, now):
    path = the_file(store)
    assert was in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(was, now))
    (problem,) = other.check()
    assert "checksum" in problem.reason
    with pytest.raises(CorruptBlobError, match="checksum"):
        other.open(key(1), module(1).token_ids)


@pytest.mark.parametrize(("mine", "theirs"), [(None, KEY), (KEY, None), (KEY, KEY[::-1] + "x")])
@pytest.mark.parametrize("way", ["get", "open"])
def test_kv_that_is_signed_otherwise_is_kept_and_not_called_damaged(tmp_path, mine, theirs, way):
    kv = module(1)
    with closing(DiskStore(tmp_path, secret=theirs)) as writer:
        writer.put(key(1), kv)
        with closing(DiskStore(tmp_path, secret=mine)) as reader:
            assert key(1) not in reader  # so that it is encoded again
            (problem,) = reader.check()
            assert "signing_key" in problem.reason
            assert "damaged" not in problem.reason
            with pytest.raises(StoreError, match="signing_key") as caught:
                getattr(reader, way)(key(1), kv.token_ids)
            assert not isinstance(caught.value, CorruptBlobError)
        assert same(writer.get(key(1), kv.token_ids), kv)


def test_signed_kv_replaces_unsigned_and_never_the_other_way_round(tmp_path):
    kv = module(1)
    with (
        closing(DiskStore(tmp_path)) as plain,
        closing(DiskStore(tmp_path, secret=KEY)) as signed,
    ):
        plain.put(key(1), kv)
        signed.put(key(1), kv)
        before = the_file(plain)
        with pytest.raises(StoreError, match="Set signing_key"):
            plain.put(key(1), kv)
        tiers = TieredStore([MemoryStore(1 << 20), plain])
        tiers.put(key(1), kv)
        assert same(tiers.get(key(1), kv.token_ids), kv)  # from memory
        tiers.put(key(2), module(2), Terms(lambda: False))
        assert key(2) not in tiers
        tiers.delete(key(2))
        tiers.tiers[0].delete(key(1))
        tiers.put(key(1), kv, Terms(iter([True, False]).__next__))  # forgotten while it is put
        assert key(1) not in tiers
        assert the_file(plain) == before
        assert same(signed.get(key(1), kv.token_ids), kv)
        assert not signed.check()


def test_a_question_without_the_key_leaves_signed_kv_alone(tmp_path, caplog):
    prompt = f"{CHUNKS[0]}\n\nWho?"

    def asked(**signing):
        store = StoreConfig(path=str(tmp_path), sequence_disk_bytes=0, **signing)
        with Engine(tiny_model("llama"), store=store) as engine:
            engine.encode(CHUNKS[:1])
            return [engine.generate(prompt, max_tokens=2).report.cached_tokens for _ in range(2)]

    def files():
        return {path.name for path in tmp_path.glob("blobs/*/*.safetensors")}

    first = asked(signing_key=KEY)
    kept = files()
    with caplog.at_level(logging.WARNING):
        asked()
    assert kept <= files()
    assert caplog.text.count("is signed, and there is no signing_key") == 1
    assert asked(signing_key=KEY) == first


@contextmanager
def no_descriptors_left():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("way", ["get", "open"])
def test_running_out_of_descriptors_is_no_damage(store, way):
    with no_descriptors_left(), pytest.raises(StoreError, match="cannot be read now") as caught:
        getattr(store, way)(key(1), module(1).token_ids)
    assert not isinstance(caught.value, CorruptBlobError)
    assert same(store.get(key(1), module(1).token_ids), module(1))


def test_running_out_of_descriptors_is_a_miss_for_a_question(tmp_path, caplog):
    library = Library(StoreConfig(path=str(tmp_path), memory_bytes=1), Maker("model"))
    behind, ids = EncodedAfter(()), module(1).token_ids
    library.put(behind, module(1))
    with no_descriptors_left(), caplog.at_level(logging.WARNING):
        assert library.shelf.fetch(behind, ids) is None
        assert library.shelf.best_encoding([behind], ids, lazy=True) is None
    assert caplog.text.count("cannot be read now") == 1
    assert same(library.shelf.fetch(behind, ids), module(1))
    library.close()


def _reads_what_is_cut_short(path, codec):
    store = DiskStore(path, codec=codec)
    tiers = TieredStore([MemoryStore(1 << 30), store])
    kv = tiers.get(key(1), module(1, 4096).token_ids)
    source = store.open(key(1), kv.token_ids)
    os.truncate(the_file(store), 0)
    assert torch.isfinite(kv.keys).all()
    assert torch.isfinite(tiers.get(key(1), kv.token_ids).values).all()
    with pytest.raises(CorruptBlobError, match="cut short"):
        source.layer(2)
    store.close()


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_file_that_is_cut_short_kills_nobody(tmp_path, codec):
    with closing(DiskStore(tmp_path, codec=codec)) as store:
        store.put(key(1), module(1, 4096))
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_reads_what_is_cut_short, args=(tmp_path, codec))
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("length", range(0, 400, 7))
def test_however_short_a_file_is_it_is_damaged(store, length):
    os.truncate(the_file(store), length)
    with pytest.raises(CorruptBlobError):
        store.open(key(1), module(1).token_ids)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"keys": 1}',
        b'{"keys": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}',
        b'{"keys": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"keys": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"__metadata__": 5}',
        b"\xff\xfe",
    ],
)
def test_a_hostile_header_is_damage(store, header):
    the_file(store).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CorruptBlobError, match="dropped"):
        store.get(key(1), module(1).token_ids)


def test_nobody_else_may_read_what_is_kept(tmp_path):
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        with closing(DiskStore(tmp_path)) as store:
            store.put(key(1), module(1))
            modes = {p: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_file()}
    finally:
        os.umask(before)
    assert len(modes) == 5  # the index, its log and shared memory, the lock, the module
    assert set(modes.values()) == {0o600}


def test_folders_are_made_for_their_owner_alone_and_those_above_them_too(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "far" / "cache"))
    before = os.umask(0)
    try:
        with closing(DiskStore(tmp_path / "index" / "part" / "kv")) as store:
            store.put(key(1), module(1))
        with closing(DocumentIndex(tmp_path / "other" / "deep" / "documents.sqlite")):
            pass
        the_weights = tmp_path / "weights"
        the_weights.write_bytes(b"w")
        file_digest(the_weights)
        profile_of(tiny_model("llama"), fresh=True)
    finally:
        os.umask(before)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_dir()}
    assert len(modes) == 12
    assert set(modes.values()) == {0o700}


# Folders that may not be searched ----------------------------------------------------------------


@contextmanager
def locked(folder):
    """A folder that this thread may not search, though it be root's, who has two rights for it."""
    version, rights = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    libc.capget(version, rights)
    before, rights[0] = rights[0], rights[0] & ~0b110
    folder.chmod(0)
    libc.capset(version, rights)
    try:
        yield
    finally:
        rights[0] = before
        libc.capset(version, rights)
        folder.chmod(0o700)


LOOKS = {
    "contains": lambda store: key(1) in store,
    "delete": lambda store: store.delete(key(1)),
    "prune": lambda store: store.prune(),
    "forget": lambda store: holdings.forget(store.path, ["a text"]),
    "makers": lambda store: holdings.makers(store.path),
    "strays": lambda store: holdings.strays(store.path),
}


@pytest.mark.parametrize(
    ("place", "look"),
    [
        *product(["", "blobs", f"blobs/{key(1)[:2]}"], ["contains", "delete", "prune"]),
        *product([""], ["forget", "makers", "strays"]),
    ],
)
def test_what_cannot_be_looked_at_is_not_taken_for_gone(store, place, look):
    Catalog(store.path / holdings.CATALOG, "model").close()
    with locked(store.path / place), pytest.raises(StoreError, match="allow this user"):
        LOOKS[look](store)
    assert same(store.get(key(1), module(1).token_ids), module(1))
    assert store.check() == []


# What is no file ---------------------------------------------------------------------------------


def _socket(path):
    with socket.socket(socket.AF_UNIX) as made, _inside(path.parent):
        made.bind(path.name)  # such a path may have 100 characters only


@contextmanager
def _inside(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


NO_FILES = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a link": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
@pytest.mark.parametrize("way", ["get", "open"])
def test_what_is_no_file_is_damage_and_can_be_replaced(store, make, way):
    path = the_file(store)
    path.unlink()
    make(path)
    with pytest.raises(CorruptBlobError, match="no regular file"):
        getattr(store, way)(key(1), module(1).token_ids)
    assert store.get(key(1), module(1).token_ids) is None
    store.put(key(1), module(1))
    assert same(store.get(key(1), module(1).token_ids), module(1))


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_a_question_goes_on_where_kv_is_no_file(tmp_path, make):
    settings = StoreConfig(path=str(tmp_path), sequence_bytes=0)
    with Engine(tiny_model("llama"), settings) as engine:
        engine.encode(CHUNKS, context=None)
    for path in list(tmp_path.glob("blobs/*/*.safetensors")):
        path.unlink()
        make(path)
    with Engine(tiny_model("llama"), settings) as engine:
        engine.register(CHUNKS)
        report = engine.generate(f"{CHUNKS[0]} Why?", method="reuse", max_tokens=1).report
        assert report.modules_hit == 0


@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, NO_FILES["a link"]])
def test_a_database_that_is_no_file_is_named_and_not_waited_for(tmp_path, make, suffix):
    make(tmp_path / f"index.sqlite{suffix}")
    with pytest.raises(StoreError, match=rf"index.sqlite{suffix} is no file; remove it"):
        DiskStore(tmp_path)


def test_a_profile_that_is_a_pipe_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path))
    model = tiny_model("llama")
    profile_of(model, fresh=True)
    (path,) = tmp_path.glob("profiles/*.json")
    path.unlink()
    os.mkfifo(path)
    assert kept_profile(profile_key(model)) is None
    profile_of(model)
    assert path.is_file()
