"""OpenAI's Responses by OpenAI's own client, and what a server says of bodies it cannot take."""

from __future__ import annotations

import json
import math

import httpx
import openai
import pydantic
import pytest
from conftest import NEW_PROMPTS, tiny_model
from openai.lib.streaming.responses import ResponseStreamState
from served import MESSAGES, NAME, serving
from test_server_tools import SCHEMA

from cached_rag import Engine
from cached_rag.server.responses import ResponsesRequest

TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
ASK = {"model": NAME, "temperature": 0, "max_output_tokens": 8}
SYSTEM, QUESTION = (message["content"] for message in MESSAGES)


@pytest.fixture(scope="module")
def address():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine, serving(engine) as (found, _):
        yield found


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response_is_the_chat_completion_of_the_same_messages(client):
    chat = client.chat.completions.create(
        model=NAME, temperature=0, max_tokens=8, messages=MESSAGES
    )
    found = client.responses.create(**ASK, instructions=SYSTEM, input=QUESTION)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    parts = [{"type": "input_text", "text": QUESTION}]
    said = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": parts}]
    assert client.responses.create(**ASK, input=said).output_text == found.output_text


def test_how_much_it_thinks_reaches_the_template():
    asked = {"model": NAME, "input": QUESTION, "reasoning": {"effort": "low", "summary": "auto"}}
    assert ResponsesRequest.model_validate(asked).chat().reasoning_effort == "low"
    with pytest.raises(pydantic.ValidationError, match="reasoning"):
        ResponsesRequest.model_validate(asked | {"reasoning": 5})


def test_a_streamed_response_is_the_whole_one_piece_by_piece(client):
    whole = client.responses.create(**ASK, input=QUESTION)
    events = list(client.responses.create(**ASK, input=QUESTION, stream=True))
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert text == whole.output_text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert [one.type for one in events][:3] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
    ]
    assert events[2].item.status == "in_progress"
    state = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for event in events:
        state.handle_event(event)
    grown = state.accumulate_event(events[-1])
    assert [part.text for part in grown.output[0].content] == [text]  # which is there once
    last = events[-1].response
    assert (last.status, last.output_text) == (whole.status, whole.output_text)
    assert last.usage == whole.usage
    with client.responses.stream(**ASK, input=QUESTION) as stream:  # which checks their order
        for _ in stream:
            pass


def test_tools_are_called_and_their_results_sent_back(client):
    once = {"model": NAME, "temperature": 0, "max_output_tokens": 100, "tools": TOOLS}
    once |= {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.responses.create(**once, input="Is it warm?").output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = list(client.responses.create(**once, input="Is it warm?", stream=True))
    (item,) = events[-1].response.output
    assert item.arguments == call.arguments
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    named = {"type": "function", "name": "weather"}
    assert client.responses.create(**once | {"tool_choice": named}, input="Hot?").output[0].name
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
    said = [{"role": "user", "content": "Is it warm?"}, call.model_dump(), result]
    later = client.responses.create(**once | {"tool_choice": "none"}, input=said)
    assert all(one.type == "message" for one in later.output)


def test_a_response_has_the_form_of_a_schema(client):
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    settings = ASK | {"max_output_tokens": 100}
    found = client.responses.create(**settings, input="Where?", text={"format": form})
    assert json.loads(found.output_text)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("given", "says", "field"),
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id: this server keeps no responses (send whole conversations as"
            " input) and does not take 'resp_1'",
            "previous_response_id",
        ),
        ({"top_logprobs": 2}, "top_logprobs: this server does not take 2", "top_logprobs"),
        ({"truncation": "auto"}, "truncation: this server does not take 'auto'", "truncation"),
        ({"input": []}, "messages: is empty; at least one is needed", "messages"),
        (
            {"input": [{"type": "computer_call"}]},
            "this server cannot read an input of type 'computer_call'",
            None,
        ),
        (
            {"tools": [{"type": "web_search", "search_context_size": "low"}]},
            "tools.0: this server has no tool of type 'web_search'; only type 'function' is"
            " supported, which the client runs itself",
            "tools.0",
        ),
        ({"nothing": 1}, "nothing: there is no such field", "nothing"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2", "temperature"),
    ],
)
def test_what_it_cannot_do_is_refused(address, given, says, field):
    body = {"model": NAME, "input": "Why?"} | given
    answer = httpx.post(f"{address}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (says, field)


_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "tiny", ', "the body is no JSON (at character 18: "),
        (b"[]", "the body is to be a JSON object, sent as application/json"),
        ({"messages": []}, "messages: is empty; at least one is needed"),
        (
            {"messages": [{"role": "user", "content": [_IMAGE]}]},
            "messages.0.content: the model reads text only, and no 'image_url': send parts of type"
            " 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: it is neither text nor a list of parts of type 'text'",
        ),
    ],
)
def test_a_body_that_cannot_be_read_is_told_what_to_send(address, body, says):
    content = body if isinstance(body, bytes) else json.dumps({"model": NAME} | body).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{address}/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(says)


@pytest.mark.parametrize("bad", [{"description": "\ud800"}, {"parameters": {"maximum": math.nan}}])
def test_a_tool_that_is_no_json_is_refused_even_if_none_is_to_be_called(address, bad):
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}} | bad
    body = {"model": NAME, "input": "Hi.", "tools": [tool], "tool_choice": "none"}
    headers = {"content-type": "application/json"}
    url, sent = f"{address}/v1/responses", json.dumps(body).encode()
    answer = httpx.post(url, content=sent, headers=headers, timeout=60)
    assert answer.status_code == 400, answer.text
