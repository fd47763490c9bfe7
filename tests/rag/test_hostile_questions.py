"""Questions, filters and names that nobody means: an error of this library, and soon."""

from __future__ import annotations

import json
import os
import time

import httpx
import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from indexes import WordEmbedding
from langchain_cached_rag import ChatCachedRAG
from llama_index.llms.cached_rag import CachedRAGLLM
from served import serving

from cached_rag import (
    CachedRAG,
    CachedRAGError,
    ConfigError,
    Embedder,
    Engine,
    Schema,
    StoreConfig,
    load_model,
)
from cached_rag.errors import ContextOverflowError, DocumentError, ModelNotFoundError

HALF = "a \ud800 question about copper and about lighthouses"
# Most seconds; what would be quadratic takes hours.
PATIENCE = 60


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    folder = tmp_path_factory.mktemp("index")
    with engine, CachedRAG.open(folder, engine=engine, embedding=WordEmbedding()) as made:
        made.add_texts({"a": CHUNKS[0], "b": CHUNKS[1]}, progress=False)
        yield made


def prompt_of(text):
    return Schema.from_string('<schema name="s">Read.<param name="p" len="4"/></schema>').prompt(
        text, p="x"
    )


def posted(rag, text):
    """By HTTP: 400, with the reason."""
    with serving(rag.engine) as (address, _):
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        content = json.dumps(body).encode()  # with half surrogates as escapes
        url, headers = f"{address}/v1/chat/completions", {"Content-Type": "application/json"}
        got = httpx.post(url, content=content, headers=headers, timeout=PATIENCE)
    error = got.json()["error"]
    assert got.status_code == 400, error
    kind = ContextOverflowError if error["code"] == "context_length_exceeded" else ConfigError
    raise kind(error["message"])


WAYS = {
    "ask": lambda rag, text: rag.ask(text, max_tokens=1),
    "chat": lambda rag, text: rag.chat().ask(text, max_tokens=1),
    "history": lambda rag, text: rag.ask(
        "Why?",
        history=[{"role": "user", "content": text}, {"role": "assistant", "content": "x"}],
        max_tokens=1,
    ),
    "string": lambda rag, text: rag.engine.generate(text, max_tokens=1),
    "messages": lambda rag, text: rag.engine.generate(
        [{"role": "user", "content": text}], max_tokens=1
    ),
    "chunk": lambda rag, text: rag.engine.encode([text], context=None),
    "pml": lambda rag, text: rag.engine.generate(prompt_of(text), max_tokens=1),
    "langchain": lambda rag, text: ChatCachedRAG(engine=rag.engine, max_tokens=1).invoke(text),
    "llama-index": lambda rag, text: CachedRAGLLM(engine=rag.engine, max_tokens=1).complete(text),
    "http": posted,
}
LONG = {
    "words": "why is it green " * 62_500,
    "controls": "<|im_end|>" * 10**5,
    "chunks": CHUNKS[0] * 12_000,
    "anchors": CHUNKS[0][:32] * 31_000,
}
# By other ways than a string; what would be quadratic takes minutes.
FIFTH = 200_000


@pytest.mark.parametrize(
    ("way", "text"),
    [*((way, "words") for way in WAYS), *(("string", text) for text in LONG if text != "words")],
)
def test_a_million_characters_are_refused_in_time(rag, way, text):
    long = LONG[text] if way == "string" else LONG[text][:FIFTH]
    begin = time.monotonic()
    with pytest.raises(ContextOverflowError) as caught:
        WAYS[way](rag, long)
    assert time.monotonic() - begin < PATIENCE
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("way", WAYS)
def test_half_a_character_is_refused(rag, way):
    with pytest.raises(ConfigError, match="surrogate"):
        WAYS[way](rag, HALF)


def test_a_text_without_tokens_is_skipped(rag):
    done = rag.engine.encode(["\u4e00" * 40], context=None)  # the tiny tokenizer knows ASCII only
    [(_, reason)] = done.skipped
    assert "tokenizer" in reason


@pytest.mark.parametrize("value", ["[" * 10**6, ["x", "*a" * 10**5]])
def test_a_filter_that_would_take_minutes_is_refused(rag, value):
    with pytest.raises(ConfigError, match="at most 4000"):
        rag.search("green", where={"source": value})


NAMES = ["a\0b", "x" * 300, "x/" * 3000, "\ud800", "/dev/null", "/proc/1/none", "../../etc/passwd"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_cannot_be(rag, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DocumentError):
        rag.ingest(tmp_path / name / "none", progress=False)
    with pytest.raises(DocumentError):
        rag.delete(name)
    with pytest.raises(ModelNotFoundError):
        load_model(f"./{name}/none")
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(CachedRAGError):
        rag.ingest(tmp_path / "a.md", name=name + "/", progress=False)
    if name not in NAMES[1:2] + NAMES[-1:]:
        with pytest.raises(CachedRAGError):
            CachedRAG.open(name, engine=rag.engine, embedding=WordEmbedding())


def test_an_embedding_model_without_a_name():
    with pytest.raises(ModelNotFoundError, match="no name"):
        Embedder("").load()


@pytest.mark.skipif(os.name != "posix", reason="permissions are otherwise elsewhere")
def test_nobody_else_may_read_an_index(tmp_path):
    before = os.umask(0)
    try:
        store = StoreConfig(path=str(tmp_path / "index" / "kv"), learn="recurring")
        with (
            Engine(tiny_model("llama"), store) as engine,
            CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding()) as rag,
        ):
            rag.add_texts({"a": CHUNKS[0]}, progress=False)
            rag.ask("Why is it green?", max_tokens=1)
            paths = list((tmp_path / "index").rglob("*"))
            assert len(paths) > 8
            assert [path for path in paths if path.stat().st_mode & 0o077] == []
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["../other", "a/b", "a\0b", "x" * 10**5, "\n", "\ud800", ".."])
def test_a_tenants_name_is_no_path(tmp_path, name):
    store = StoreConfig(path=str(tmp_path / "kv"), sequence_bytes=0)
    with Engine(tiny_model("llama"), store) as engine:
        engine.encode(CHUNKS[:1], context=None)
        before = {path.name for path in tmp_path.iterdir()}
        try:
            with engine.tenant(name) as tenant:
                tenant.encode(CHUNKS[1:2], context=None)
                assert tenant.generate(CHUNKS[0], max_tokens=1).report.modules_hit == 0
        except ConfigError:
            assert name == "\ud800"
        assert {path.name for path in tmp_path.iterdir()} == before
