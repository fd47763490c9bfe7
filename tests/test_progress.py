"""The bars of an ingestion: what they count, and that they move within one long document."""

from __future__ import annotations

from typing import ClassVar

import pytest
from conftest import CHUNKS, tiny_model
from test_rag import WordEmbedding

from cached_rag import CachedRAG, Engine, StoreConfig
from cached_rag.rag import ingest, progress


class Bar(progress.tqdm):
    """Remembers where it stood, and what it said."""

    made: ClassVar[dict[str, Bar]] = {}

    def __init__(self, *args, **options):
        self.seen, self.said = [0], []
        super().__init__(*args, **options)
        self.made[options["desc"]] = self

    def update(self, n=1):
        super().update(n)
        self.seen.append(self.n)

    def set_postfix_str(self, s="", refresh=True):
        super().set_postfix_str(s, refresh)
        self.said.append(s)


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr(progress, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", {})
    return Bar.made


@pytest.fixture
def long_file(tmp_path):
    text = "\n\n".join(f"{number}. {chunk}" for number in range(60) for chunk in CHUNKS)
    (tmp_path / "long.txt").write_text(text)
    return tmp_path / "long.txt"


@pytest.fixture
def rag(tmp_path):
    engine = Engine(tiny_model("llama"), StoreConfig(path=str(tmp_path / "index" / "kv")))
    options = {"embedding": WordEmbedding(), "chunk_tokens": 64, "context": "both"}
    with CachedRAG.open(tmp_path / "index", engine=engine, **options) as opened:
        yield opened


def test_prefilling_counts_tokens_and_moves_within_a_document(rag, bars, long_file):
    summary = rag.ingest(long_file)
    bar = bars["prefilling"]
    assert bar.unit == "token"
    assert bar.total == bar.n == summary.tokens  # both passes
    assert len(set(bar.seen)) > 8
    assert bar.seen == sorted(bar.seen)
    again = rag.ingest(long_file)
    assert again.tokens == 0
    assert bars["prefilling"].n == bars["prefilling"].total == summary.tokens


def test_reading_counts_bytes_and_moves_within_a_document(rag, bars, long_file, monkeypatch):
    monkeypatch.setattr(progress, "LONG_BYTES", 100)
    monkeypatch.setattr(ingest, "EMBED_CHUNKS", 20)
    rag.ingest(long_file)
    bar, size = bars["reading"], long_file.stat().st_size
    assert bar.n == bar.total == size
    assert len({at for at in bar.seen if 0 < at < size}) > 3
    chunks = len(rag.index.texts("long.txt"))
    assert bar.said[:3] == ["reading", "splitting", f"embedding {chunks} chunks"]


def test_a_file_that_is_skipped_is_done(rag, bars, tmp_path):
    (tmp_path / "empty.txt").write_text(" " * 50)
    assert rag.ingest(tmp_path / "empty.txt").skipped
    assert bars["reading"].n == 50


def test_encoding_tells_modules_and_tokens(engine):
    modules, tokens = [], []
    done = engine.encode(CHUNKS, progress=modules.append, token_progress=tokens.append)
    assert (sum(modules), sum(tokens)) == (3, done.tokens)
    assert engine.register(CHUNKS) == done.tokens
