"""Tools and structured output under LangChain's own classes and agents."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Literal, TypedDict

import pytest
from conftest import NEW_PROMPTS, smollm2, tiny_model
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_cached_rag import CachedRAGLLM, ChatCachedRAG
from langchain_cached_rag.tools import GrowingChunks, answer_form
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel, Field

from cached_rag import ConfigError, Engine, Grammar, Tools


class Keeper(BaseModel):
    """Who keeps a lighthouse."""

    name: str = Field(max_length=6)
    years: int = Field(ge=0, le=99)
    kind: Literal["keeper", "sailor"]


class Note(BaseModel):
    """A note."""

    text: str


class Said(TypedDict):
    """What somebody said."""

    text: str


class Lamp(TypedDict):
    """A lamp."""

    lit: bool


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Weather of a city."""
    return f"mild in {city}"


@pytest.fixture(scope="module")
def llm():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        yield ChatCachedRAG(engine=engine, max_tokens=100)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_answers_are_objects(llm, method):
    found = llm.with_structured_output(Keeper, method=method).invoke("Who keeps it?")
    assert isinstance(found, Keeper)
    raw = llm.with_structured_output(Keeper, method=method, include_raw=True).invoke("Who?")
    assert isinstance(raw["parsed"], Keeper)
    assert isinstance(raw["raw"], AIMessage)
    assert raw["parsing_error"] is None
    lamp = llm.with_structured_output(Lamp, method=method).invoke("Is it lit?")
    assert set(lamp) == {"lit"}
    schema = {"title": "n", "type": "object", "properties": {"n": {"enum": [1, 2]}}}
    schema |= {"required": ["n"], "description": "a number"}
    assert llm.with_structured_output(schema, method=method).invoke("n?")["n"] in (1, 2)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Note, Said], ids=["pydantic", "dict"])
def test_an_object_that_was_cut_off_is_an_error(llm, schema, method):
    """Also where LangChain's parsers would mend it: {"text": "twenty"} of "twenty-one"."""
    cut = ChatCachedRAG(engine=llm.engine, max_tokens=12)
    asked = cut.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        asked.invoke("Who?")
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        asyncio.run(asked.ainvoke("Who?"))
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        list(asked.stream("Who?"))
    raw = cut.with_structured_output(schema, method=method, include_raw=True).invoke("Who?")
    assert raw["raw"].response_metadata["finish_reason"] == "length"
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParserException)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_object_grows_while_it_is_streamed(llm, method):
    asked = llm.with_structured_output(Keeper.model_json_schema(), method=method)
    first, *_, last = asked.stream("Who?")
    assert first.keys() < last.keys() == {"name", "years", "kind"}


class Tree(BaseModel):
    """A tree, whose schema refers to itself."""

    leaf: Literal[1, 2]
    under: Annotated[list[Tree], Field(max_length=1)]


AGE = {"type": "object", "properties": {"age": {"enum": [3, 4]}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"title": "Colour", "enum": ["red", "green"]}, ["red", "green"]),
        ({"title": "Either", "anyOf": [AGE, {"const": None}]}, [{"age": 3}, {"age": 4}, None]),
        ({"name": "person", "strict": True, "schema": AGE}, [{"age": 3}, {"age": 4}]),
        ({"type": "json_schema", "json_schema": {"schema": AGE}}, [{"age": 3}, {"age": 4}]),
        ({"type": "json_schema", "schema": AGE}, [{"age": 3}, {"age": 4}]),
        (AGE, [{"age": 3}, {"age": 4}]),
        ({"name": "person", "parameters": AGE}, [{"age": 3}, {"age": 4}]),
    ],
)
def test_schemas_of_every_form_are_held(llm, schema, allowed):
    assert llm.with_structured_output(schema).invoke("Who?") in allowed
    assert json.loads(llm.bind(response_format=schema).invoke("Who?").text) in allowed


def test_a_schema_that_refers_to_itself_is_held(llm):
    raw = llm.with_structured_output(Tree, include_raw=True).invoke("Which?")
    cut = raw["raw"].response_metadata["finish_reason"] == "length"
    assert raw["raw"].text.startswith('{"leaf": ')
    assert cut or isinstance(raw["parsed"], Tree)
    assert answer_form(Tree)["json_schema"]["schema"]["$defs"].keys() == {"Tree"}


def test_a_schema_that_says_nothing_is_refused(llm):
    for schema in ({"title": "X", "description": "Y"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(ConfigError, match="of what type or form"):
            llm.bind(response_format=schema).invoke("Who?")


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "any"}, "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, "weather"),
        ({"type": "function", "function": {"name": "weather"}}, "weather"),
    ],
)
def test_choices_have_openais_form_or_anthropics(llm, choice, wanted):
    assert llm.bind_tools([weather], tool_choice=choice).kwargs["tool_choice"] == wanted


