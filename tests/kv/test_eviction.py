"""Which KV leaves: memory's queues, the disk's, and a slow twin of both do the same."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cached_rag.errors import StoreFullError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.tiers import MemoryStore, Terms, TieredStore

ROOM = 20


class Twin:
    """S3-FIFO by lists, as its paper's algorithm 1 says it: small, main, and what left small."""

    def __init__(self, room):
        self.room, self.small, self.main, self.gone, self.uses = room, [], [], [], {}

    def use(self, key):
        if key in self.uses:
            self.uses[key] = min(3, self.uses[key] + 1)
            return
        while len(self.uses) >= self.room:
            if len(self.small) * 10 >= self.room or not self.main:
                self.leave_small()
            else:
                self.leave_main()
        (self.main if key in self.gone else self.small).append(key)
        self.gone = [one for one in self.gone if one != key]
        self.uses[key] = 0

    def leave_small(self):
        key = self.small.pop(0)
        if self.uses[key]:
            self.main.append(key)
            self.uses[key] = 0
            return
        del self.uses[key]
        self.gone = [*self.gone, key][-len(self.uses) - 1 :]

    def leave_main(self):
        key = self.main.pop(0)
        if self.uses[key]:
            self.main.append(key)
            self.uses[key] -= 1
        else:
            del self.uses[key]


def sized(nbytes):
    """A module of so many bytes."""
    return ModuleKV(
        (1,), 0, torch.zeros(1, 1, 1, nbytes, dtype=torch.uint8), torch.empty(1, 1, 1, 0)
    )


ONE = sized(1)


def used(cache, key):
    cache.touch(key)
    if cache.get(key, (1,)) is None:
        cache.put(key, ONE)


@given(st.lists(st.integers(0, 60), max_size=400))
def test_memory_does_as_its_twin(trace):
    cache, twin = MemoryStore(ROOM), Twin(ROOM)
    for key in map(str, trace):
        used(cache, key)
        twin.use(key)
        assert set(cache.held) == set(twin.uses)
        assert cache.nbytes == len(cache.held) <= ROOM


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=200))
def test_bytes_keep_within_the_room(entries):
    cache = MemoryStore(ROOM)
    for key, size in entries:
        cache.put(str(key), sized(size))
        assert cache.get(str(key), (1,)).nbytes == size
        assert cache.nbytes == sum(kv.nbytes for kv in cache.held.values()) <= ROOM
        if key % 7 == 0:
            assert cache.delete(str(key))
            assert str(key) not in cache


def test_texts_that_nobody_asks_for_do_not_push_out_those_that_are_asked_for():
    cache, recent = MemoryStore(ROOM), {}
    for _ in range(3):
        for key in "abcdef":
            used(cache, key)
    for number in range(500):
        used(cache, f"ingested{number}")
        recent[number] = None  # control: by the last use all six would be gone
    assert {*"abcdef"} <= {*cache.held}
    assert len(recent) > ROOM


def test_what_was_popular_once_leaves_in_the_end():
    cache = MemoryStore(ROOM)
    for _ in range(50):
        used(cache, "old")
    for number in range(40 * ROOM):
        used(cache, f"new{number % (ROOM + 5)}")
    assert "old" not in cache


def module(number):
    """KV of one token, of its own key."""
    values = torch.full((1, 1, 1, 64), float(number))
    return ModuleKV((number,), 0, values, values.clone())


def asked(store, number):
    store.touch(f"{number:040}")
    if store.get(f"{number:040}", (number,)) is None:
        store.put(f"{number:040}", module(number))


def held(store, numbers=range(40)):
    return {number for number in numbers if f"{number:040}" in store}


@pytest.mark.parametrize("seed", range(3))
def test_disk_and_memory_keep_the_same(tmp_path, seed):
    generator = torch.Generator().manual_seed(seed)
    trace = (torch.rand(300, generator=generator) ** 3 * 40).int().tolist()
    with closing(DiskStore(tmp_path / "one")) as probe:
        probe.put("0" * 40, module(0))
        size = probe.nbytes
    memory = MemoryStore(10 * module(0).nbytes)
    with closing(DiskStore(tmp_path / "all", max_bytes=10 * size)) as disk:
        for number in trace:
            asked(memory, number)
            asked(disk, number)
            assert disk.nbytes <= disk.max_bytes
        assert held(disk) == held(memory)
        assert len(held(disk)) == 10


