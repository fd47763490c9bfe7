"""Tools and structured output under LlamaIndex's own programs and agents."""

from __future__ import annotations

import asyncio

import pytest
from conftest import NEW_PROMPTS, tiny_model
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.agent.workflow import (
    AgentInput,
    AgentOutput,
    AgentWorkflow,
    FunctionAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.cached_rag import CachedRAGLLM
from llama_index.llms.cached_rag.tools import offered
from ollama import Message
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel, Field
from test_llama_index_engines import unclosed  # noqa: F401

from cached_rag import ConfigError, Engine, Tools
from cached_rag.errors import CutOffError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:<aiosqlite:ResourceWarning")]


class Keeper(BaseModel):
    """Who keeps a lighthouse."""

    name: str = Field(max_length=6)
    years: int = Field(ge=0, le=99)


def weather(north: bool) -> str:
    """Weather in the north or the south."""
    return f"mild: {north}"


TOOL = FunctionTool.from_defaults(weather)


@pytest.fixture(scope="module")
def llm():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        yield CachedRAGLLM(engine=engine, max_tokens=100)


def test_structured_answers_are_objects(llm):
    found = llm.as_structured_llm(Keeper).complete("Who keeps it?")
    assert isinstance(found.raw, Keeper)
    prompt = PromptTemplate("Who keeps {what}?")
    assert isinstance(llm.structured_predict(Keeper, prompt, what="it"), Keeper)
    *_, last = llm.stream_structured_predict(Keeper, prompt, what="it")
    assert last == llm.structured_predict(Keeper, prompt, what="it")
    later = asyncio.run(llm.astructured_predict(Keeper, prompt, what="it"))
    assert isinstance(later, Keeper)


def test_tools_are_called_streamed_and_their_results_read(llm):
    answer = llm.chat_with_tools([TOOL], "Is it warm?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, set(call.tool_kwargs)) == ("weather", {"north"})
    *_, last = llm.stream_chat_with_tools([TOOL], "Is it warm?", tool_required=True)
    assert llm.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs

    async def streamed():
        found = await llm.astream_chat_with_tools([TOOL], "Is it warm?", tool_required=True)
        return [one async for one in found][-1]

    assert llm.get_tool_calls_from_response(asyncio.run(streamed())) != []
    result = ChatMessage(
        role="tool", content="mild", additional_kwargs={"tool_call_id": call.tool_id}
    )
    history = [ChatMessage(role="user", content="Is it warm?"), answer.message, result]
    later = llm.chat_with_tools([TOOL], chat_history=history)
    assert later.message.role.value == "assistant"
    stopped = llm.chat([ChatMessage(role="user", content="Hm?")]).message.content[:20]
    none = llm.chat([ChatMessage(role="user", content="Hm?")], stop=[stopped[10:]])
    assert not any(isinstance(block, ToolCallBlock) for block in none.message.blocks)
    assert llm.get_tool_calls_from_response(none, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="calls no tool"):
        llm.get_tool_calls_from_response(none)


OPENAI = {"name": "weather", "arguments": '{"north": true}'}
SAVED = {
    "openai": {"id": "1", "type": "function", "function": OPENAI},
    "openai's object": ChatCompletionMessageFunctionToolCall(
        id="1", type="function", function=OPENAI
    ),
    "ollama": {"function": {"name": "weather", "arguments": {"north": True}}},
    "ollama's object": Message.ToolCall(function={"name": "weather", "arguments": {"north": True}}),
}


@pytest.mark.parametrize("kind", SAVED)
def test_calls_that_were_saved_beside_the_blocks_are_read(llm, kind):
    beside = {"tool_calls": [SAVED[kind]]}
    said = ChatMessage(role="assistant", content="", additional_kwargs=beside)
    number = "1" if kind.startswith("openai") else ""
    block = ToolCallBlock(tool_call_id=number, tool_name="weather", tool_kwargs={"north": True})
    now = ChatMessage(role="assistant", blocks=[block])
    assert llm.chat_prompt([said]) == llm.chat_prompt([now])
    assert llm.chat_prompt([said])[0]["tool_calls"][0]["function"]["name"] == "weather"
    both = ChatMessage(role="assistant", blocks=[block], additional_kwargs=beside)
    assert llm.chat_prompt([both]) == llm.chat_prompt([now])


@pytest.mark.parametrize("call", ["weather", {}, {"function": {"arguments": "{}"}}])
def test_a_saved_call_of_nothing_is_an_error(llm, call):
    said = ChatMessage(role="assistant", additional_kwargs={"tool_calls": [call]})
    with pytest.raises(ValueError, match="names no function"):
        llm.chat([said])


def test_a_forced_call_shows_no_markup_and_no_stop_string_cuts_it(llm):
    forced = {"tools": [TOOL], "user_msg": "Is it warm?", "tool_required": True}
    (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools(**forced))
    stopped = llm.chat_with_tools(**forced, stop=["\n", '"'])
    assert llm.get_tool_calls_from_response(stopped)[0].tool_kwargs == call.tool_kwargs
    assert not llm.chat_with_tools(**forced, max_tokens=3).message.content
    *_, last = llm.stream_chat_with_tools(**forced, max_tokens=3)
    assert not last.message.content


def test_a_tool_is_predicted_and_called(llm):
    done = llm.predict_and_call([TOOL], "Is it warm?", tool_required=True)
    assert done.response in ("mild: True", "mild: False")


def test_a_template_of_ones_own_cannot_list_tools(llm):
    own = CachedRAGLLM(engine=llm.loaded_engine(), messages_to_prompt=lambda messages: "x")
    with pytest.raises(ValueError, match="lists no tools"):
        own.chat_with_tools([TOOL], "Is it warm?")


def echo(words: str) -> str:
    """Say it again."""
    return words


def test_a_call_that_is_cut_off_is_an_error_and_no_call(llm):
    tools, asked = [FunctionTool.from_defaults(echo)], {"tool_required": True, "max_tokens": 70}
    answer = llm.chat_with_tools(tools, "Is it warm?", **asked)
    *parts, last = llm.stream_chat_with_tools(tools, "Is it warm?", **asked)
    for cut in (answer, last):
        assert cut.raw["finish_reason"] == "length"
        with pytest.raises(CutOffError, match="within its call of 'echo'; raise max_tokens"):
            llm.get_tool_calls_from_response(cut)
    assert parts[-1].raw["finish_reason"] is None
    assert llm.get_tool_calls_from_response(parts[-1])[0].tool_name == "echo"


def test_a_call_that_a_stop_string_cut_off_is_an_error_and_no_call(llm):
    tools = [FunctionTool.from_defaults(echo)]
    offered_tools = offered(tools, "echo", parallel=False)["tools"]
    # A random model calls nothing of its own accord; stop strings end calls that are not forced.
    form = Tools(llm.loaded_engine().tokenization, offered_tools, "echo").grammar
    whole = llm.chat_with_tools(tools, "Is it warm?", grammar=form, max_tokens=60)
    said = next(b.tool_kwargs for b in whole.message.blocks if isinstance(b, ToolCallBlock))
    stop = [said.partition(":")[2].strip(' "')[2:5]]
    answer = llm.chat_with_tools(tools, "Is it warm?", grammar=form, stop=stop)
    *_, last = llm.stream_chat_with_tools(tools, "Is it warm?", grammar=form, stop=stop)
    for cut in (answer, last):
        assert cut.raw["finish_reason"] == "stop"
        with pytest.raises(CutOffError, match="within its call of 'echo'; leave the stop"):
            llm.get_tool_calls_from_response(cut)


class Pay(BaseModel):
    """What somebody earns."""

    pay: int


@pytest.mark.filterwarnings("ignore:The `json` method")  # of LlamaIndex's structured LLM
@pytest.mark.parametrize(
    ("most", "said"),
    [(70, "within its call of 'Pay'; raise"), (3, "before it called a tool; raise")],
)
def test_a_streamed_object_that_is_cut_off_is_an_error(llm, most, said):
    prompt, options = PromptTemplate("{what}"), {"max_tokens": most}
    with pytest.raises(CutOffError, match=f"{said} max_tokens"):
        list(llm.stream_structured_predict(Pay, prompt, llm_kwargs=options, what="x"))
    with pytest.raises(CutOffError, match=f"{said} max_tokens"):
        list(llm.as_structured_llm(Pay).stream_chat([ChatMessage(content="x")], **options))

    async def streamed():
        found = await llm.astream_structured_predict(Pay, prompt, llm_kwargs=options, what="x")
        return [one async for one in found]

    with pytest.raises(CutOffError, match=f"{said} max_tokens"):
        asyncio.run(streamed())


@pytest.mark.parametrize("most", [70, 3])
@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
def test_an_object_that_is_cut_off_is_no_empty_response(llm, mode, most):
    index = VectorStoreIndex([TextNode(text="Ann.")], embed_model=MockEmbedding(8))
    cut = llm.model_copy(update={"max_tokens": most})
    for options in ({"llm": cut, "output_cls": Pay}, {"llm": cut.as_structured_llm(Pay)}):
        engine = index.as_query_engine(response_mode=mode, **options)
        with pytest.raises(CutOffError, match="raise max_tokens"):
            engine.query("Who?")
        with pytest.raises(CutOffError, match="raise max_tokens"):
            asyncio.run(engine.aquery("Who?"))
    if mode in ("compact", "refine"):  # the others stream text
        streamed = index.as_query_engine(
            llm=cut, output_cls=Pay, response_mode=mode, streaming=True
        )
        with pytest.raises(CutOffError, match="raise max_tokens"):
            streamed.query("Who?")


def test_options_of_a_streamed_object_reach_the_engine_and_bad_ones_are_refused(llm):
    prompt, options = PromptTemplate("{what}"), {"no_such_option": 1, "tool_choice": "none"}
    with pytest.raises(ConfigError, match="unknown setting 'no_such_option'"):
        list(llm.stream_structured_predict(Keeper, prompt, llm_kwargs=options, what="x"))
    *_, last = llm.stream_structured_predict(
        Keeper, prompt, llm_kwargs={"tool_choice": "none"}, what="x"
    )
    assert isinstance(last, Keeper)


def test_calls_have_ids_of_their_own(llm):
    answers = [llm.chat_with_tools([TOOL], "Warm?", tool_required=True) for _ in range(2)]
    ids = {llm.get_tool_calls_from_response(answer)[0].tool_id for answer in answers}
    assert len(ids) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its base looks at itself
@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_calls_a_tool_once_and_reads_what_it_gave(llm, streaming):
    async def main():
        agent = FunctionAgent(
            name="keeper",
            tools=[TOOL],
            llm=llm,
            initial_tool_choice="weather",  # once, though agents allow several calls
            streaming=streaming,
        )
        run = AgentWorkflow(agents=[agent]).run("Is it warm?", early_stopping_method="generate")
        events = [event async for event in run.stream_events()]
        return [e for e in events if isinstance(e, ToolCallResult)], events, await run

    results, events, output = asyncio.run(main())
    assert results[0].tool_output.content in ("mild: True", "mild: False")
    steps = [event for event in events if isinstance(event, AgentOutput)]
    assert len(steps[0].tool_calls) == 1
    seen = [event.input for event in events if isinstance(event, AgentInput)]
    assert [message.role.value for message in seen[1]] == ["user", "assistant", "tool"]
    assert output.current_agent_name == "keeper"


@pytest.mark.parametrize(
    ("asked", "several"),
    [({"tool_choice": "weather"}, False), ({"tool_required": True}, True), ({}, True)],
)
def test_a_tool_that_is_named_is_called_once(llm, asked, several):
    options = llm._prepare_chat_with_tools([TOOL], "Warm?", allow_parallel_tool_calls=True, **asked)
    assert options["parallel_tool_calls"] is several


def test_a_tool_is_named_in_the_form_of_any_provider(llm):
    for choice in (
        {"type": "function", "function": {"name": "weather"}},
        {"type": "tool", "name": "weather"},
        {"type": "required"},
    ):
        answer = llm.chat_with_tools([TOOL], "Warm?", tool_choice=choice)
        assert llm.get_tool_calls_from_response(answer)[0].tool_name == "weather"
    with pytest.raises(ConfigError, match="there is no tool 'any_tool'"):
        llm.chat_with_tools([TOOL], "Warm?", tool_choice={"type": "any_tool"})
