"""The catalog: idempotent, incremental, scoped, seen across processes' connections."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
from test_stores import key, module

from cached_rag.kv import holdings
from cached_rag.kv.catalog import _MODULES, Catalog, ChunkRecord, pack
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.holdings import Removals


def record(n):
    return ChunkRecord(f"digest {n}", f"anchor {n}", n, pack((n, n + 1)), pack((0, 3)))


@pytest.fixture
def catalogs(tmp_path):
    made = [Catalog(tmp_path / "c.sqlite", "model") for _ in range(2)]
    yield made
    for catalog in made:
        catalog.close()


def test_modules_come_in_order_and_once(catalogs):
    writer, reader = catalogs
    writer.add_chunks([record(1), record(2), record(1)])
    rows = list(reader.modules())
    assert [r for _, r in rows] == [record(1), record(2)]
    writer.add_chunks([record(3)])
    assert [r for _, r in reader.modules(after=rows[-1][0])] == [record(3)]


def test_many_modules_are_read_in_pieces_without_a_gap(catalogs):
    writer, reader = catalogs
    writer.add_chunks(map(record, range(10_003)))
    assert [found.length for _, found in reader.modules()] == list(range(10_003))


def test_what_is_new_is_read_without_a_look_at_the_rest(catalogs):
    def steps(query):
        asked = f"EXPLAIN QUERY PLAN {query} AND id > ? ORDER BY id LIMIT 10"
        return [step for *_, step in catalogs[0].database.rows(asked, "model", "", 0)]

    (step,) = steps(_MODULES)
    assert step.endswith("USING INDEX modules_in_order (model=? AND namespace=? AND rowid>?)")
    by_text = "FROM modules INDEXED BY sqlite_autoindex_modules_1"
    assert "USE TEMP B-TREE FOR ORDER BY" in steps(_MODULES.replace("FROM modules", by_text))


def test_changes_by_others_are_noticed_once(catalogs):
    writer, reader = catalogs
    before = [one.database.version() for one in (reader, writer)]
    assert reader.database.version() == before[0]
    writer.add_chunks([record(1)])
    assert reader.database.version() != before[0]
    assert writer.database.version() == before[1]  # its own writes are known to it


def test_removals_change_the_generation(catalogs):
    writer, reader = catalogs
    writer.add_chunks([record(1), record(2)])
    before = reader.generation()
    Removals(writer, lambda _: False).doom(["digest 1"])
    assert reader.generation() != before
    assert [r for _, r in reader.modules()] == [record(2)]


def test_prefixes_are_a_set(catalogs):
    writer, reader = catalogs
    for prefix in ((1, 2), (3,), (1, 2)):
        writer.add_prefix(prefix)
    assert sorted(reader.prefixes()) == [((1, 2), ""), ((3,), "")]


def test_models_and_tenants_see_only_their_own(tmp_path, catalogs):
    catalogs[0].add_chunks([record(1)])
    for scope in (("other model", ""), ("model", "tenant")):
        stranger = Catalog(tmp_path / "c.sqlite", *scope)
        assert list(stranger.modules()) == []
        stranger.close()


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_strays_are_found_and_dropped_in_every_codec(tmp_path, codec):
    with closing(DiskStore(tmp_path, codec)) as disk:
        disk.put(key(1), module(1))
    Catalog(tmp_path / holdings.CATALOG, "model").close()
    assert holdings.strays(tmp_path) == [key(1)]
    assert holdings.drop_strays(tmp_path) == 1
    with closing(DiskStore(tmp_path, codec)) as disk:
        assert (holdings.strays(tmp_path), len(disk), disk.nbytes) == ([], 0, 0)


@pytest.mark.parametrize("is_far", [False, True])
def test_who_deletes_does_not_take_what_came_back_and_goes_again_for_done(catalogs, is_far):
    first, second = catalogs
    held, puts = set(), iter([True])
    again = Removals(second, lambda _: False)

    def delete(keys):
        gone = len(held.intersection(keys))
        held.difference_update(keys)
        if next(puts, False):  # meanwhile another gives the text, its KV comes, and it goes again
            second.add_chunks([record(1)])
            held.update(keys)
            again.doom(["digest 1"])
            if is_far:
                again.finish()
        return gone

    first.add_chunks([record(1)])
    if is_far:
        far = SimpleNamespace(label="far", heads=lambda *_: [], delete=lambda _, keys: delete(keys))
        removals = Removals(first, lambda _: False, far)
        removals.note_remote("far")
        removals.remove(["digest 1"])
    else:
        assert Removals(first, lambda key: delete([key])).remove(["digest 1"]) == 1
    assert held == set()
