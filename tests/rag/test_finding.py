"""Folders that cannot be looked at, or change meanwhile: nothing is lost, and nothing stops."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from test_identity import docs, ingest, rag, sources  # noqa: F401

from cached_rag.errors import DocumentError
from cached_rag.rag.finding import look_at
from cached_rag.rag.ingest import _changed


@pytest.fixture
def closed(monkeypatch):
    """Folders that may not be read; root, who runs the tests in a container, may read all."""
    folders, scan = set(), os.scandir

    def scandir(place):
        if place in map(str, folders):
            raise PermissionError(13, "Permission denied", str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", scandir)
    return folders


def test_documents_of_a_folder_that_cannot_be_read_stay(rag, docs, closed):  # noqa: F811
    ingest(rag, docs)
    before = sources(rag)
    (docs / "a.txt").unlink()
    closed.add(docs / "deep")
    summary = ingest(rag, docs, delete_missing=True)
    assert summary.deleted == 1
    assert summary.skipped == (
        (str(docs / "deep"), f"{docs / 'deep'} cannot be looked at (Permission denied)"),
    )
    assert sources(rag) == before[1:]
    closed.add(docs)
    assert ingest(rag, docs, delete_missing=True).deleted == 0
    closed.clear()
    shutil.rmtree(docs / "deep")
    assert ingest(rag, docs, delete_missing=True).deleted == 1


def test_texts_of_no_file_are_not_taken_for_files_that_are_gone(rag, docs):  # noqa: F811
    rag.add_texts({"docs/12": "It is told that copper turns green."}, progress=False)
    for options in ({}, {"name": "docs"}):
        with pytest.raises(DocumentError, match="has texts called docs that are of no folder"):
            ingest(rag, docs, delete_missing=True, **options)
    assert ingest(rag, docs, name="files", delete_missing=True).deleted == 0
    assert "docs/12" in sources(rag)


@pytest.mark.parametrize("path", ["~no-such-user/docs", "a\0b", "a\ud800"])
def test_a_path_of_nobody_is_a_clear_error(rag, path):  # noqa: F811
    with pytest.raises(DocumentError):
        rag.delete(path)
    with pytest.raises(DocumentError):
        rag.ingest(path, progress=False)


def test_a_file_that_cannot_be_looked_at_stays(rag, docs, monkeypatch):  # noqa: F811
    ingest(rag, docs)
    is_file = Path.is_file

    def refused(path):
        if path == docs / "a.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert _changed(docs, {docs / "b.txt"}) == [docs / "b.txt"]
    summary = ingest(rag, docs, delete_missing=True)
    assert (summary.deleted, summary.unchanged) == (0, 2)
    assert [path for path, _ in summary.skipped] == [str(docs / "a.txt")]


@pytest.mark.parametrize("error", [FileNotFoundError, NotADirectoryError])
def test_a_folder_that_goes_meanwhile_is_gone(tmp_path, monkeypatch, error):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scan, gone = os.scandir, tmp_path / "deep"

    def scandir(place):
        if place == str(gone):
            raise error(2, "gone", str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", scandir)
    found = look_at(tmp_path)
    assert (found.files, found.unreadable) == ((tmp_path / "a.txt",), ())
    gone = tmp_path  # what was in it is not known to be deleted
    with pytest.raises(DocumentError, match="no file or folder"):
        look_at(tmp_path)


def test_links_to_folders_are_counted_and_not_followed(tmp_path):
    root = tmp_path / "docs"
    for folder in ("docs/deep", "docs/.store", "outside"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.md").write_text("a")
    for name, target in (("x", "outside"), ("y", "docs/.store"), ("z", "docs/deep")):
        (root / name).symlink_to(tmp_path / target)
    found = look_at(root)
    assert found.files == (root / "deep" / "a.md",)
    assert found.passed_over == (("links", 3),)


def test_a_moved_folder_may_hold_a_name_that_is_no_text(rag, docs, tmp_path):  # noqa: F811
    Path(os.fsdecode(os.fsencode(docs) + b"/0\xff.txt")).write_text("A name in another encoding")
    ingest(rag, docs)
    before = sources(rag)
    (tmp_path / "moved").mkdir()
    docs.rename(tmp_path / "moved" / "docs")
    summary = ingest(rag, tmp_path / "moved" / "docs")
    assert (summary.unchanged, len(summary.skipped)) == (3, 1)
    assert sources(rag) == before
