"""The server in front of an index: answers from its documents, embeddings, web pages that ask."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from conftest import CHUNKS, tiny_model
from served import GREEDY, NAME, reads, running, serving, until

from cached_rag import CachedRAG, Engine
from cached_rag.errors import ContextOverflowError
from cached_rag.rag.asking import NOTHING_FOUND
from cached_rag.rag.chunks import Embedder
from cached_rag.rag.folder import MOST_CHUNKS
from cached_rag.server.index import ServedIndex

PAGE = "https://chat.example"
QUESTION = [{"role": "user", "content": "Why is copper green?"}]


class Letters:
    """Embeds texts by the letters in them."""

    name = "letters"

    def embed(self, texts):
        counts = np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts])
        vectors = counts + 1e-3
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


class Words(Letters):
    """Reads and counts words, of a text no more than three."""

    window = 3

    def embed(self, texts):
        return super().embed([" ".join(text.split()[:3]) for text in texts])

    def count_tokens(self, texts):
        return [len(text.split()) for text in texts]


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    for number, text in enumerate(CHUNKS):
        (folder / f"{number}.txt").write_text(f"{text} {text}")
    engine = Engine(tiny_model("llama"))
    with (
        engine,
        CachedRAG.open(
            tmp_path_factory.mktemp("index") / "manual", engine=engine, embedding=Letters()
        ) as made,
    ):
        made.ingest(folder, progress=False)
        yield made


@pytest.fixture(scope="module")
def address(rag):
    keys = ["main", "other:theirs"]
    with serving(rag.engine, keys, cors_origin=(PAGE,), index=ServedIndex(rag)) as (found, _):
        yield found


@contextlib.contextmanager
def asking(address, key="main"):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as made:
        yield made


@pytest.fixture
def client(address):
    with asking(address) as made:
        yield made


def test_questions_are_answered_from_the_documents(client, rag):
    options = {"model": "index:manual", "temperature": 0, "max_tokens": 8}
    done = client.chat.completions.create(messages=QUESTION, **options)
    mine = rag.ask(QUESTION[0]["content"], max_tokens=8)
    assert done.choices[0].message.content == mine.text
    found = [(one["source"], one["text"]) for one in done.sources]
    assert found == [(hit.source, hit.text) for hit in mine.sources]
    assert done.model == "index:manual"
    assert done.usage.prompt_tokens == mine.report.prompt_tokens
    chunks = list(client.chat.completions.create(messages=QUESTION, stream=True, **options))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == mine.text
    assert [one["source"] for one in chunks[0].sources] == [hit.source for hit in mine.sources]
    later = [
        {"role": "system", "content": "Talk like a sailor."},
        *QUESTION,
        {"role": "assistant", "content": mine.text},
        {"role": "user", "content": "And why?"},
    ]
    again = client.chat.completions.create(messages=later, **options)
    assert (
        again.choices[0].message.content == rag.ask("And why?", history=[mine], max_tokens=8).text
    )
    plain = client.chat.completions.create(messages=QUESTION, **options | {"model": NAME})
    assert not hasattr(plain, "sources")


def test_an_index_answers_as_ask_does_unless_several_answers_are_wanted(client, rag):
    options = {"model": "index:manual", "messages": QUESTION, "max_tokens": 12}
    asked = rag.ask(QUESTION[0]["content"], max_tokens=12).text
    for more in ({}, {"top_p": 0.9}):
        (made,) = client.chat.completions.create(**options, **more).choices
        assert made.message.content == asked
    several = client.chat.completions.create(**options, n=3, seed=5).choices
    assert len({choice.message.content for choice in several}) > 1


def test_an_empty_answer_has_its_sources_when_it_is_streamed(client):
    options = {"model": "index:manual", "temperature": 0, "max_tokens": 8}
    done = client.chat.completions.create(messages=QUESTION, **options)
    options["stop"] = [done.choices[0].message.content[0]]
    first, *_, last = client.chat.completions.create(messages=QUESTION, stream=True, **options)
    assert [one["source"] for one in first.sources] == [one["source"] for one in done.sources]
    assert first.choices[0].delta.role == "assistant"
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"messages": [{"role": "assistant", "content": "x"}]}, "user's last message"),
        ({"extra_body": {"cache_salt": "x"}}, "cache_salt"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": " "}]}, "needs some text"),
    ],
)
def test_what_an_index_cannot_do_is_said(client, changed, says):
    asked = {"model": "index:manual", "messages": QUESTION, "max_tokens": 4} | changed
    with pytest.raises(openai.BadRequestError, match=says):
        client.chat.completions.create(**asked)


def test_the_default_length_is_cut_to_what_a_long_conversation_leaves(client, rag):
    def history(words):
        return [{"role": "user", "content": "cat " * words}, {"role": "assistant", "content": "y"}]

    def fits(words):
        try:
            rag.stream(QUESTION[0]["content"], history=history(words), max_tokens=256).close()
        except ContextOverflowError:
            return False
        return True

    words = next(words for words in range(0, 2000, 20) if not fits(words))
    asked = {"model": "index:manual", "messages": [*history(words), *QUESTION]}
    for n in (1, 2):
        found = client.chat.completions.create(**asked, n=n)
        assert 0 < found.usage.completion_tokens < n * 256
        assert found.sources
    longer = {"messages": [*history(5000), *QUESTION]}
    alone = {"max_tokens": 5000, "messages": QUESTION}
    for refused, says in (
        ({"max_tokens": 256}, "chunk exceed the model's context"),  # it is nobody's to cut
        (longer, "the model's context"),
        (alone, "max_tokens=5000 exceeds"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            client.chat.completions.create(**asked | refused)


def test_a_question_that_is_surely_too_long_is_not_searched_for(client, rag, monkeypatch):
    """Neither what embeds it nor what tokenises it looks at its length first."""
    read, embed = reads(monkeypatch), Letters.embed
    monkeypatch.setattr(Letters, "embed", lambda me, texts: read.extend(texts) or embed(me, texts))
    said = [{"role": "user", "content": "word " * 100_000}, {"role": "assistant", "content": "y"}]
    for messages in (said[:1], [*said, *QUESTION]):
        for length in ({}, {"max_tokens": 4}):
            with pytest.raises(openai.BadRequestError, match="exceed the model's context"):
                client.chat.completions.create(model="index:manual", messages=messages, **length)
    assert not read
    client.chat.completions.create(model="index:manual", messages=QUESTION, max_tokens=4)
    assert QUESTION[0]["content"] in read


@pytest.mark.real
def test_an_embedding_model_reads_no_more_of_a_text_than_it_sees(monkeypatch):
    embedder, given = Embedder(), []
    embedder.load()
    model = embedder._model
    encode, options = model.encode, {"normalize_embeddings": True, "show_progress_bar": False}

    def recorded(texts, **options):
        given.extend(texts)
        return encode(texts, **options)

    monkeypatch.setattr(model, "encode", recorded)
    texts = [f"{chunk} " * 300 for chunk in CHUNKS] + ["    indented\n" * 9000, "copper"]
    found = embedder.embed(texts)
    assert max(map(len, texts)) > 40_000
    assert max(map(len, given)) < 20_000
    np.testing.assert_array_equal(found, encode(texts, **options))
    assert embedder.count_tokens(["copper", "copper " * 300]) == [3, 302]  # with a mark at each end
    assert embedder.window == 256
    assert min(embedder.count_tokens(texts[:-1])) > 256
    monkeypatch.setattr(type(model), "max_seq_length", None)  # as of models that see all of a text
    given.clear()
    embedder.embed(texts)
    assert given == texts
    assert embedder.window is None


def test_who_leaves_has_no_more_texts_embedded(rag, monkeypatch):
    calls, embed = [], Letters.embed

    def slow(self, texts):
        calls.extend(texts)
        time.sleep(0.05)
        return embed(self, texts)

    monkeypatch.setattr(Letters, "embed", slow)
    body = {"model": "letters", "input": ["copper"] * 2048}  # 13 seconds
    with running(rag.engine, index=ServedIndex(rag)) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.address}/v1/embeddings", json=body, timeout=0.5)
        assert until(lambda: calls and not server.server_state.tasks)
    assert len(calls) < 2048


def test_texts_that_are_embedded_hold_no_answer(rag, monkeypatch):
    goes_on, embed = threading.Event(), Letters.embed

    def held(self, texts):
        goes_on.wait(60)
        return embed(self, texts)

    monkeypatch.setattr(Letters, "embed", held)
    clients = 40  # more than asyncio has threads
    with (
        ThreadPoolExecutor(clients) as threads,
        running(rag.engine, index=ServedIndex(rag)) as server,
    ):
        body = {"model": "letters", "input": ["copper"] * 9}
        url = f"{server.address}/v1/embeddings"
        asked = [threads.submit(httpx.post, url, json=body, timeout=90) for _ in range(clients)]
        try:
            assert until(lambda: len(server.server_state.tasks) == clients)
            body = GREEDY | {"messages": QUESTION}
            chat = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=20)
            assert chat.status_code == 200
        finally:
            goes_on.set()
        assert {one.result().status_code for one in asked} == {200}


def test_texts_are_embedded_as_the_index_embeds_them(client):
    texts = ["Copper", "a lamp"]
    expected = Letters().embed(texts)
    for form in ("float", "base64"):
        done = client.embeddings.create(model="letters", input=texts, encoding_format=form)
        vectors = [one.embedding for one in done.data]
        if form == "base64":
            vectors = [np.frombuffer(base64.b64decode(v), "<f4") for v in vectors]
        np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    one = client.embeddings.create(model="index:manual", input="Copper")  # base64 by itself
    np.testing.assert_allclose(one.data[0].embedding, expected[0], rtol=1e-6)
    with pytest.raises(openai.NotFoundError, match="letters"):
        client.embeddings.create(model="ada", input="x")
    with pytest.raises(openai.BadRequestError, match="input"):
        client.embeddings.create(model="letters", input=[])


def test_tokens_are_counted_and_texts_that_are_not_read_to_their_end_are_named(
    client, rag, monkeypatch
):
    monkeypatch.setattr(type(rag), "embedder", Words())
    texts = ["a lamp", *["one two three"] * 8, "one two three four", "five"]
    done = client.embeddings.create(model="letters", input=texts)
    assert (done.usage.prompt_tokens, done.usage.total_tokens) == (30, 30)
    assert done.truncated == [9]
    assert done.data[9].embedding == done.data[8].embedding
    refuses = {"model": "letters", "extra_body": {"truncate": False}}
    assert client.embeddings.create(input=texts[:9], **refuses).truncated == []
    with pytest.raises(openai.BadRequestError, match=r"input 9, .* the 3 tokens") as refused:
        client.embeddings.create(input=texts, **refuses)
    assert refused.value.code == "context_length_exceeded"
    monkeypatch.setattr(Words, "window", None)  # as of models that read all of a text
    assert client.embeddings.create(input=texts, **refuses).usage.prompt_tokens == 31


def test_who_asks_for_an_unknown_model_is_told_all_that_this_tenant_may_ask(client, address):
    options = {"model": "gpt-4o", "messages": QUESTION}
    with pytest.raises(openai.NotFoundError, match=f"it is '{NAME}' or 'index:manual'") as caught:
        client.chat.completions.create(**options)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match=f"'letters' does this .* '{NAME}' or 'index"):
        client.chat.completions.create(**options | {"model": "letters"})
    with asking(address, "theirs") as other, pytest.raises(openai.NotFoundError) as caught:
        other.chat.completions.create(**options)
    assert "manual" not in str(caught.value)


def test_lists_of_tokens_are_refused_with_one_sentence(client):
    for tokens in ([9906, 1917], [[9906, 1917]]):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="any", input=tokens)
        said = caught.value.body["message"]
        assert said.startswith("input: tokens cannot be embedded")
        assert "check_embedding_ctx_length=False" in said
        assert said.count("input") == 1


def test_models_are_listed_with_their_context(client, address):
    found = {one.id: getattr(one, "max_model_len", None) for one in client.models.list()}
    assert found == {NAME: 1024, "index:manual": 1024, "letters": None}
    for name in found:
        assert client.models.retrieve(name).id == name
    with asking(address, "theirs") as other:  # another tenant, whose documents these are not
        assert [one.id for one in other.models.list()] == [NAME]
        for name in ("index:manual", "letters"):
            with pytest.raises(openai.NotFoundError, match="no model"):
                other.chat.completions.create(model=name, messages=QUESTION)
            with pytest.raises(openai.NotFoundError, match="no model"):
                other.models.retrieve(name)


def test_tenants_are_told_whose_embeddings_are_but_not_whether_there_are_any(rag, address):
    with serving(rag.engine, ["other:theirs"]) as (without_index, _):
        for body in ({"model": "letters", "input": "x"}, {"model": "any", "input": "x"}, {}):
            headers = {"Authorization": "Bearer theirs"}
            asked = {"json": body, "headers": headers}
            refused = httpx.post(f"{address}/v1/embeddings", **asked)
            assert refused.status_code == 403
            assert "keys of no tenant" in refused.json()["error"]["message"]
            nowhere = httpx.post(f"{without_index}/v1/embeddings", **asked)
            assert (nowhere.status_code, nowhere.json()) == (403, refused.json())


def test_a_web_page_may_ask_if_it_was_allowed(address):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x"}
    url = f"{address}/v1/chat/completions"
    answer = httpx.options(url, headers={"Origin": PAGE, **asked})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    near = {"Access-Control-Request-Private-Network": "true"}
    answer = httpx.options(url, headers={"Origin": PAGE, **asked, **near})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-private-network"] == "true"
    other = httpx.options(url, headers={"Origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in other.headers
    listed = httpx.get(
        f"{address}/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer main"}
    )
    assert listed.headers["access-control-allow-origin"] == PAGE


def test_without_an_index_nothing_is_embedded_and_no_page_may_ask(rag):
    with serving(rag.engine) as (address, _):
        body = {"model": "letters", "input": "x"}
        refused = httpx.post(f"{address}/v1/embeddings", json=body)
        assert refused.status_code == 404
        assert "--index" in refused.json()["error"]["message"]
        headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        answer = httpx.options(f"{address}/v1/models", headers=headers)
        assert "access-control-allow-origin" not in answer.headers


def test_a_request_chooses_among_the_documents(client):
    def asked(where, model="index:manual"):
        return client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=2, extra_body={"where": where}
        )

    every = {one["source"] for one in asked({}).sources}
    assert len(every) > 1
    chosen = sorted(every)[0]
    assert {one["source"] for one in asked({"source": chosen}).sources} == {chosen}
    assert {one["source"] for one in asked({"source": [chosen], "ordinal": 0}).sources} == {chosen}
    for where, model in (({"colour": "red"}, "index:manual"), ({"ordinal": 0}, NAME)):
        with pytest.raises(openai.BadRequestError, match=r"colour|no documents"):
            asked(where, model)
    with pytest.raises(openai.BadRequestError, match="too many entries"):
        asked({"source": ["x"] * 10_001})


def test_a_request_says_how_many_chunks_and_how_near_they_must_be(client):
    def asked(model="index:manual", **retrieval):
        return client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=2, extra_body=retrieval
        )

    scores = [one["score"] for one in asked().sources]
    assert len(scores) == 3
    assert len(asked(k=1).sources) == 1
    near = asked(min_score=(scores[1] + scores[2]) / 2)
    assert [one["score"] for one in near.sources] == scores[:2]
    response = client.responses.create(
        model="index:manual", input="Why is copper green?", extra_body={"k": 1}
    )
    assert len(response.sources) == 1
    far = asked(min_score=1)
    assert (far.sources, far.choices[0].message.content) == ([], NOTHING_FOUND)
    for bad in ({"k": 0}, {"k": MOST_CHUNKS + 1}, {"min_score": 1.5}):
        with pytest.raises(openai.BadRequestError) as refused:
            asked(**bad)
        assert refused.value.param == next(iter(bad))
    for good in ({"k": MOST_CHUNKS}, {"min_score": -1}):
        asked(**good)
        with pytest.raises(openai.BadRequestError, match="no documents to choose by"):
            asked(model=NAME, **good)
