"""The ledger behind both vector stores: KV goes with the last chunk that has its text."""

from __future__ import annotations

import copy
import pickle

import pytest

from cached_rag import ConfigError
from cached_rag.errors import StoreError
from cached_rag.spi import Ledger

ROWS = [("a", "doc", "one"), ("b", "doc", "two"), ("c", "other", " two\n")]


@pytest.fixture
def forgotten():
    return []


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "folder" / "ledger.sqlite")
    yield ledger
    ledger.close()


def test_a_text_goes_with_the_last_chunk_that_has_it(ledger, forgotten):
    ledger.put(ROWS, forgotten.extend)
    ledger.remove(["b"], forgotten.extend)
    assert forgotten == []  # c has it, too: white space around it is none of it
    ledger.remove(["a", "c", "unknown"], forgotten.extend)
    assert sorted(forgotten) == ["one", "two"]
    assert ledger.ids() == []


def test_a_text_goes_when_it_is_replaced(ledger, forgotten):
    ledger.put(ROWS, forgotten.extend)
    ledger.put([("a", "doc", "three"), ("b", "doc", "one")], forgotten.extend)
    assert forgotten == []  # b has what a had, and c what b had
    ledger.put([("c", "other", "four")], forgotten.extend)
    assert forgotten == ["two"]
    assert ledger.texts(["a", "c", "unknown"]) == {"a": "three", "c": "four"}


def test_of_chunks_with_one_id_the_last_counts(ledger, forgotten):
    ledger.put([("a", "doc", "one")], forgotten.extend)
    ledger.put([("a", "doc", "one"), ("a", "doc", "two")], forgotten.extend)
    assert forgotten == ["one"]
    assert ledger.texts(["a"]) == {"a": "two"}


def test_half_a_surrogate_pair_costs_the_other_chunks_nothing(ledger, forgotten):
    ledger.put(ROWS, forgotten.extend)
    ledger.put([("a", "doc", "half \ud800"), ("d", "doc", "four")], forgotten.extend)
    assert forgotten == ["one"]
    assert ledger.texts(["a", "b", "d"]) == {"b": "two", "d": "four"}
    ledger.remove(["a", "d"], forgotten.extend)
    assert forgotten == ["one", "four"]


def test_half_a_surrogate_pair_in_a_name_is_refused(ledger, forgotten):
    name = b"caf\xe9.txt".decode("utf-8", "surrogateescape")  # as a folder's list has it
    for act in (lambda: ledger.put([("1", name, "text")], forgotten), lambda: ledger.ids(name)):
        with pytest.raises(ConfigError, match="surrogate pair"):
            act()
    assert ledger.ids() == []


def test_numbers_can_be_ids(ledger, forgotten):
    ledger.put([(1, 1, "one"), (2, 2, "two")], forgotten.extend)
    ledger.put([(2, 2, "three")], forgotten.extend)
    ledger.remove([1], forgotten.extend)
    assert forgotten == ["two", "one"]
    assert ledger.texts([1, 2]) == {"2": "three"}


def test_chunks_are_found_by_document_and_by_text(ledger, forgotten):
    ledger.put(ROWS, forgotten.extend)
    assert sorted(ledger.ids("doc")) == ["a", "b"]
    assert sorted(ledger.alike(["b"])) == ["b", "c"]
    assert ledger.alike(["unknown"]) == []


def test_what_could_not_be_forgotten_can_be_removed_again(ledger, forgotten):
    def fail(texts):
        raise StoreError("the disk is away")

    ledger.put(ROWS, forgotten.extend)
    with pytest.raises(StoreError, match="disk"):
        ledger.remove(["a"], fail)
    with pytest.raises(StoreError, match="disk"):
        ledger.put([("a", "doc", "three")], fail)
    ledger.remove(["a"], forgotten.extend)
    assert forgotten == ["one"]


def test_a_file_keeps_rows_and_nothing_of_what_went(tmp_path, forgotten):
    path = tmp_path / "ledger.sqlite"
    text = "a text that nobody should find again"
    for change in (
        lambda ledger: ledger.put([("a", "doc", text)], forgotten.extend),
        lambda ledger: ledger.remove(["a"], forgotten.extend),
    ):
        ledger = Ledger(path)
        change(ledger)
        ledger.close()
    assert forgotten == [text]
    assert not any(text.encode() in file.read_bytes() for file in tmp_path.iterdir())
    assert path.stat().st_mode & 0o077 == 0


def test_a_ledger_in_memory_leaves_no_file_and_knows_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger()
    ledger.put([("a", "a", "a text")], lambda _: None)
    assert Ledger().ids() == []
    assert list(tmp_path.iterdir()) == []


def test_copies_are_the_ledger_itself(ledger):
    for one in (ledger, Ledger()):
        assert copy.deepcopy([one])[0] is copy.copy(one) is one


def test_a_pickled_ledger_is_the_same_file(ledger, forgotten, tmp_path, monkeypatch):
    ledger.put(ROWS, forgotten.extend)
    kept = pickle.dumps(ledger)
    monkeypatch.chdir(tmp_path)
    other = pickle.loads(kept)
    other.remove(["a"], forgotten.extend)
    other.close()
    assert ledger.ids() == ["b", "c"]


def test_a_ledger_in_memory_cannot_be_pickled():
    with pytest.raises(ConfigError, match="in memory cannot be pickled"):
        pickle.dumps(Ledger())
