"""Questions to an index: what is asked, what is counted, what is said of the answer."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, tiny_model
from test_rag import WordEmbedding

from cached_rag import CachedRAG, Engine, StoreConfig, answering
from cached_rag.prompt import Tokenization


@pytest.fixture
def rag(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, chunk in zip("abc", CHUNKS, strict=True):
        (folder / f"{name}.txt").write_text(f"About {name}\n\n{chunk}")
    engine = Engine(tiny_model("llama"), StoreConfig())
    options = {"embedding": WordEmbedding(), "chunk_tokens": 128}
    with CachedRAG.open(tmp_path / "index", engine=engine, **options) as opened:
        opened.ingest(folder, progress=False)
        yield opened


@pytest.fixture
def calls(monkeypatch):
    """Names of tokenisation's methods as they are called, and what they are given."""
    seen = []
    for name in ("render", "tokenize"):
        own = getattr(Tokenization, name)

        def counted(self, what, _own=own, _name=name, **options):
            seen.append((_name, what))
            return _own(self, what, **options)

        monkeypatch.setattr(Tokenization, name, counted)
    return seen


def test_a_prompt_is_rendered_once_and_tokenised_once(rag, calls):
    rag.ask("copper", k=1, max_tokens=2)
    assert [name for name, _ in calls] == ["render", "tokenize"]


def test_times_count_from_the_question(rag, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(answering.time, "perf_counter", lambda: now[0])

    def passing(owner, name, seconds):
        own = getattr(owner, name)

        def slow(*arguments, **options):
            now[0] += seconds
            return own(*arguments, **options)

        monkeypatch.setattr(owner, name, slow)

    passing(rag.embedder, "embed", 5)
    passing(rag.engine.tokenization, "render", 7)
    report = rag.ask("copper", max_tokens=2).report
    assert (report.search_ms, report.ttft_ms, report.total_ms) == (5000, 12000, 12000)
    report = rag.engine.generate([{"role": "user", "content": "Why?"}], max_tokens=2).report
    assert (report.search_ms, report.ttft_ms) == (0, 7000)
