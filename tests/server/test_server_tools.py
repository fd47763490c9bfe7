"""Tools, response formats, several answers and log probabilities, by OpenAI's own client."""

from __future__ import annotations

import json
import sys
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from conftest import NEW_PROMPTS, smollm2, tiny_model
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from served import NAME, serving

from cached_rag import Engine
from cached_rag.server.protocol import ChatMessage

QUESTION = [{"role": "user", "content": "Is it warm?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
ASK = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 100}


@pytest.fixture(scope="module")
def address():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine, serving(engine) as (address, _):
        yield address


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_tools_are_called_and_their_results_read(client):
    once = ASK | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**once).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    named = {"type": "function", "function": {"name": "weather"}}
    again = client.chat.completions.create(**once | {"tool_choice": named}).choices[0]
    assert again.message.tool_calls[0].function == call.function
    result = {"role": "tool", "tool_call_id": call.id, "content": "mild"}
    messages = [*QUESTION, choice.message, result]
    later = client.chat.completions.create(**once | {"messages": messages, "tool_choice": "none"})
    assert later.choices[0].message.tool_calls is None


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own types
def test_what_the_client_has_parsed_can_be_sent_back(client):
    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    tools = [openai.pydantic_function_tool(City)]
    forced = client.chat.completions.parse(**ASK, tools=tools, tool_choice="required")
    said = forced.choices[0].message
    (call,) = said.tool_calls
    assert call.function.parsed_arguments.city in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": call.id, "content": "mild"}
    short = ASK | {"max_tokens": 4}
    assert client.chat.completions.create(**short | {"messages": [*QUESTION, said, result]})
    said = client.chat.completions.parse(**ASK, response_format=City).choices[0].message
    assert said.parsed.city in ("Rome", "Oslo")
    assert client.chat.completions.create(**short | {"messages": [*QUESTION, said, *QUESTION]})


def test_streamed_calls_are_the_whole_ones(client):
    once = ASK | {"tools": TOOLS, "tool_choice": "required"}
    whole = client.chat.completions.create(**once).choices[0].message.tool_calls
    parts, reason = {}, None
    for chunk in client.chat.completions.create(**once, stream=True):
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or []:
            name, arguments = parts.get(part.index, (None, ""))
            parts[part.index] = part.function.name or name, arguments + part.function.arguments
    found = list(parts.values())
    assert found == [(call.function.name, call.function.arguments) for call in whole]
    assert reason in ("tool_calls", "length")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("cut", [{"max_tokens": 1}, {"max_tokens": 4}, {"stop": ["\n", '"']}])
def test_a_forced_call_that_ends_early_shows_no_markup(client, choice, cut):
    once = ASK | {"tools": TOOLS, "tool_choice": choice} | cut
    message = client.chat.completions.create(**once).choices[0].message
    chunks = list(client.chat.completions.create(**once, stream=True))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert not message.content
    assert said == ""
    assert bool(message.tool_calls) == ("stop" in cut)


def test_a_choice_among_some_of_the_tools_is_refused(client):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    with pytest.raises(openai.BadRequestError, match=r"tool_choice.type: .* 'function'"):
        client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice)


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_tool_that_is_called_like_a_choice_cannot_be_forced(client, name):
    tools = [{"type": "function", "function": {"name": name}}]
    choice = {"type": "function", "function": {"name": name}}
    with pytest.raises(openai.BadRequestError, match=f"cannot be forced that is called '{name}'"):
        client.chat.completions.create(**ASK, tools=tools, tool_choice=choice)
    assert client.chat.completions.create(**ASK | {"max_tokens": 3}, tools=tools).choices


def test_an_empty_answer_has_a_role_when_it_is_streamed(client):
    first = client.chat.completions.create(**ASK | {"max_tokens": 1}).choices[0].message.content
    empty = ASK | {"stop": [first[0]]}
    assert client.chat.completions.create(**empty).choices[0].message.content == ""
    roles = [
        chunk.choices[0].delta.role
        for chunk in client.chat.completions.create(**empty, stream=True)
    ]
    assert roles == ["assistant", None]


def test_answers_have_the_form_that_is_asked_for(client):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    done = client.chat.completions.create(**ASK, response_format=form).choices[0].message
    assert json.loads(done.content)["city"] in ("Rome", "Oslo")
    plain = client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert plain.choices[0].message.content.startswith("{")

    class Place(BaseModel):
        city: bool

    parsed = client.chat.completions.parse(**ASK, response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)


def test_several_answers_to_one_prompt(client):
    options = ASK | {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6}
    done = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in done.choices]
    assert len(set(texts)) > 1
    alone = client.chat.completions.create(**options | {"n": 1})
    assert alone.choices[0].message.content == texts[0]
    assert alone.usage.prompt_tokens == done.usage.prompt_tokens
    assert done.usage.completion_tokens > alone.usage.completion_tokens
    streamed = {}
    for chunk in client.chat.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[index] for index in range(3)] == texts


