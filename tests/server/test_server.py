"""The server over real sockets, asked by OpenAI's own client and by LangChain's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from doubles import Recording, slow
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from served import GREEDY, MESSAGES, NAME, reads, serving, until

from cached_rag import BatchConfig, Engine, StoreConfig
from cached_rag.server.tenants import Tenants, namespace


@pytest.fixture(scope="module")
def engine():
    with Engine(Recording(tiny_model("llama")), NEW_PROMPTS) as made:
        yield made


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine) as (address, service):
        yield address, service


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def steps(engine):
    """The module's engine's steps; each takes 20 ms."""
    engine.model.steps.clear()
    engine.model.before = slow(0.02)
    yield engine.model.steps
    engine.model.before = slow(0)


def slow_engine(**bounds):
    """One that is the test's own, with as slow steps and answers that nothing ends early."""
    model = Recording(tiny_model("llama"), slow(0.02))
    model.eos_ids = frozenset()
    return Engine(model, batch=BatchConfig(**bounds))


def test_a_conversation_goes_on_with_the_servers_own_messages(client):
    first = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message
    again = {"role": "user", "content": "And why?"}
    for said in (first, first.model_dump()):
        done = client.chat.completions.create(messages=[*MESSAGES, said, again], **GREEDY)
        assert done.usage.completion_tokens == 8
    asked = first.model_dump() | {"tool_calls": [{"id": "x"}]}
    with pytest.raises(openai.BadRequestError, match="tool_calls"):
        client.chat.completions.create(messages=[*MESSAGES, asked], **GREEDY)


def test_what_breaks_is_an_error_of_the_server_and_counted(server, monkeypatch):
    address, service = server

    def broken(*_):
        raise RuntimeError("secret path")

    monkeypatch.setattr(type(service), "ask", broken)
    response = httpx.post(f"{address}/v1/completions", json=GREEDY | {"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert 'status="500"' in httpx.get(f"{address}/metrics").text


def test_a_chat_completion_is_the_engines_answer(client, engine):
    done = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    expected = engine.generate(MESSAGES, max_tokens=8)
    choice = done.choices[0]
    assert choice.message.content == expected.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", expected.finish_reason)
    assert done.usage.prompt_tokens == expected.report.prompt_tokens
    assert done.usage.completion_tokens == len(expected.token_ids)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.model == NAME
    assert done.object == "chat.completion"


def test_streamed_pieces_are_the_same_answer(client):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    options = GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=MESSAGES, **options))
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 4
    without = list(client.chat.completions.create(messages=MESSAGES, **GREEDY, stream=True))
    assert all(chunk.usage is None for chunk in without)


