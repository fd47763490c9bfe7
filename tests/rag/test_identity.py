"""What documents of an index are called, however their folder is spelled and wherever it goes."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from conftest import CHUNKS, tiny_model
from indexes import WordEmbedding

from cached_rag import CachedRAG, ConfigError, Engine, StoreConfig
from cached_rag.errors import DocumentError, StoreError


@pytest.fixture
def rag(tmp_path):
    engine = Engine(tiny_model("llama"), StoreConfig(path=str(tmp_path / "index" / "kv")))
    with (
        engine,
        CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding()) as opened,
    ):
        yield opened


@pytest.fixture
def docs(tmp_path, monkeypatch):
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    for name, chunk in zip(("a", "b", "deep/c"), CHUNKS, strict=True):
        (folder / f"{name}.txt").write_text(chunk)
    monkeypatch.chdir(tmp_path)
    return folder


SOURCES = ["docs/a.txt", "docs/b.txt", "docs/deep/c.txt"]


def ingest(rag, path, **options):
    return rag.ingest(path, progress=False, **options)


def sources(rag):
    return [document.source for document in rag.documents()]


def test_however_a_folder_is_spelled_its_documents_are_the_same(rag, docs, monkeypatch):
    ingest(rag, "docs")
    assert sources(rag) == SOURCES
    for spelled in ("./docs/", docs, str(docs), "docs/../docs"):
        assert ingest(rag, spelled).unchanged == 3
    monkeypatch.chdir(docs)
    assert ingest(rag, ".").unchanged == 3
    (docs.parent / "link").symlink_to(docs)
    assert ingest(rag, docs.parent / "link").unchanged == 3
    assert sources(rag) == SOURCES


def test_what_lies_in_a_known_folder_belongs_to_it(rag, docs):
    ingest(rag, docs)
    (docs / "deep" / "d.txt").write_text("A fourth document, about nothing much at all, arrives.")
    assert ingest(rag, docs / "deep").added == 1
    assert ingest(rag, docs / "a.txt").unchanged == 1
    assert sources(rag) == [*SOURCES, "docs/deep/d.txt"]
    (docs / "deep" / "c.txt").unlink()
    (docs / "a.txt").unlink()
    assert ingest(rag, docs / "deep", delete_missing=True).deleted == 1  # a.txt lies elsewhere
    assert sources(rag) == ["docs/a.txt", "docs/b.txt", "docs/deep/d.txt"]


def test_a_folder_around_known_ones_takes_them_in(rag, docs):
    ingest(rag, docs / "deep")
    ingest(rag, docs / "a.txt")
    assert sources(rag) == ["a.txt", "deep/c.txt"]
    assert (ingest(rag, docs).added, rag.index.count()) == (1, (3, 3))
    assert sources(rag) == SOURCES


def test_what_was_ingested_by_two_names_is_taken_in_once(rag, docs):
    ingest(rag, docs / "deep")
    ingest(rag, docs / "deep", name="depth")  # the same place: another name for it
    assert sources(rag) == ["depth/c.txt"]
    ingest(rag, docs / "deep" / "c.txt", name="c")
    assert sources(rag) == ["c", "depth/c.txt"]
    ingest(rag, docs)
    assert sources(rag) == SOURCES
    assert rag.index.count() == (3, 3)


def test_a_moved_folder_keeps_its_documents(rag, docs, tmp_path):
    ingest(rag, docs)
    moved = tmp_path / "elsewhere" / "docs"
    moved.parent.mkdir()
    docs.rename(moved)
    (moved / "a.txt").unlink()
    summary = ingest(rag, moved, delete_missing=True)
    assert (summary.added, summary.unchanged, summary.deleted) == (0, 2, 1)
    assert sources(rag) == SOURCES[1:]
    assert all(CHUNKS[0] not in hit.text for hit in rag.search("lighthouse keeper", 9))
    assert rag.delete(moved / "b.txt").source == "docs/b.txt"


def test_where_the_old_place_may_not_be_looked_at_it_is_not_known_to_have_moved(
    rag, docs, tmp_path, monkeypatch
):
    ingest(rag, docs)
    moved = tmp_path / "elsewhere" / "docs"
    shutil.copytree(docs, moved)
    stat = Path.stat

    def refused(path, **options):
        if path == docs:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(StoreError, match="allow this user to search"):
        ingest(rag, moved)
    assert ingest(rag, moved, name="docs").unchanged == 3


def test_two_folders_of_one_name_are_not_mixed_up(rag, docs, tmp_path):
    ingest(rag, docs)
    other = tmp_path / "other" / "docs"
    other.mkdir(parents=True)
    (other / "a.txt").write_text("Quite another document, which has the same name by accident.")
    for _ in range(2):
        with pytest.raises(DocumentError, match=r"documents called docs from .* by another name"):
            ingest(rag, other)
        if docs.exists():
            shutil.rmtree(docs)  # nor when the first is gone, for nothing of it is here
    assert ingest(rag, other, name="others").added == 1
    assert sources(rag) == [*SOURCES, "others/a.txt"]
    assert ingest(rag, other).unchanged == 1
    assert ingest(rag, other, name="docs", delete_missing=True).deleted == 2
    assert sources(rag) == ["docs/a.txt"]
    for bad in ("", "a/b", ".."):
        with pytest.raises(ConfigError, match="cannot be the name"):
            ingest(rag, other, name=bad)


def test_same_files_in_different_folders_are_different_documents(rag, tmp_path):
    for name, chunk in zip("ab", CHUNKS, strict=False):
        (tmp_path / name).mkdir()
        (tmp_path / name / "readme.md").write_text(chunk)
        ingest(rag, tmp_path / name)
    assert sources(rag) == ["a/readme.md", "b/readme.md"]
    for name in "ab":
        (tmp_path / "single" / name).mkdir(parents=True)
        shutil.copy(tmp_path / name / "readme.md", tmp_path / "single" / name)
    ingest(rag, tmp_path / "single" / "a" / "readme.md")
    with pytest.raises(DocumentError, match=r"called readme.md from"):
        ingest(rag, tmp_path / "single" / "b" / "readme.md")


def test_deleting_takes_sources_and_paths_and_says_what_went(rag, docs, monkeypatch):
    ingest(rag, docs)
    first = rag.delete("docs/a.txt")
    assert (first.source, first.chunks, first.kvs) == ("docs/a.txt", 1, 2)
    assert rag.delete(docs / "b.txt").source == "docs/b.txt"
    monkeypatch.chdir(docs)
    with pytest.raises(DocumentError, match=r"no document c.txt; name one that it has"):
        rag.delete("c.txt")
    assert rag.delete("deep/c.txt").source == "docs/deep/c.txt"
    assert rag.documents() == []
    with pytest.raises(DocumentError, match="cached-rag list"):
        rag.delete("docs/a.txt")
    (docs / "odd\nname.txt").write_text(CHUNKS[0])
    ingest(rag, docs / "odd\nname.txt")
    assert rag.delete(r"odd\nname.txt").source == "odd\nname.txt"  # as `list` shows it


def test_a_path_that_leads_to_two_documents_deletes_neither(rag, docs):
    ingest(rag, docs)
    ingest(rag, docs / "deep", name="deep")
    with pytest.raises(DocumentError, match=r"say which: deep/c.txt, docs/deep/c.txt"):
        rag.delete(docs / "deep" / "c.txt")
    assert len(rag.documents()) == 4
    ingest(rag, docs)  # the folder around it takes it in: once is enough
    assert sources(rag) == SOURCES


def test_a_text_may_have_the_name_of_a_folder_that_is_gone_from_the_index(rag, docs):
    ingest(rag, docs / "deep")
    rag.delete("deep/c.txt")
    for text in CHUNKS:
        rag.add_texts({"deep/12": text}, progress=False)
    with pytest.raises(DocumentError, match="texts called deep that are of no folder"):
        ingest(rag, docs / "deep", delete_missing=True)
    assert rag.index.texts("deep/12")[0].endswith(CHUNKS[-1])


def test_a_text_may_have_the_name_of_a_folder_that_another_took_in(rag, docs):
    ingest(rag, docs / "deep")
    ingest(rag, docs)
    for text in CHUNKS:
        rag.add_texts({"deep/12": text}, progress=False)
    assert ingest(rag, docs, delete_missing=True).deleted == 0
    assert sources(rag) == ["deep/12", *SOURCES]


def test_deleting_needs_no_model(rag, docs, tmp_path, monkeypatch):
    ingest(rag, docs)
    rag.close()
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with CachedRAG.open(tmp_path / "index") as bare:
        assert bare.delete("docs/a.txt").kvs == 2
        assert [document.is_encoded for document in bare.documents()] == [True, True]


def test_documents_say_what_they_are(rag, docs):
    (docs / "long.txt").write_text("A long one\n\n" + "\n\n".join(CHUNKS * 9))
    ingest(rag, docs)
    found = {document.source: document for document in rag.documents()}["docs/long.txt"]
    assert (found.title, found.is_encoded) == ("A long one", True)
    assert found.chunks == len(rag.index.texts("docs/long.txt")) > 1


def test_an_index_stays_where_it_was_opened(docs, tmp_path, monkeypatch, model_folder):
    (tmp_path / "elsewhere").mkdir()
    options = {"embedding": WordEmbedding(), "dtype": "float32", "memory_bytes": 1}
    with CachedRAG.open("index", model_folder, **options) as rag:
        ingest(rag, "docs")
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert rag.ask("copper?", k=1, max_tokens=2).report.cached_tokens > 0
    monkeypatch.chdir(tmp_path)
    with CachedRAG.open("index") as rag:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert rag.delete("docs/a.txt").kvs == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []
