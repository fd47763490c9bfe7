"""Ingesting again: what has not changed is not read, and no model is loaded for it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
from conftest import CHUNKS, tiny_model, tiny_tokenizer
from indexes import WordEmbedding
from typer.testing import CliRunner

from cached_rag import CachedRAG, Engine
from cached_rag.cli.main import app
from cached_rag.rag import finding
from cached_rag.rag.reading_process import ConfinedReader


class Counted(WordEmbedding):
    def __init__(self):
        self.calls = 0

    def embed(self, texts):
        self.calls += 1
        return super().embed(texts)


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, chunk in zip("abc", CHUNKS, strict=True):
        (folder / f"{name}.txt").write_text(chunk)
    return folder


@pytest.fixture
def read(monkeypatch):
    """The names of files that were read; files count as settled at once."""
    names, load = [], ConfinedReader.load

    def noted(reader, path):
        names.append(path.name)
        return load(reader, path)

    monkeypatch.setattr(ConfinedReader, "load", noted)
    monkeypatch.setattr(finding, "_SETTLED_NS", 0)
    return names


@pytest.fixture
def loaded(monkeypatch):
    """A list with an entry for each model that was loaded."""
    times, load = [], Engine.load

    def noted(*given, **options):
        times.append(given)
        return load(*given, **options)

    monkeypatch.setattr(Engine, "load", noted)
    return times


@pytest.fixture
def opening(tmp_path, docs, model_folder):
    """Makes what ingests into the same index, opened anew by the same settings."""

    def made(**how):
        def ingested(**options):
            embedding = Counted()
            with CachedRAG.open(
                tmp_path / "index", model_folder, embedding=embedding, **how
            ) as rag:
                summary = rag.ingest(docs, progress=False, **options)
            return replace(summary, seconds=0.0), embedding.calls

        return ingested

    return made


@pytest.fixture
def again(opening):
    return opening()


@pytest.fixture
def signed(opening):
    return opening(signing_key="k" * 16)


def test_nothing_new_is_not_read_and_loads_no_model(again, read, loaded):
    first, _ = again()
    assert (first.added, len(loaded), read) == (3, 1, ["a.txt", "b.txt", "c.txt"])
    second, calls = again()
    assert (len(loaded), len(read), calls) == (1, 3, 0)
    assert second == replace(first, added=0, unchanged=3, encoded=0, tokens=0)


def test_an_edit_of_the_same_size_and_time_is_read(again, read, docs):
    again()
    file, times = docs / "a.txt", (docs / "a.txt").stat()
    file.write_text(CHUNKS[0].upper())
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    summary, _ = again()
    assert (summary.added, summary.unchanged) == (1, 2)
    assert read[3:] == ["a.txt"]


def test_what_changed_a_moment_ago_is_read_again(again, read, loaded, monkeypatch):
    monkeypatch.setattr(finding, "_SETTLED_NS", 10**15)
    again()
    summary, calls = again()
    assert (summary.unchanged, calls) == (3, 0)
    assert len(read) == 6
    assert len(loaded) == 1  # the content is the same


def test_a_touched_file_is_read_and_loads_no_model(again, read, loaded, docs):
    again()
    os.utime(docs / "a.txt")
    assert again()[0].unchanged == 3
    assert (read[3:], len(loaded)) == (["a.txt"], 1)
    again()
    assert len(read) == 4


def test_kv_that_is_gone_is_computed_anew(again, read, loaded, tmp_path):
    first, _ = again()
    files = sorted(path for path in (tmp_path / "index" / "kv").rglob("*") if path.is_file())
    kept = [path for path in files if ".sqlite" in path.name]
    shutil.rmtree(tmp_path / "index" / "kv")
    assert kept
    summary, _ = again()
    assert (summary.added, summary.encoded, len(loaded)) == (0, first.encoded, 2)
    assert len(read) == 3


def test_files_of_kv_that_are_gone_are_computed_anew(again, read, loaded, tmp_path):
    first, _ = again()
    shutil.rmtree(tmp_path / "index" / "kv" / "blobs")
    assert (again()[0].encoded, len(loaded)) == (first.encoded, 2)
    again()
    assert len(loaded) == 2


def test_kv_is_signed_where_there_is_a_key_by_now(again, read, loaded, signed):
    first, _ = again()
    assert (signed()[0].encoded, len(loaded)) == (first.encoded, 2)
    assert (signed()[0].encoded, len(loaded)) == (0, 2)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_texts_that_never_have_kv_load_no_model(tmp_path, docs, loaded, family):
    (docs / "short.txt").write_text("The valve opens at six bars now")
    tiny_model(family).decoder.model.save_pretrained(tmp_path / family)
    tiny_tokenizer().save_pretrained(tmp_path / family)
    for _ in range(2):
        with CachedRAG.open(tmp_path / "i", tmp_path / family, embedding=WordEmbedding()) as rag:
            rag.ingest(docs, progress=False)
    assert len(loaded) == 1


def test_files_that_are_gone_are_named_until_they_are_deleted(again, docs, read, loaded):
    again()
    (docs / "b.txt").unlink()
    (docs / "letter.doc").write_text("no reader")
    summary, _ = again()
    assert (summary.missing, summary.deleted, summary.unchanged) == (("docs/b.txt",), 0, 2)
    left = "0 deleted, 1 passed over (see `passed_over`), 1 missing (see `missing`); "
    assert left in str(summary)
    summary, _ = again(delete_missing=True)
    assert (summary.missing, summary.deleted) == ((), 1)
    assert len(loaded) == 1


def test_a_watched_file_that_becomes_a_link_to_elsewhere_is_skipped(
    tmp_path, docs, model_folder, monkeypatch
):
    def change(place, ingest, **_):
        yield ingest(place, True)
        (docs / "a.txt").unlink()
        (docs / "a.txt").symlink_to(tmp_path / "secret.txt")
        yield ingest(docs / "a.txt", False)

    (tmp_path / "secret.txt").write_text("The secret.")
    monkeypatch.setattr("cached_rag.rag.rag.watch", change)
    with CachedRAG.open(tmp_path / "index", model_folder, embedding=WordEmbedding()) as rag:
        first, second = rag.watch(docs)
        assert (first.added, second.added) == (3, 0)
        assert "leads out of" in second.skipped[0][1]
        assert not any("secret" in text for text in rag.index.all_texts())


def test_the_seconds_of_an_ingestion_are_those_of_all_of_it(tmp_path, docs, model_folder):
    with CachedRAG.open(tmp_path / "index", model_folder, embedding=WordEmbedding()) as rag:
        assert rag.ingest(docs, progress=False).seconds > 0
        assert rag.ingest(docs, progress=False).seconds > 0
        assert rag.add_texts({"x": CHUNKS[0]}, progress=False).seconds > 0


def test_the_command_line_names_what_is_gone_and_makes_no_index_of_nothing(
    tmp_path, docs, model_folder
):
    def run(*given):
        return CliRunner().invoke(app, list(map(str, given)))

    index = ("--index", tmp_path / "index")
    done = run("ingest", tmp_path / "nowhere", *index, "--model", model_folder)
    assert (done.exit_code, (tmp_path / "index").exists()) == (1, False)
    (docs / "a\nforged.txt").write_text("The valve is red.")
    assert run("ingest", docs, *index, "--model", model_folder).exit_code == 0
    (docs / "b.txt").unlink()
    said = run("ingest", docs, *index).output
    assert "1 documents are gone" in said.replace("\n", " ")
    assert "docs/b.txt" in said
    listed = run("list", *index).output
    assert "a\\nforged.txt" in listed
    assert not any(line.startswith("forged") for line in listed.splitlines())