def test_completions_of_one_prompt_and_of_several(client, engine):
    prompts = [f"{chunk} And so" for chunk in CHUNKS[:3]]
    expected = [engine.generate(prompt, max_tokens=8).text for prompt in prompts]
    one = client.completions.create(prompt=prompts[0], **GREEDY)
    assert one.choices[0].text == expected[0]
    every = client.completions.create(prompt=prompts, **GREEDY)
    assert [choice.text for choice in every.choices] == expected
    assert [choice.index for choice in every.choices] == [0, 1, 2]
    assert every.usage.completion_tokens == 24
    texts = ["", "", ""]
    for chunk in client.completions.create(prompt=prompts, **GREEDY, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_documents_are_cached_and_forgotten(client, server):
    texts = [f"{chunk} So it was in the year {n}." for n, chunk in enumerate(CHUNKS)]
    messages = [
        {"role": "system", "content": "Answer from the texts."},
        {"role": "user", "content": "{documents}\n\nWhy?"},
    ]
    documents = f"{server[0]}/v1/documents"
    body = {"texts": [*texts, "", "word " * 2000], "messages": messages}
    done = httpx.post(documents, json=body, timeout=60).json()
    assert (done["encoded"], done["known"]) == (len(texts), 0)
    assert [skipped["index"] for skipped in done["skipped"]] == [len(texts), len(texts) + 1]
    again = httpx.post(documents, json={"texts": texts, "messages": messages}, timeout=60).json()
    assert (again["encoded"], again["known"], again["tokens"]) == (0, len(texts), 0)
    asked = [messages[0], {"role": "user", "content": "\n\n".join(texts) + "\n\nWhy?"}]
    extra = {"extra_body": {"method": "reuse"}}
    usage = client.chat.completions.create(messages=asked, **GREEDY, **extra).usage
    assert usage.prompt_tokens_details.cached_tokens > 0.8 * usage.prompt_tokens
    salted = {"extra_body": {"method": "reuse", "cache_salt": "other"}}
    usage = client.chat.completions.create(messages=asked, **GREEDY, **salted).usage
    assert usage.prompt_tokens_details.cached_tokens == 0
    gone = httpx.request("DELETE", documents, json={"texts": texts}, timeout=60).json()
    assert gone["deleted"] >= len(texts)
    usage = client.chat.completions.create(messages=asked, **GREEDY, **extra).usage
    assert usage.prompt_tokens_details.cached_tokens < 0.5 * usage.prompt_tokens


def pins(store):
    """The keys of what a store keeps, whatever comes."""
    return {key for (key,) in store._database.rows("SELECT key FROM files WHERE pinned")}


def test_documents_are_kept_as_long_as_is_said(server, engine):
    documents = f"{server[0]}/v1/documents"
    texts = [f"{chunk} That was long ago." for chunk in CHUNKS[:2]]
    body = {"texts": texts[:1], "pinned": True, "ttl_seconds": 3600}
    store = engine.library.shelf.store.tiers[-1]
    before = pins(store)
    assert httpx.post(documents, json=body, timeout=60).json()["encoded"] == 1
    httpx.post(documents, json={"texts": texts[1:]}, timeout=60)
    new = {store.held[key].token_ids for key in pins(store) - before}
    assert new == {engine.library.table.get(texts[0]).token_ids}
    assert httpx.request("DELETE", documents, json=body, timeout=60).json()["deleted"] >= 1
    assert pins(store) == before


def test_a_list_among_documents_is_one_and_is_reported_and_forgotten_as_such(server, engine):
    documents = f"{server[0]}/v1/documents"
    page, other, alone = (f"{word} {CHUNKS[0]}" for word in ("Leaf", "Twig", "Root"))
    long = "word " * 2000
    done = httpx.post(documents, json={"texts": [[page, other, ""], alone]}, timeout=60).json()
    assert (done["encoded"], done["known"]) == (3, 0)
    assert [skipped["index"] for skipped in done["skipped"]] == [0]
    library = engine.library
    places = {
        library.shelf.fetch(behind, library.table.get(text).token_ids).start
        for text in (page, other, alone)
        for behind in library.encoded_after()
        if library.shelf.holds(behind, library.table.get(text).token_ids)
    }
    assert len(places) == 2  # the second page stands behind the first
    done = httpx.post(documents, json={"texts": [[page, long]]}, timeout=60).json()
    assert (done["encoded"], done["known"], len(done["skipped"])) == (0, 1, 1)
    body = {"texts": [[page, other], alone]}
    assert httpx.request("DELETE", documents, json=body, timeout=60).json()["deleted"] >= 3
    assert all(library.table.get(text) is None for text in (page, other, alone))


def test_a_beginning_that_fills_the_context_is_refused_before_any_text_is_read(
    server, engine, monkeypatch
):
    texts = reads(monkeypatch)
    for words, times in ((1030, 1), (100_000, 0)):  # so many surely do not fit
        texts.clear()
        messages = [{"role": "user", "content": "word " * words + "{documents}"}]
        body = {"texts": list(CHUNKS), "messages": messages}
        refused = httpx.post(f"{server[0]}/v1/documents", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert "before {documents}" in refused.text
        assert len(texts) == times


def test_a_name_reaches_the_model_where_its_template_has_a_place(client, engine, monkeypatch):
    monkeypatch.setattr(
        engine.model.tokenizer,
        "chat_template",
        "{% for m in messages %}{{ m.name or m.role }} says: {{ m.content }}\n{% endfor %}",
    )
    for role in ("system", "user", "assistant"):
        said = {"role": role, "content": "Why?", "name": "ann_of_the_north"}
        done = client.chat.completions.create(messages=[said], **GREEDY)
        expected = engine.count_tokens("ann_of_the_north says: Why?\n")
        assert done.usage.prompt_tokens == expected


def test_settings_reach_the_engine(client, engine):
    options = {"temperature": 2.0, "seed": 7, "max_tokens": 12, "top_p": 0.9, "stop": ["e", "zz"]}
    done = client.chat.completions.create(model=NAME, messages=MESSAGES, **options)
    expected = engine.generate(MESSAGES, **options)
    assert done.choices[0].message.content == expected.text
    assert done.choices[0].finish_reason == expected.finish_reason == "stop"
    greedy = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    hot = GREEDY | {"temperature": 2, "top_p": 0}
    likeliest = client.chat.completions.create(messages=MESSAGES, **hot)
    assert likeliest.choices[0].message.content == greedy
    newer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_completion_tokens=3
    )
    assert newer.usage.completion_tokens == 3
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}],
        }
    ]
    joined = client.chat.completions.create(messages=parts, **GREEDY)
    assert (
        joined.choices[0].message.content
        == engine.generate([{"role": "user", "content": "Why?"}], max_tokens=8).text
    )


