"""The bars of an ingestion: what they count, and that they move within one long document."""

from __future__ import annotations

from typing import ClassVar

import pytest
from conftest import CHUNKS, tiny_model
from indexes import WordEmbedding
from tqdm import tqdm

from cached_rag import CachedRAG, Engine, StoreConfig
from cached_rag.rag import chunks, progress
from cached_rag.spi import LanguageModel


class Bar(progress.Bar):
    """Remembers where it stood."""

    made: ClassVar[dict[str, Bar]] = {}

    def __init__(self, *args, **options):
        self.seen = [0]
        super().__init__(*args, **options)
        self.made[options["desc"]] = self

    def update(self, n=1):
        super().update(n)
        self.seen.append(self.n)

    def set_postfix_str(self, s="", refresh=True):
        self.said = [*getattr(self, "said", ()), s]


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr(progress, "Bar", Bar)
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
    options = {"embedding": WordEmbedding(), "chunk_tokens": 64, "first_exact": True}
    with engine, CachedRAG.open(tmp_path / "index", engine=engine, **options) as opened:
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
    monkeypatch.setattr(chunks, "EMBED_CHUNKS", 20)
    rag.ingest(long_file)
    bar, size = bars["reading"], long_file.stat().st_size
    assert bar.n == bar.total == size
    assert len({at for at in bar.seen if 0 < at < size}) > 3


def test_a_bar_says_that_models_are_loaded_where_they_are(rag, bars, long_file):
    rag.ingest(long_file)
    assert bars["reading"].said == ["loading models", ""]
    long_file.touch()
    rag.ingest(long_file)
    assert not hasattr(bars["reading"], "said")


def test_a_file_that_is_skipped_is_done(rag, bars, tmp_path):
    (tmp_path / "empty.txt").write_text(" " * 50)
    assert rag.ingest(tmp_path / "empty.txt").skipped
    assert bars["reading"].n == 50


def test_encoding_tells_modules_and_tokens(engine):
    modules, tokens = [], []
    done = engine.encode(
        CHUNKS, progress=modules.append, token_progress=tokens.append, context=None
    )
    assert (sum(modules), sum(tokens)) == (3, done.tokens)
    assert engine.register(CHUNKS) == done.tokens


def test_answers_go_on_between_batches_and_progress_may_ask(engine, monkeypatch):
    monkeypatch.setattr("cached_rag.library.encode.BATCH_TOKENS", 1)
    answers = []
    engine.encode(CHUNKS, progress=lambda _: answers.append(engine.generate("Why?", max_tokens=1)))
    assert [answer.report.output_tokens for answer in answers] == [1] * len(CHUNKS)


def test_what_another_thread_encodes_meanwhile_is_not_encoded_again(engine, monkeypatch):
    monkeypatch.setattr("cached_rag.library.encode.BATCH_TOKENS", 1)
    passes = []
    own = LanguageModel.prefill

    def counted(self, *given, **options):
        passes.append(given)
        return own(self, *given, **options)

    monkeypatch.setattr(LanguageModel, "prefill", counted)
    engine.encode(CHUNKS, context=None, progress=lambda _: engine.encode(CHUNKS, context=None))
    assert len(passes) <= len(CHUNKS) + 1  # the beginning of text, and each chunk once


def test_an_encoding_shows_its_tokens(bars):
    engine = Engine(tiny_model("llama"))
    with progress.encode_progress(True) as shown:
        done = engine.encode(CHUNKS, **shown)
    bar = bars["prefilling"]
    assert bar.n == bar.total == done.tokens
    assert bar.delay > 0  # so that a few chunks draw nothing
    with progress.encode_progress(True) as shown:
        engine.encode(CHUNKS, **shown)
    assert bars["prefilling"].n == 0


@pytest.mark.parametrize(("wanted", "is_terminal", "hidden"), [
    (None, True, False), (None, False, True), (False, True, True), (True, False, False),
])  # fmt: skip
def test_a_bar_is_for_terminals(bars, monkeypatch, wanted, is_terminal, hidden):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with progress.encode_progress(wanted):
        assert bool(bars["prefilling"].disable) is hidden


def test_a_function_hears_what_is_done_and_what_is_to_do(bars, monkeypatch):
    monkeypatch.setattr("cached_rag.library.encode.BATCH_TOKENS", 1)
    engine, heard = Engine(tiny_model("llama")), []
    with progress.encode_progress(lambda *counts: heard.append(counts)) as shown:
        done = engine.encode(CHUNKS, **shown)
    assert bars == {}
    assert [at for at, _ in heard] == sorted(at for at, _ in heard)
    assert (heard[0], heard[-1]) == ((0, done.tokens), (done.tokens, done.tokens))
    assert len(heard) == 4


def test_a_bar_waits_for_no_other_process(monkeypatch):
    class SharedLock:
        def __enter__(self):
            raise AssertionError("a killed process may hold it")

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(tqdm, "_lock", SharedLock(), raising=False)
    with pytest.raises(AssertionError):
        tqdm(disable=True)  # control
    for is_shown in (True, False):
        with progress.counting("prefilling", 1, is_shown) as bar:
            bar.update(1)


@pytest.mark.parametrize("wanted", [None, True])
def test_without_standard_error_there_is_no_bar(monkeypatch, wanted):
    monkeypatch.setattr("sys.stderr", None)  # as of pythonw, or behind 2>&-
    with progress.counting("reading", 10, wanted) as bar:
        bar.update(10)
        assert bar.disable
