"""What has to go with a text goes, or it is said that it does not: from the disk and from far."""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from contextlib import closing

import pytest
import torch

from cached_rag import StoreConfig
from cached_rag.errors import StoreError
from cached_rag.kv import holdings
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.catalog import Catalog, ChunkRecord, Maker, pack
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.holdings import Removals
from cached_rag.kv.remote import open_remote
from cached_rag.library.library import Library
from cached_rag.library.matching import EncodedAfter

ALONE, BEHIND = EncodedAfter(()), EncodedAfter((1, 2, 3), "primer")
TEXTS = [f"{number} {'x' * 40}" for number in range(3)]


def record(number: int) -> ChunkRecord:
    text, ids = TEXTS[number], tuple(range(number, number + 8))
    return ChunkRecord(digest(text), text[:32], len(text), pack(ids), pack(range(8)))


def kv(number: int) -> ModuleKV:
    return ModuleKV(record(number).token_ids, 0, torch.ones(2, 2, 8, 4), torch.ones(2, 2, 8, 4))


@pytest.fixture
def process(tmp_path):
    """Makes libraries, as processes have them that share a folder and a remote store."""
    made = []

    def make(model="model", dtype="float32", remote=True, place="kv", at="far") -> Library:
        far = f"file://{tmp_path}/{at}" if remote else None
        config = StoreConfig(path=place and str(tmp_path / place), remote=far)
        library = Library(config, Maker(model, "name", dtype), remote=open_remote(config))
        made.append(library)
        return library

    yield make
    for library in made:
        library.close()
        if library.shelf.remote is not None:
            library.shelf.remote.close(0)


def encode(library: Library, *numbers: int, behind=BEHIND) -> None:
    library.add_encoded_after(behind)
    library.add_chunks([record(number) for number in numbers])
    for number in numbers:
        library.put(behind, kv(number), record(number).text_digest)
    if library.shelf.remote is not None:
        assert library.shelf.remote.drain() == 0


def far(folder, at="far") -> int:
    return len(list((folder / at).rglob("*.raw")))


def near(folder) -> int:
    return len(list((folder / "kv" / "blobs").rglob("*.safetensors")))


def damage(folder) -> None:
    with closing(sqlite3.connect(folder / "kv" / "catalog.sqlite")) as connection:
        connection.execute("UPDATE encodings SET token_ids = x'01000000' WHERE context = 'primer'")
        connection.commit()


def count(folder, table: str) -> int:
    with closing(sqlite3.connect(folder / "kv" / "catalog.sqlite")) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


# What another process has under way -------------------------------------------------------------


@pytest.mark.parametrize("is_here_already", [False, True])
def test_what_is_forgotten_elsewhere_while_it_is_sent_is_not_far(
    process, tmp_path, monkeypatch, is_here_already
):
    if is_here_already:  # so that it is sent because it is not there yet
        encode(process(remote=False), 0)
    one, other = process(), process()
    put = one.shelf.remote._transport.put

    def late(name, data):
        if name.endswith(".raw"):
            other.remove([record(0).text_digest])
        put(name, data)

    monkeypatch.setattr(one.shelf.remote._transport, "put", late)
    if is_here_already:
        assert one.present(BEHIND, [record(0)]) == {record(0).token_ids}
        assert one.shelf.remote.drain() == 0
    else:
        encode(one, 0)
    assert (near(tmp_path), far(tmp_path)) == (0, 0)


def test_what_is_forgotten_elsewhere_while_it_waits_for_the_disk_is_not_written(process, tmp_path):
    encode(process(), 0)
    one, other = process(), process()
    key = one.shelf.key(BEHIND, record(0).token_ids)
    one.shelf.store.delete(key)
    write, may_go = one.shelf._to_disk._do, threading.Event()
    one.shelf._to_disk._do = lambda *given: may_go.wait(20) and write(*given)
    assert one.shelf.bring([[(BEHIND, record(0).token_ids)]]) == []
    other.remove([record(0).text_digest])
    may_go.set()
    one.shelf._to_disk.drain()
    one.refresh()
    assert key not in one.shelf.store
    assert near(tmp_path) == 0


def test_what_a_closed_tenant_had_to_send_is_sent_first(process, tmp_path, monkeypatch):
    one = process()
    put = one.shelf.remote._transport.put
    monkeypatch.setattr(
        one.shelf.remote._transport, "put", lambda *given: time.sleep(0.2) or put(*given)
    )
    one.add_chunks([record(0)])
    one.put(ALONE, kv(0), record(0).text_digest)
    one.close()
    assert far(tmp_path) == 1