def test_an_answer_without_a_length_has_what_there_is_room_for(client, engine):
    long = [{"role": "user", "content": "word " * 330}]
    room = engine.model.context_length - engine.count_tokens(long)
    assert 0 < room < 256
    done = client.chat.completions.create(
        model=NAME, messages=long, temperature=2.0, seed=3, extra_body={"top_k": 0}
    )
    assert done.usage.completion_tokens <= room


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"n": 17}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "there is none"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"top_logprobs": 3}, "logprobs=true"),
        ({"logprobs": False, "top_logprobs": 3}, "logprobs=true"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "json_schema"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "json_schema"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"colour": "blue"}, "colour"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"method": "magic"}, "magic"),
        ({"quality": "best"}, "best"),
        ({"method": "x" * 300}, "method"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"max_tokens": 5000}, "max_tokens=5000 exceeds the model's context of 1024"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_said(client, changed, says, stream):
    body = GREEDY | {"messages": MESSAGES, "stream": stream} | changed
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.body["type"] == "invalid_request_error"


def test_neutral_settings_are_no_errors(client):
    body = {"n": 1, "logprobs": False, "presence_penalty": 0, "user": "me", "store": False}
    body |= {"top_logprobs": 0, "response_format": {"type": "text"}}
    plain = client.chat.completions.create(messages=MESSAGES, **GREEDY, **body).choices
    cold = GREEDY | body | {"temperature": 1e-8}  # as Ragas sends it
    done = client.chat.completions.create(messages=MESSAGES, **cold).choices
    assert done[0].message.content == plain[0].message.content
    padded = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert list(client.chat.completions.create(messages=MESSAGES, **GREEDY, **padded))
    padded["stream_options"] = {"include_usage": None}
    pieces = list(client.chat.completions.create(messages=MESSAGES, **GREEDY, **padded))
    assert not any(piece.usage for piece in pieces)


def test_the_largest_seed_has_others_behind_it(client):
    most = 2**63 - 1
    asked = {"model": NAME, "messages": MESSAGES, "temperature": 2, "max_tokens": 8}
    both = client.chat.completions.create(**asked, seed=most, n=2).choices
    for choice, seed in zip(both, (most, 0), strict=True):
        alone = client.chat.completions.create(**asked, seed=seed).choices[0]
        assert choice.message.content == alone.message.content


def test_what_there_is_not(client, server):
    with pytest.raises(openai.NotFoundError, match="'gpt' does this here; it is 'tiny'"):
        client.chat.completions.create(messages=MESSAGES, **GREEDY | {"model": "gpt"})
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    assert httpx.get(f"{server[0]}/v1/nothing").status_code == 404
    assert httpx.post(f"{server[0]}/v1/completions", content="{").status_code == 400