def test_log_probabilities(client):
    options = ASK | {"logprobs": True, "top_logprobs": 2, "max_tokens": 5}
    done = client.chat.completions.create(**options)
    content = done.choices[0].logprobs.content
    assert len(content) == done.usage.completion_tokens
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in content)
    streamed = [
        one
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in content]
    assert client.chat.completions.create(**ASK).choices[0].logprobs is None
    asked = {"model": NAME, "prompt": "x", "max_tokens": 3, "temperature": 0}
    older = client.completions.create(**asked, logprobs=1)
    assert len(older.choices[0].logprobs.tokens) == older.usage.completion_tokens


@pytest.mark.real
def test_the_bytes_of_a_character_of_several_tokens_are_its_own():
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "東京"}}}
    asked = ASK | {"response_format": form, "logprobs": True, "top_logprobs": 1}
    with Engine(smollm2(), NEW_PROMPTS) as engine, serving(engine) as (address, _):
        answer = httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=60).json()
    (choice,) = answer["choices"]
    spelled = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"])
    assert spelled.removesuffix(b"<|im_end|>").decode() == choice["message"]["content"] == '"東京"'


@pytest.mark.parametrize(
    "unasked",
    [
        {"tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"min_p": 0, "keep_alive": "5m", "reasoning_effort": "low", "chat_template_kwargs": {}},
        {"frequency_penalty": 0, "presence_penalty": 0, "n": 1, "logprobs": False},
        {"prediction": {"type": "content", "content": "It is."}},
    ],
)
def test_what_clients_send_unasked_changes_nothing(client, unasked):
    plain = client.chat.completions.create(**ASK).choices[0].message.content
    done = client.chat.completions.create(**ASK, extra_body=unasked).choices[0].message
    assert done.content == plain


def test_what_no_prompt_has_is_left_out_of_messages(client):
    part = {"type": "text", "text": "Is it warm?"}
    marked = part | {"cache_control": {"type": "ephemeral"}}
    answer = {"role": "assistant", "content": "No."}
    again = answer | {"parsed": {"warm": False}}
    done = []
    for one, said in ((part, answer), (marked, again)):
        messages = [{"role": "user", "content": [one]}, said, *QUESTION]
        done.append(client.chat.completions.create(**ASK | {"messages": messages}))
    assert done[0].choices[0].message == done[1].choices[0].message
    assert done[0].usage.prompt_tokens == done[1].usage.prompt_tokens
    both = {"reasoning": "Hm.", "reasoning_content": "Hm."}  # as vLLM has them
    assert ChatMessage.model_validate({"role": "assistant", **both}).thought == "Hm."
    with pytest.raises(pydantic.ValidationError, match="reasoning"):
        ChatMessage.model_validate({"role": "assistant", **both, "reasoning": "Other."})
    messages = [QUESTION[0] | {"reasoning": "Hm."}]  # a user's
    with pytest.raises(openai.BadRequestError, match="reasoning"):
        client.chat.completions.create(**ASK | {"messages": messages})


def deep(levels):
    schema = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize("levels", [100, 280])
def test_a_schema_that_is_too_deep_is_the_clients_error(client, levels):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep(levels)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep(levels)}}]
    for changed in ({"response_format": form}, {"tools": tools}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**ASK, **changed)


LONG = "x" * 9000


def calling(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "changed",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]},
        calling('"\\ud800"'),
        calling('{"a": "\\ud800"}'),
        calling("[" * 90_000),
        calling("x" * 200_000),
        calling(json.dumps("x" * 90_000)),
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": LONG}}}},
    ],
)
def test_what_is_malformed_is_the_clients_error(address, changed):
    headers = {"Content-Type": "application/json"}
    url, body = f"{address}/v1/chat/completions", json.dumps(ASK | changed)
    answer = httpx.post(url, content=body, headers=headers, timeout=60)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 3000


def test_odd_parts_of_a_schema_change_nothing(client):
    schema = SCHEMA | {"x-guidance": 1}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    done = client.chat.completions.create(**ASK, response_format=form).choices[0].message
    assert json.loads(done.content)["city"] in ("Rome", "Oslo")


def test_without_the_package_the_server_says_what_is_missing(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.InternalServerError, match=r"\[tools\]") as caught:
        client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert caught.value.status_code == 501


def test_langchains_openai_model_calls_tools_and_gives_objects(address):
    llm = ChatOpenAI(base_url=f"{address}/v1", api_key="none", model=NAME, max_tokens=100)

    @tool
    def lamp(lit: bool) -> str:
        """Light the lamp."""
        return "lit" if lit else "dark"

    called = llm.bind_tools([lamp], tool_choice="required").invoke("Light it.").tool_calls
    assert called[0]["name"] == "lamp"

    class Place(BaseModel):
        far: bool

    assert isinstance(llm.with_structured_output(Place).invoke("Where?"), Place)
