"""A watched folder: what is added, changed and deleted there is soon so in the index."""

from __future__ import annotations

import sys
from threading import Event

import pytest

from cached_rag.errors import DocumentError, MissingPackageError
from cached_rag.rag.ingest import _changed, _ingested


@pytest.fixture
def watched(opened, docs):
    stop = Event()
    rag = opened()
    yield rag, rag.watch(docs, stop=stop)
    stop.set()


def sources(rag):
    return [document.source for document in rag.documents()]


def test_an_index_keeps_in_step_with_a_folder(watched, docs):
    rag, changes = watched
    assert next(changes).added == 3
    # Written while nobody looks: between two summaries, as while one is being printed.
    (docs / "d.txt").write_text("Silver turns black where there is sulphur in the air")
    assert next(changes).added == 1
    assert sources(rag) == ["docs/a.txt", "docs/b.txt", "docs/c.txt", "docs/d.txt"]
    (docs / "d.txt").write_text("Gold stays as it is, whatever there is in the air")
    assert next(changes).added == 1
    assert rag.search("gold", 1)[0].source == "docs/d.txt"
    kvs = rag.engine.library.shelf.store.nbytes
    (docs / "a.txt").unlink()
    assert next(changes).deleted == 1
    assert rag.engine.library.shelf.store.nbytes < kvs
    (docs / "b.txt").rename(docs / "e.txt")
    changed = next(changes)
    assert (changed.added, changed.deleted) == (1, 1)
    assert sources(rag) == ["docs/c.txt", "docs/d.txt", "docs/e.txt"]


def test_the_first_files_of_an_empty_folder_are_named_by_it(opened, tmp_path):
    folder, stop = tmp_path / "notes", Event()
    (folder / "sub").mkdir(parents=True)
    rag = opened()
    changes = rag.watch(folder, stop=stop)
    assert next(changes).added == 0
    (folder / "late.txt").write_text("Tin is soft, and melts in a fire of wood")
    assert next(changes).added == 1  # by the look through all of it behind the first batch
    (folder / "late.txt").unlink()
    assert next(changes).deleted == 1
    (folder / "sub" / "a.txt").write_text("Silver turns black where there is sulphur in the air")
    assert next(changes).added == 1
    assert sources(rag) == ["notes/sub/a.txt"]
    stop.set()


def test_a_bad_file_is_said_and_the_watch_goes_on(watched, docs):
    _, changes = watched
    next(changes)
    (docs / "bad.pdf").write_bytes(b"no pdf")
    assert "bad.pdf" in next(changes).skipped[0][0]
    (docs / "good.txt").write_text("Lead is grey and soft, and is easily cast")
    assert next(changes).added == 1


def test_a_link_that_leads_to_itself_does_not_end_the_watch(watched, docs):
    rag, changes = watched
    next(changes)
    (docs / "loop.txt").symlink_to("loop.txt")
    (docs / "good.txt").write_text("Lead is grey and soft, and is easily cast")
    assert next(changes).added == 1
    with pytest.raises(DocumentError, match="no document"):
        rag.delete(docs / "loop.txt")


def test_what_is_ingested_again(tmp_path):
    inside = tmp_path / ".hidden"
    inside.mkdir()
    (inside / "x.txt").write_text("text")
    (tmp_path / "y.txt").symlink_to(inside / "x.txt")
    assert _changed(tmp_path, set()) == []
    assert _changed(tmp_path, {tmp_path / "y.txt"}) == [tmp_path / "y.txt"]
    assert _changed(tmp_path, {tmp_path / "gone.txt"}) == [tmp_path]


def test_a_file_that_goes_before_its_turn_is_no_error(tmp_path):
    asked = []

    def ingest(path, whole):
        asked.append((path, whole))
        if not path.exists():
            raise DocumentError("there is no file")

    _ingested(tmp_path, tmp_path / "gone.txt", ingest)
    assert asked == [(tmp_path / "gone.txt", False), (tmp_path, True)]
    with pytest.raises(DocumentError):
        _ingested(tmp_path / "nowhere", tmp_path / "nowhere" / "a.txt", ingest)


def test_it_ends_when_it_is_told_to(opened, docs):
    stop = Event()
    changes = opened().watch(docs, stop=stop)
    next(changes)
    stop.set()
    assert list(changes) == []


def test_what_cannot_be_watched_is_refused(opened, docs, monkeypatch):
    with pytest.raises(DocumentError, match=r"no folder at .*a\.txt to watch"):
        next(opened().watch(docs / "a.txt"))
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    with pytest.raises(MissingPackageError, match=r"\[docs\]"):
        next(opened().watch(docs))