def totals(disk):
    """What the table of files adds up to, and what the running totals say."""
    query = "SELECT pinned, is_main, count(*), sum(nbytes) FROM files GROUP BY 1, 2"
    kept = "SELECT * FROM totals WHERE count OR nbytes"
    return [sorted(map(tuple, disk._database.rows(one))) for one in (query, kept)]


def test_running_totals_are_what_the_files_add_up_to(tmp_path):
    chance = torch.Generator().manual_seed(0)
    with closing(DiskStore(tmp_path, max_bytes=6000)) as disk:
        for number in (torch.rand(200, generator=chance) ** 2 * 30).int().tolist():
            asked(disk, number)
            key = f"{number:040}"
            if number % 7 == 0:
                disk.hold([key], pinned=number % 2 == 0, until=None)
            if number % 11 == 0:
                disk.delete(key)
            counted, kept = totals(disk)
            assert counted == kept
        assert len(counted) > 2  # of pins, too, and of both queues
        with disk._database.transaction() as connection:
            connection.execute("UPDATE totals SET nbytes = 0")
        disk.prune()
        counted, kept = totals(disk)
        assert counted == kept


def test_a_damaged_total_is_said_and_mended_when_nothing_is_left_to_take_out(tmp_path):
    with closing(DiskStore(tmp_path, max_bytes=6000)) as disk:
        disk.put("0" * 40, module(0))
        with disk._database.transaction() as connection:
            connection.execute("UPDATE totals SET nbytes = nbytes | (1 << 29)")
        assert ["prune the store" in problem.reason for problem in disk.check()] == [True]
        disk.put(f"{1:040}", module(1))
        assert f"{1:040}" in disk
        assert disk.check() == []


def test_what_memory_serves_counts_on_disk(tmp_path):
    with closing(DiskStore(tmp_path / "one")) as probe:
        probe.put("0" * 40, module(0))
        size = probe.nbytes
    with closing(DiskStore(tmp_path / "all", max_bytes=10 * size)) as disk:
        tiers = TieredStore([MemoryStore(1 << 20), disk])
        for number in range(10):
            tiers.put(f"{number:040}", module(number))
        for _ in range(2):
            assert tiers.get(f"{3:040}", (3,)) is not None
        for number in range(10, 30):
            tiers.put(f"{number:040}", module(number))
        assert held(disk, range(10)) == {3}


def test_what_is_deleted_is_not_remembered(tmp_path):
    with closing(DiskStore(tmp_path, max_bytes=5000)) as disk:
        for number in range(30):
            disk.put(f"{number:040}", module(number))
        rows = disk._database.rows("SELECT key FROM gone")
        assert rows
        for (key,) in rows:
            disk.delete(key)
        assert disk._database.rows("SELECT key FROM gone") == []


def test_what_fits_nowhere_is_refused_and_nothing_leaves(tmp_path):
    with closing(DiskStore(tmp_path, max_bytes=3000)) as disk:
        disk.put("0" * 40, module(0))
        large = torch.zeros(1, 1, 1, 4000)
        with pytest.raises(StoreFullError):
            disk.put("1" * 40, ModuleKV((1,), 0, large, large.clone()))
        assert held(disk, [0]) == {0}


def test_pins_that_are_over_count_no_more(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    cache = MemoryStore(ROOM)
    cache.put("a", sized(8))
    assert cache.hold(["a", "a", "b"], pinned=True, until=5.0) == 1
    with pytest.raises(StoreFullError, match="does not fit into the 12"):
        cache.put("c", sized(13))
    cache.put("d", sized(3))
    with pytest.raises(StoreFullError, match="pinned KV may take 10"):
        cache.hold(["d"], pinned=True, until=None)
    now[0] = 6.0
    cache.put("c", sized(13))
    cache.put("a", sized(6))
    assert cache.get("a", (1,)).nbytes == 6
    assert cache._database.rows("SELECT 1 FROM files WHERE pinned") == []
    assert cache.ends("a") == float("inf")


def test_what_replaces_another_ends_as_that_did_unless_it_is_told():
    cache = MemoryStore(ROOM)
    for until, end in ((9e9, 9e9), (None, 9e9), (8e9, 8e9), (float("inf"), float("inf"))):
        cache.put("a", ONE, Terms(until=until))
        assert cache.ends("a") == end
