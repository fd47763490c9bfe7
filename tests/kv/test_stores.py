"""One contract for all stores; then what only files can suffer."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from cached_rag import StoreConfig
from cached_rag.errors import CorruptBlobError, StoreError, StoreFullError
from cached_rag.kv import blob
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.database import Database
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.fingerprint import ids_digest
from cached_rag.kv.tiers import MemoryStore, Prefetcher, TieredStore
from cached_rag.library.shelf import memory_tiers

TOKENS = 8


def module(seed: int, tokens: int = TOKENS) -> ModuleKV:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(3, 2, tokens, 4, generator=generator) for _ in range(2))
    return ModuleKV(tuple(range(seed, seed + tokens)), seed, keys, values)


def key(seed: int) -> str:
    return ids_digest([seed])


def same(first: ModuleKV, second: ModuleKV, tolerance: float = 0.0) -> bool:
    return (
        first.token_ids == second.token_ids
        and first.start == second.start
        and torch.allclose(first.keys, second.keys, atol=tolerance, rtol=0)
        and torch.allclose(first.values, second.values, atol=tolerance, rtol=0)
    )


KINDS = ["memory", "raw", "int8", "tiered"]


def make(kind, path, max_bytes=1 << 20):
    if kind == "memory":
        return MemoryStore(max_bytes)
    if kind == "tiered":
        return TieredStore([MemoryStore(1 << 20), DiskStore(path, max_bytes=max_bytes)])
    return DiskStore(path, codec=kind, max_bytes=max_bytes)


def close(store):
    for part in getattr(store, "tiers", (store,)):
        if isinstance(part, DiskStore):
            part.close()


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    made = make(request.param, tmp_path)
    made.tolerance = 0.05 if request.param == "int8" else 0.0
    yield made
    close(made)


def test_what_is_put_comes_back_and_goes(store):
    assert store.get(key(1), range(1, 9)) is None
    store.put(key(1), module(1))
    assert key(1) in store
    assert store.nbytes > 0
    assert same(store.get(key(1), range(1, 9)), module(1), store.tolerance)
    assert not same(store.get(key(1), range(1, 9)), module(2), 0.05)
    assert store.delete(key(1))
    assert not store.delete(key(1))
    assert key(1) not in store
    assert store.get(key(1), range(1, 9)) is None
    assert store.nbytes == 0
    assert not isinstance(store, DiskStore) or store.check() == []


def test_putting_again_replaces(store):
    store.put(key(1), module(1))
    size = store.nbytes
    store.put(key(1), module(5))
    assert same(store.get(key(1), module(5).token_ids), module(5), store.tolerance)
    assert store.nbytes == size


def test_foreign_tokens_are_never_served(store):
    store.put(key(1), module(1))
    with pytest.raises(CorruptBlobError, match=r"tokens"):
        store.get(key(1), range(2, 10))
    assert store.get(key(1), range(1, 9)) is None


def test_a_view_does_not_keep_its_whole_tensor(tmp_path):
    store = MemoryStore(1 << 20)
    store.put(key(1), module(1, 100).slice(10, 12))
    kept = store.get(key(1), (11, 12))
    assert kept.keys.untyped_storage().nbytes() == kept.keys.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_used_leaves_first(kind, tmp_path):
    probe = make(kind, tmp_path / "probe")
    probe.put(key(0), module(0))
    size = probe.nbytes
    close(probe)
    store = make(kind, tmp_path / "store", max_bytes=3 * size + size // 2)
    for seed in (1, 2, 3):
        store.put(key(seed), module(seed))
    last = store.tiers[-1] if kind == "tiered" else store
    if kind == "tiered":
        store.get(key(1), module(1).token_ids)  # which counts in all tiers
    else:
        store.touch(key(1))
    store.put(key(4), module(4))
    assert {seed for seed in range(5) if key(seed) in last} == {1, 3, 4}
    assert last.nbytes <= last.max_bytes
    with pytest.raises(StoreFullError, match="smaller chunks"):
        store.put(key(9), module(9, 1000))
    assert key(4) in store
    close(store)


def test_what_fits_as_int8_is_kept_as_such(tmp_path):
    kv = ModuleKV(tuple(range(100)), 0, torch.randn(3, 2, 100, 64), torch.randn(3, 2, 100, 64))
    bound = int(kv.nbytes * 0.35)
    with closing(DiskStore(tmp_path / "int8", codec="int8", max_bytes=bound)) as store:
        store.put(key(0), kv)
        assert key(0) in store
    raw = closing(DiskStore(tmp_path / "raw", max_bytes=bound))
    with raw as store, pytest.raises(StoreFullError, match="smaller chunks"):
        store.put(key(0), kv)


def test_threads_may_share_a_store(store):
    def work(seed):
        for _ in range(5):
            store.put(key(seed), module(seed))
            assert same(store.get(key(seed), module(seed).token_ids), module(seed), 0.05)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(12)))
    assert all(key(seed) in store for seed in range(12))


# Files -----------------------------------------------------------------------------------------


def the_file(store):
    (path,) = store.path.glob("blobs/*/*")
    return path


@pytest.fixture
def disk(tmp_path):
    made = DiskStore(tmp_path)
    made.put(key(1), module(1))
    yield made
    made.close()


def reopened(disk):
    return DiskStore(disk.path)


def test_a_store_survives_its_process(disk):
    again = reopened(disk)
    assert same(again.get(key(1), module(1).token_ids), module(1))
    again.close()
    folder = next(disk.path.glob("blobs/*"))
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 8
    path.write_bytes(bytes(data))


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


def _garbage(path):
    path.write_bytes(b"not a tensor at all" * 10)


@pytest.mark.parametrize("damage", [_flip, _truncate, _garbage])
def test_damage_is_noticed_named_and_dropped(disk, damage):
    damage(the_file(disk))
    fresh = reopened(disk)
    (problem,) = fresh.check()
    assert problem.key == key(1)
    with pytest.raises(CorruptBlobError, match="dropped from the store"):
        fresh.get(key(1), module(1).token_ids)
    assert key(1) not in fresh
    assert fresh.check() == []
    fresh.close()


def test_a_file_under_anothers_name_is_foreign(disk):
    disk.put(key(2), module(2))
    source = next(disk.path.glob(f"blobs/*/{key(2)}*"))
    target = next(disk.path.glob(f"blobs/*/{key(1)}*"))
    target.write_bytes(source.read_bytes())
    fresh = reopened(disk)
    with pytest.raises(CorruptBlobError, match="belongs to another module"):
        fresh.get(key(1), module(1).token_ids)
    fresh.close()


def test_a_missing_file_is_a_miss_and_a_lost_row_is_litter(disk):
    disk.put(key(2), module(2))
    next(disk.path.glob(f"blobs/*/{key(1)}*")).unlink()
    assert disk.get(key(1), module(1).token_ids) is None
    with disk._database.transaction() as connection:
        connection.execute("DELETE FROM files")
    assert "litter" in disk.check()[0].reason
    assert disk.prune()[0] == 1
    assert disk.check() == []


def test_what_killed_processes_left_of_a_text_goes_with_it(disk):
    disk.put(key(2), module(2))
    (disk.path / "blobs" / "drafts" / "0123456789abcdef").write_bytes(b"KV")
    with disk._database.transaction() as connection:
        connection.execute("DELETE FROM files WHERE key = ?", (key(1),))
    assert not disk.delete(key(1))
    (left,) = (path for path in disk.path.glob("blobs/*/*"))
    assert left.name.startswith(key(2))
    assert disk.check() == []


@pytest.mark.parametrize("where", ["save_file", "replace"])
def test_a_full_disk_loses_nothing_and_leaves_nothing(disk, monkeypatch, where):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = (blob, "save_file") if where == "save_file" else (os, "replace")
    monkeypatch.setattr(*target, full)
    with pytest.raises(StoreFullError, match="free some space"):
        disk.put(key(2), module(2))
    monkeypatch.undo()
    assert same(disk.get(key(1), module(1).token_ids), module(1))
    assert len(list(disk.path.glob("blobs/*/*"))) == 1


def test_prune_frees_down_to_a_bound(disk):
    disk.put(key(2), module(2))
    assert disk.prune(disk.nbytes - 1)[0] == 1
    assert disk.sizes().keys() == {key(2)}


def test_an_index_that_is_not_a_database_is_named(tmp_path):
    (tmp_path / "index.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match="not a usable index"):
        DiskStore(tmp_path)


def _hammer(path, seeds, errors):
    try:
        store = DiskStore(path, max_bytes=40_000)
        for _ in range(6):
            for seed in seeds:
                store.put(key(seed), module(seed))
                found = store.get(key(seed), module(seed).token_ids)
                assert found is None or same(found, module(seed))
            store.delete(key(seeds[0]))
        store.close()
    except BaseException as error:
        errors.put(repr(error))
        raise


def test_two_processes_may_share_a_store(tmp_path):
    context = multiprocessing.get_context("spawn")
    errors = context.Queue()
    jobs = [
        context.Process(target=_hammer, args=(tmp_path, seeds, errors))
        for seeds in (list(range(6)), list(range(3, 9)))
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0, 0], errors.get(timeout=5)
    store = DiskStore(tmp_path)
    assert [p for p in store.check() if "litter" not in p.reason] == []
    store.close()


def test_memory_is_asked_before_disk_and_damage_below_does_not_matter(tmp_path):
    memory, disk = MemoryStore(1 << 20), DiskStore(tmp_path)
    store = TieredStore([memory, disk])
    store.put(key(1), module(1))
    _flip(the_file(disk))
    assert same(store.get(key(1), module(1).token_ids), module(1))
    memory.delete(key(1))
    fresh = TieredStore([memory, reopened(disk)])
    with pytest.raises(CorruptBlobError):
        fresh.get(key(1), module(1).token_ids)
    close(fresh)
    close(store)


def test_int8_errs_by_half_a_step_and_halves_bf16(tmp_path):
    kv = module(3, 64)
    kv = ModuleKV(kv.token_ids, 3, kv.keys.bfloat16(), kv.values.bfloat16())
    kv.values[0, 0, 5] = 0  # a row without scale
    store = DiskStore(tmp_path, codec="int8")
    store.put(key(3), kv)
    found = store.get(key(3), kv.token_ids)
    assert found.keys.dtype == torch.bfloat16
    step = kv.keys.float().abs().amax(-1, keepdim=True) / 127
    rounding = kv.keys.float().abs() * 2**-8
    assert ((found.keys.float() - kv.keys.float()).abs() <= step / 2 + rounding + 1e-7).all()
    assert (found.values[0, 0, 5] == 0).all()
    assert not torch.equal(found.keys, kv.keys)
    store.close()


def test_uses_are_written_in_batches(disk, monkeypatch):
    writes = []
    monkeypatch.setattr(Database, "transaction", lambda *_: writes.append(1))
    for _ in range(20):
        disk.get(key(1), module(1).token_ids)
    assert not writes


def test_a_fetch_waits_for_its_own_module_only():
    prefetcher, may_go, done = Prefetcher(), threading.Event(), []
    prefetcher.start(("slow",), lambda: may_go.wait(10) and done.append("slow"))
    prefetcher.start(("slow",), lambda: done.append("twice"))
    prefetcher.start(("fast",), lambda: done.append("fast"))
    prefetcher.wait(("fast",))
    prefetcher.wait(("unknown",))
    assert done == ["fast"]
    may_go.set()
    prefetcher.wait(("slow",))
    assert done == ["fast", "slow"]
    prefetcher.close()


def test_many_may_open_a_new_index_at_once(tmp_path):
    """SQLite does not wait for another connection that switches to WAL at the same moment."""
    together = threading.Barrier(8)

    def open_one(path):
        together.wait()
        Database(path, "CREATE TABLE IF NOT EXISTS t (a INTEGER);").close()

    with ThreadPoolExecutor(8) as pool:
        for number in range(40):
            list(pool.map(open_one, [tmp_path / f"{number}.sqlite"] * 8))


def test_a_device_tier_has_the_latest_and_the_host_has_all():
    """The meta device stands in for one that CI does not have: tensors on it are elsewhere."""
    size = module(1).nbytes
    device = MemoryStore(size, torch.device("meta"))
    host = MemoryStore(10 * size, torch.device("cpu"))
    store = TieredStore([device, host])
    for seed in (1, 2):
        store.put(key(seed), module(seed))
    assert key(1) not in device  # it had to go
    assert len(host.held) == 2
    promoted = store.get(key(1), module(1).token_ids)
    assert promoted.keys.device.type == promoted.values.device.type == "meta"
    assert (key(1) in device, key(2) in device) == (True, False)
    assert all(same(host.get(key(seed), module(seed).token_ids), module(seed)) for seed in (1, 2))


def test_a_device_without_memory_keeps_nothing_from_others():
    class Full(MemoryStore):
        def _kept(self, tensor):
            raise torch.OutOfMemoryError("none left")

    full, host = Full(1 << 20), MemoryStore(1 << 20)
    with pytest.raises(StoreFullError, match="none left"):
        full.put(key(1), module(1))
    store = TieredStore([full, host])
    store.put(key(1), module(1))
    assert same(store.get(key(1), module(1).token_ids), module(1))
    assert not full.held


def test_which_memories_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, 800))

    def tiers(device, **options):
        found = memory_tiers(StoreConfig(memory_bytes=7, **options), device)
        return [(tier.max_bytes, tier.device and tier.device.type) for tier in found]

    cuda = torch.device("cuda")
    assert tiers(torch.device("cpu"), device_bytes=5) == tiers(None) == [(7, None)]
    assert tiers(cuda) == [(100, "cuda"), (7, "cpu")]
    assert tiers(cuda, device_bytes=5) == [(5, "cuda"), (7, "cpu")]
    assert tiers(cuda, device_bytes=0) == [(7, "cpu")]


def test_closing_ends_the_wait_for_what_was_not_begun():
    prefetcher, may_go = Prefetcher(), threading.Event()
    for name in "abc":  # two threads: the third is not begun
        prefetcher.start((name,), lambda: may_go.wait(10))
    waiting = threading.Thread(target=prefetcher.wait, args=("c",))
    waiting.start()
    threading.Timer(0.2, may_go.set).start()
    prefetcher.close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_store_stays_where_it_was_opened(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    store, data = DiskStore("kv"), Database(Path("kv/other.sqlite"), "CREATE TABLE t (x);")
    store.put(key(1), module(1))
    monkeypatch.chdir(tmp_path / "there")
    store.put(key(2), module(2))
    assert same(store.get(key(1), module(1).token_ids), module(1))
    assert store.check() == []
    assert store.prune() == (0, 0)
    assert data.path.is_file()
    store.close()
    data.close()
    assert len(list((tmp_path / "here" / "kv" / "blobs").glob("*/*.safetensors"))) == 2
    assert list((tmp_path / "there").iterdir()) == []