def test_what_cannot_be_called_is_refused(llm):
    for choice in ({"type": "tool"}, {"type": "allowed_tools"}, {}):
        with pytest.raises(ConfigError, match="there is no tool"):
            llm.bind_tools([weather], tool_choice=choice)
    with pytest.raises(ConfigError, match=r"type 'web_search' .* give a function"):
        llm.bind_tools([weather, {"type": "web_search"}])


def test_a_call_that_was_cut_off_is_said(llm):
    cut = ChatCachedRAG(engine=llm.engine, max_tokens=40)
    cut = cut.bind_tools([weather, Keeper], tool_choice="Keeper").invoke("Who?")
    assert cut.tool_calls == []
    assert [bad["name"] for bad in cut.invalid_tool_calls] == ["Keeper"]
    with pytest.raises(ValueError, match="json_schema, function_calling or json_mode"):
        llm.with_structured_output(Keeper, method="magic")


def merged(chunks):
    first, *others = chunks
    return sum(others, first)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_streamed_call_that_was_cut_off_is_no_call(llm, is_async):
    """LangChain closes the strings and braces of what a stream's chunks add up to."""

    async def streamed(bound):
        return [chunk async for chunk in bound.astream("Who?")]

    bound = llm.bind_tools([Note], tool_choice="Note", parallel_tool_calls=False)
    for max_tokens in range(36, 48):
        cut = bound.bind(max_tokens=max_tokens)
        whole = cut.invoke("Who?")
        found = merged(asyncio.run(streamed(cut)) if is_async else cut.stream("Who?"))
        assert found.tool_calls == whole.tool_calls == []
        assert len(found.invalid_tool_calls) == len(whole.invalid_tool_calls)
        for one, other in zip(found.invalid_tool_calls, whole.invalid_tool_calls, strict=True):
            assert one["name"] == other["name"] == "Note"
            assert one["args"].startswith(other["args"])
        assert found.response_metadata["finish_reason"] == "length"
    assert found.invalid_tool_calls


def test_a_call_may_be_cut_off_anywhere(llm):
    """Only the call that is not whole gets more arguments, which no closing makes an object."""
    tools = Tools(llm.engine.tokenization, llm.bind_tools([weather, Note]).kwargs["tools"])
    form = tools.tokenization.template.call_form
    whole = '{"city": "R\\"o\\\\", "a": [[1, {"b": [2, "]"], "c": []}]]}'
    begin = form.opening + form.begin
    assert form.separator is not None
    first = begin + "weather" + form.middle + '{"city": "Rome"}' + form.end
    for end in range(len(whole)):
        growing = GrowingChunks(tools)
        list(growing.push(first + form.separator + form.begin + "Note" + form.middle + whole[:end]))
        *_, last = growing.end()
        (tail,) = last.message.tool_call_chunks
        assert growing.has_calls
        assert tail["index"] == 1
        assert not isinstance(parse_partial_json(whole[:end] + tail["args"]), dict)


def test_every_part_of_a_call_is_where_streams_of_events_read_it(llm):
    """They read `content_blocks`, which has no call beside text, and none in the last chunk."""
    bound = llm.bind_tools([Note], tool_choice="Note", parallel_tool_calls=False)
    *_, last = bound.bind(max_tokens=40).stream("Who?")
    assert last.chunk_position == "last"
    assert last.tool_call_chunks == []
    tools = Tools(llm.engine.tokenization, llm.bind_tools([Note]).kwargs["tools"])
    form = tools.tokenization.template.call_form
    call = form.opening + form.begin + "Note" + form.middle + '{"text": "a'
    growing = GrowingChunks(tools)
    chunks = [*growing.push(f"Wait. {call}"), *growing.end()]
    shown = [block for chunk in chunks for block in chunk.message.content_blocks]
    assert "".join(block.get("text", "") for block in shown).strip() == "Wait."
    arguments = "".join(b["args"] for b in shown if b["type"] == "tool_call_chunk")
    assert arguments.startswith('{"text": "a (cut off)')


def test_any_object_in_json_mode(llm):
    bound = llm.bind(response_format={"type": "json_object"})
    assert bound.invoke("x").text.startswith("{")


def test_tools_are_called_streamed_and_their_results_read(llm):
    bound = llm.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("Is it warm?")
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Rome", "Oslo")
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    first, *others = bound.stream("Is it warm?")
    whole = sum(others, first)
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("weather", call["args"])]
    assert len([c for c in (first, *others) if c.tool_call_chunks]) > 1

    async def streamed():
        chunks = [chunk async for chunk in bound.astream("Is it warm?")]
        return sum(chunks[1:], chunks[0])

    assert asyncio.run(streamed()).tool_calls[0]["args"] == call["args"]
    result = ToolMessage("mild", tool_call_id=call["id"])
    later = llm.bind_tools([weather]).invoke([HumanMessage("Is it warm?"), answer, result])
    assert isinstance(later, AIMessage)
    with pytest.raises(ValueError, match="no tool 'rain'"):
        llm.bind_tools([weather], tool_choice="rain")