def test_what_others_sent_goes_by_who_never_knew_it_and_has_no_disk(process, tmp_path):
    encode(process(), 0, 1)
    later = process(place=None)
    later.shelf._due = math.inf  # it has heard what others say, and not the latest
    later.remove([record(0).text_digest], [record(0)])
    assert far(tmp_path) == 1


def test_what_an_earlier_remote_store_owes_goes_when_that_is_used_again(process, tmp_path):
    encode(process(), 0, 1)
    other = process(at="other")
    encode(other, 0)
    other.remove([record(0).text_digest])
    assert (far(tmp_path), far(tmp_path, "other")) == (2, 0)
    process()
    assert (far(tmp_path), count(tmp_path, "doomed")) == (1, 0)


# Models that are not used any more ---------------------------------------------------------------


def test_pruning_a_model_does_not_cancel_what_the_remote_store_owes(process, tmp_path, monkeypatch):
    encode(process("old"), 0, 1)
    encode(process("new", "bfloat16"), 0)
    assert far(tmp_path) == 3
    deleting = process("new", "bfloat16").shelf.remote

    def away(*_):
        raise OSError("away")

    monkeypatch.setattr(deleting._transport, "delete", away)
    with pytest.raises(StoreError, match="may still be there"):
        holdings.forget(tmp_path / "kv", TEXTS[:1], deleting)
    (old,) = holdings.unused(tmp_path / "kv", "name", ["bfloat16"])
    holdings.drop(tmp_path / "kv", old)
    assert count(tmp_path, "encodings") == 2
    process("new", "bfloat16")
    assert far(tmp_path) == 1  # the text of the old model that was not forgotten
    assert count(tmp_path, "encodings") == 1  # the old model has none any more


def test_pruning_a_model_does_not_cancel_a_removal_that_was_cut_short(process, tmp_path):
    encode(process("old"), 0)
    encode(process("new", "bfloat16"), 0)
    with closing(Catalog(tmp_path / "kv" / "catalog.sqlite", "old")) as catalog:
        Removals(catalog, lambda _: True).doom([record(0).text_digest])
        catalog.clear()
    process("new", "bfloat16")
    assert (near(tmp_path), far(tmp_path), count(tmp_path, "encodings")) == (0, 0, 1)


def test_a_model_that_comes_while_it_is_looked_is_not_unused(process, tmp_path, monkeypatch):
    encode(process("old", remote=False), 0)
    opened = holdings._disk

    def later(*args):
        monkeypatch.setattr(holdings, "_disk", opened)
        encode(process("new", remote=False), 0)
        return opened(*args)

    monkeypatch.setattr(holdings, "_disk", later)
    assert holdings.unused(tmp_path / "kv", "name", ["float32"]) == []


# A damaged head ----------------------------------------------------------------------------------


@pytest.mark.parametrize("remote", [False, True])
def test_a_text_behind_a_damaged_head_is_not_said_to_be_gone(process, tmp_path, remote):
    library = process(remote=remote)
    encode(library, 0, 1)
    encode(library, 0, behind=ALONE)
    damage(tmp_path)
    for act in (
        lambda: process(remote=remote).remove([record(0).text_digest]),
        lambda: holdings.forget(tmp_path / "kv", TEXTS[:1]),
    ):
        with pytest.raises(StoreError, match="ingest the documents again"):
            act()
        assert near(tmp_path) == 2  # what can be found goes
    assert process(remote=remote).table.get(TEXTS[0]) is None
    process(remote=remote).add_encoded_after(BEHIND)  # as ingesting does
    process(remote=remote)
    assert near(tmp_path) == 1
    assert far(tmp_path) == remote
    assert count(tmp_path, "doomed") == 0


def test_a_damaged_head_of_one_model_holds_up_no_other(process, tmp_path):
    encode(process("old"), 0)
    damage(tmp_path)
    new = process("new", "bfloat16")
    encode(new, 0)
    with pytest.raises(StoreError, match="is damaged"):
        new.remove([record(0).text_digest])
    assert (near(tmp_path), far(tmp_path)) == (1, 1)
    (old,) = holdings.unused(tmp_path / "kv", "name", ["bfloat16"])
    holdings.drop(tmp_path / "kv", old)
    assert holdings.drop_strays(tmp_path / "kv") == 1
    new.remove([record(0).text_digest])
    assert count(tmp_path, "doomed") == 0


def test_pruning_drops_nothing_while_a_head_is_damaged(process, tmp_path):
    library = process(remote=False)
    encode(library, 0, 1, 2)
    damage(tmp_path)
    with pytest.raises(StoreError, match="so all stays"):
        holdings.drop_strays(tmp_path / "kv")
    assert near(tmp_path) == 3
    library.add_encoded_after(BEHIND)
    assert holdings.drop_strays(tmp_path / "kv") == 0
    assert near(tmp_path) == 3