def test_health_and_metrics(client, server):
    client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert httpx.get(f"{server[0]}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    assert httpx.head(f"{server[0]}/health").status_code == 200
    text = httpx.get(f"{server[0]}/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    path = '{path="/v1/chat/completions",status="200"}'
    assert float(found[f"cached_rag_requests_total{path}"]) >= 1
    assert float(found['cached_rag_tokens_total{kind="answer"}']) >= 8
    assert float(found["cached_rag_running"]) == 0
    assert "cached_rag_time_to_first_token_seconds_bucket" in text
    assert CHUNKS[0][:20] not in text


def test_metrics_count_drafts_which_a_request_may_switch_off(client, server):
    def counted():
        text = httpx.get(f"{server[0]}/metrics").text
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        kinds = ("drafted", "accepted")
        return [float(found.get(f'cached_rag_tokens_total{{kind="{k}"}}', 0)) for k in kinds]

    asked = {**GREEDY, "messages": MESSAGES, "max_tokens": 60}
    before = counted()
    plain = client.chat.completions.create(**asked, extra_body={"drafts": False})
    assert counted() == before
    found = client.chat.completions.create(**asked)
    assert found.choices[0].message.content == plain.choices[0].message.content
    drafted, accepted = counted()
    assert drafted - before[0] >= accepted - before[1] > 0


def test_metrics_count_what_was_made_of_an_answer_that_was_given_up():
    engine = slow_engine()
    with serving(engine) as (address, service):
        body = GREEDY | {"messages": MESSAGES, "max_tokens": 600, "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(40):  # of which every other one is empty
                next(lines)
        assert until(lambda: service.num_open == 0)
        text = httpx.get(f"{address}/metrics").text
    engine.close()
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found['cached_rag_tokens_total{kind="answer"}']) >= 15
    first = [
        v for k, v in found.items() if k.startswith("cached_rag_time_to_first_token_seconds_c")
    ]
    assert "1.0" in first
    assert float(found["cached_rag_answer_seconds_count"]) == 0  # it has no end


def test_metrics_take_no_time_of_an_answer_that_failed():
    model, left = Recording(tiny_model("llama")), iter(range(5))

    def breaks(_):
        if next(left, None) is None:
            raise RuntimeError("broken")

    model.before, model.eos_ids = breaks, frozenset()
    with Engine(model) as engine, serving(engine) as (address, _):
        body = GREEDY | {"messages": MESSAGES, "max_tokens": 60, "drafts": False}
        assert httpx.post(f"{address}/v1/chat/completions", json=body).status_code == 500
        found = httpx.get(f"{address}/metrics").text.splitlines()
    assert "cached_rag_answer_seconds_count 0.0" in found
    assert 'cached_rag_tokens_total{kind="answer"} 0.0' not in found  # control: it had begun


def test_langchains_client_works_against_it(server, engine):
    llm = ChatOpenAI(
        model=NAME, base_url=f"{server[0]}/v1", api_key="none", temperature=0, max_tokens=8
    )
    question = f"{CHUNKS[0]} Why?"
    expected = engine.generate([{"role": "user", "content": question}], max_tokens=8).text
    answer = llm.invoke([HumanMessage(question)])
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in llm.stream(question)) == expected
    assert [a.content for a in llm.batch([question] * 3)] == [expected] * 3
    assert asyncio.run(llm.ainvoke(question)).content == expected


def test_requests_at_the_same_time_are_made_together(client, steps):
    asked = [[{"role": "user", "content": f"{CHUNKS[0]} Question {n}?"}] for n in range(6)]
    options = GREEDY | {"max_tokens": 20}
    with ThreadPoolExecutor(6) as threads:
        found = list(
            threads.map(lambda m: client.chat.completions.create(messages=m, **options), asked)
        )
    alone = [client.chat.completions.create(messages=m, **options) for m in asked]
    texts = [[answer.choices[0].message.content for answer in some] for some in (found, alone)]
    assert texts[0] == texts[1]
    assert max(map(len, steps)) > 3


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_stops_the_answer(server, steps, stream):
    address, service = server
    body = GREEDY | {"messages": MESSAGES, "max_tokens": 600, "stream": stream, "temperature": 2}
    with httpx.Client() as leaving, contextlib.suppress(httpx.ReadTimeout):
        url = f"{address}/v1/chat/completions"
        with leaving.stream("POST", url, json=body, timeout=0.5) as response:
            next(response.iter_lines())
    assert until(lambda: service.num_open == 0)
    assert until(lambda: service.engine.scheduler.num_running == 0)
    assert len(steps) < 500


def test_the_next_turn_of_a_conversation_is_mostly_cached():
    engine = Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 26))
    with (
        serving(engine) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        turns = [{"role": "user", "content": f"{' '.join(CHUNKS)} {' '.join(CHUNKS)} Why?"}]
        for turn in range(3):
            done = client.chat.completions.create(messages=turns, **GREEDY)
            cached = done.usage.prompt_tokens_details.cached_tokens
            assert (cached > 0.6 * done.usage.prompt_tokens) == (turn > 0)
            turns += [done.choices[0].message, {"role": "user", "content": "And then?"}]
    engine.close()


def test_keys_tenants_and_limits():
    engine = Engine(tiny_model("llama"))
    with serving(engine, ["red:secret", "plain=="], max_body_bytes=5000) as (address, _):
        for key, status in (("secret", 200), ("plain==", 200), ("wrong", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{address}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{address}/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{address}/metrics").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200

        def cached(key):
            with openai.OpenAI(base_url=f"{address}/v1", api_key=key) as client:
                extra = {"extra_body": {"method": "reuse"}}
                done = client.chat.completions.create(messages=MESSAGES, **GREEDY, **extra)
                return done.usage.prompt_tokens_details.cached_tokens

        headers = {"Authorization": "Bearer secret"}
        body = {"texts": list(CHUNKS[:2])}
        httpx.post(f"{address}/v1/documents", json=body, headers=headers, timeout=60)
        assert cached("secret") > 0
        assert cached("plain==") == 0
        large = {"texts": ["word " * 5000]}
        url = f"{address}/v1/documents"
        assert httpx.post(url, json=large, headers=headers).status_code == 413
        pieces = (json.dumps(large).encode()[i : i + 500] for i in range(0, 20000, 500))
        assert httpx.post(url, content=pieces, headers=headers).status_code == 413
    engine.close()


def test_who_finds_the_queue_full_is_told_to_come_again():
    engine, goes_on = slow_engine(max_rows=1, max_waiting=1), threading.Event()
    engine.model.before = lambda batch: goes_on.wait(60)
    with serving(engine) as (address, service):
        url = f"{address}/v1/chat/completions"
        body = GREEDY | {"messages": MESSAGES, "max_tokens": 40}
        with ThreadPoolExecutor(2) as threads:
            busy = [threads.submit(httpx.post, url, json=body, timeout=60) for _ in range(2)]
            assert until(lambda: engine.scheduler.num_running + engine.scheduler.num_waiting == 2)
            refused = httpx.post(url, json=body)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert error["code"] == "busy"
            assert re.search(r"ask again in 1 s, .* --max-waiting\)", error["message"])
            streamed = httpx.post(url, json=body | {"stream": True})
            assert streamed.status_code == 429
            goes_on.set()
            assert [one.result().status_code for one in busy] == [200, 200]
        assert service.num_open == 0
    engine.close()


def test_what_the_queue_can_never_hold_is_not_told_to_come_again():
    engine = slow_engine(max_rows=1, max_waiting=1)
    with serving(engine) as (address, _):
        body = {"model": NAME, "prompt": ["a", "b"], "max_tokens": 1}
        refused = httpx.post(f"{address}/v1/completions", json=body | {"n": 2})
        assert refused.status_code == 400
        assert "4 answers" in refused.text
        assert "2 at most" in refused.text
        assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200
    engine.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_finishes_what_runs(caplog, stream):
    engine = slow_engine()
    with ThreadPoolExecutor(1) as threads, serving(engine, drain=20) as (address, service):
        body = GREEDY | {"messages": MESSAGES, "max_tokens": 30, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        url = f"{address}/v1/chat/completions"
        running = threads.submit(httpx.post, url, json=body, timeout=60)
        assert until(lambda: engine.scheduler.num_running == 1)
    lines = running.result().text.split("\n\n")
    whole = lines[-3].removeprefix("data: ") if stream else lines[0]
    assert json.loads(whole)["usage"]["completion_tokens"] == 30
    assert not stream or lines[-2] == "data: [DONE]"
    assert "1 requests are finished first" in caplog.text
    assert service.num_open == 0
    engine.close()


def test_a_server_that_must_stop_says_what_it_cut_off(caplog):
    engine = slow_engine()
    with serving(engine, drain=1) as (address, service):
        body = GREEDY | {"messages": MESSAGES, "max_tokens": 600, "stream": True}
        url = f"{address}/v1/chat/completions"
        lines = []

        def read():
            with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url, json=body) as got:
                lines.extend(got.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        assert until(lambda: engine.scheduler.num_running == 1)
    reader.join(30)
    assert not any("[DONE]" in line for line in lines)
    assert "Cancel 1 running task" in caplog.text or "1 requests were still" in caplog.text
    assert until(lambda: engine.scheduler.num_running == 0)
    assert service.num_open == 0
    engine.close()


def test_tenants_that_nobody_uses_are_closed(monkeypatch):
    monkeypatch.setattr("cached_rag.server.tenants.MAX_IDLE", 3)
    monkeypatch.setattr("cached_rag.server.tenants.MAX_IDLE_SALTS", 1)
    engine = Engine(tiny_model("llama"))
    tenants = Tenants(engine)
    with tenants.using("", None) as first:
        assert first is engine
    with tenants.using("a", None) as a, tenants.using("b", None) as b:
        for name in "cde":
            with tenants.using(name, "salt"):
                pass
        with tenants.using("a", None) as again:
            assert again is a
        assert b is not a
    assert list(tenants._engines) == ["b", namespace("e", "salt"), "a"]
    for salt in ("1", "2", "3"):
        with tenants.using("f", salt):
            pass
    assert [name for name in tenants._engines if name.startswith("f:")] == [namespace("f", "3")]
    assert not tenants._uses
    tenants.close()
    assert not tenants._engines
    assert namespace("a", "b") != namespace("", "a:b") != namespace("a", None)
    engine.close()