def test_a_forced_call_shows_no_markup_and_no_stop_string_cuts_it(llm):
    bound = llm.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke("Is it warm?").tool_calls
    stopped = bound.invoke("Is it warm?", stop=["\n", '"'])
    assert [one["args"] for one in stopped.tool_calls] == [call["args"]]
    cut = bound.bind(max_tokens=3)
    assert cut.invoke("Is it warm?").content == ""
    assert "".join(chunk.text for chunk in cut.stream("Is it warm?")) == ""


def test_an_agent_calls_a_tool_and_gives_an_object(llm):
    seen = []

    @tool
    def look(city: Literal["Rome", "Oslo"]) -> str:
        """Look at a city's weather."""
        seen.append(city)
        return "mild"

    class Forced(ChatCachedRAG):
        """A random model would call none, or one without end."""

        def bind_tools(self, tools, **kwargs):
            choice = "Keeper" if seen else "look"
            kwargs |= {"tool_choice": choice, "parallel_tool_calls": False}
            return super().bind_tools(tools, **kwargs)

    model = Forced(engine=llm.engine, max_tokens=120)
    agent = create_agent(model, [look], response_format=ToolStrategy(Keeper))
    found = agent.invoke({"messages": [("human", "Is it warm?")]}, {"recursion_limit": 40})
    assert isinstance(found["structured_response"], Keeper)
    assert seen


def test_an_agent_makes_no_call_that_was_cut_off(llm):
    written = []

    @tool
    def write(text: str) -> str:
        """Write a text down."""
        written.append(text)
        return "done"

    class Forced(ChatCachedRAG):
        def bind_tools(self, tools, **kwargs):
            kwargs |= {"tool_choice": "write", "parallel_tool_calls": False}
            return super().bind_tools(tools, **kwargs)

    agent = create_agent(Forced(engine=llm.engine, max_tokens=60), [write])
    asked = {"messages": [("human", "Write it down.")]}
    list(agent.stream(asked, {"recursion_limit": 6}, stream_mode="messages"))
    assert written == []
    # Only streams were affected, and this one had the call.
    *_, last = agent.invoke(asked, {"recursion_limit": 6})["messages"]
    assert [bad["name"] for bad in last.invalid_tool_calls] == ["write"]


def test_prompts_are_counted_with_their_tools(llm):
    messages = [HumanMessage("Is it warm?")]
    plain = llm.get_num_tokens_from_messages(messages)
    assert llm.get_num_tokens_from_messages(messages, tools=[weather]) > plain + 20


def test_log_probabilities_and_penalties_are_those_of_openai(llm):
    answer = llm.bind(logprobs=True, top_logprobs=2, max_tokens=4).invoke("Why?")
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.usage_metadata["output_tokens"]
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    assert "logprobs" not in llm.bind(logprobs=False).invoke("Why?").response_metadata
    spelled = b"".join(bytes(one["bytes"]) for one in content)
    assert spelled.decode().startswith(answer.content)
    with pytest.raises(ValueError, match="presence_penalty"):
        ChatCachedRAG(engine=llm.engine, presence_penalty=3)


def test_the_string_model_has_log_probabilities_too(llm):
    model = CachedRAGLLM(engine=llm.engine, max_tokens=4)
    last = [*model.stream("Why?", logprobs=1)]
    whole = model.generate(["Why?"], logprobs=1).generations[0][0]
    (later,) = asyncio.run(model.agenerate(["Why?"], logprobs=1)).generations[0]
    assert "".join(last) == whole.text == later.text
    for found in (whole, later):
        content = found.generation_info["logprobs"]["content"]
        assert len(content) == found.generation_info["usage_metadata"]["output_tokens"]
        assert all(len(one["top_logprobs"]) == 1 for one in content)
    chunks = [*model._stream("Why?", logprobs=1)]
    assert chunks[-1].generation_info["logprobs"] == whole.generation_info["logprobs"]
    assert "logprobs" not in model.generate(["Why?"]).generations[0][0].generation_info


@pytest.mark.real
def test_the_bytes_of_a_character_of_several_tokens_are_its_own():
    with Engine(smollm2(), NEW_PROMPTS) as engine:
        bound = ChatCachedRAG(engine=engine).bind(logprobs=True, grammar=Grammar.choice(["東京"]))
        answer = bound.invoke("Name a city.")
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) > 2
    spelled = b"".join(bytes(one["bytes"]) for one in content)
    assert spelled.removesuffix(b"<|im_end|>").decode() == answer.content == "東京"
