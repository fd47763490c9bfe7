"""LangChain's tools and the forms of answers, as the engine takes them and gives them back.

Knows messages and schemas; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall
from langchain_core.messages.tool import ToolCall, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.output_parsers.transform import BaseCumulativeTransformOutputParser
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from cached_rag import ConfigError, Engine, Tools
from cached_rag.spi import CallPart, new_call_id
from cached_rag.spi import ToolCall as Call
from langchain_cached_rag.messages import as_reasoning

# Options of a call that say what form its answer has.
_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
# LangChain notes here how a structured answer was asked for, for traces.
_NOTES = ("strict", "ls_structured_output_format")
# Quotes and brackets that no JSON goes on with, so that LangChain does not close arguments which an
# answer's end cut off: within a string the first quote ends it, elsewhere the second.
_CUT_OFF = ' (cut off)"{brackets} (cut off)"{brackets}'
# A dict with one of these is a JSON schema already; others are OpenAI's or Anthropic's functions.
_KEYWORDS = {
    *("type", "properties", "additionalProperties", "items", "enum", "const", "pattern", "format"),
    *("$ref", "$defs", "definitions", "anyOf", "oneOf", "allOf"),
}
_OF_FUNCTIONS = {"function", "parameters", "input_schema"}
_CHOICES = {"any": "required", True: "required", False: "none", None: "auto"}


def bound(
    tools: Sequence[Any],
    tool_choice: Any = None,
    *,
    parallel: bool | None = None,
    strict: Any = None,
) -> dict[str, Any]:
    """What `bind_tools` binds: tools in OpenAI's form, and the choice as the engine has it.

    Raises:
        ConfigError: no such tool; or one that only a provider's servers run. A `ValueError`, too.
    """
    found = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
    for tool in found:
        if "function" not in tool:
            raise ConfigError(
                f"a tool of type {tool.get('type')!r} is run by its provider's servers, and this "
                "model is local; give a function that does the same, or leave it out"
            )
    names = [tool["function"]["name"] for tool in found]
    if isinstance(tool_choice, Mapping):  # OpenAI's form, or Anthropic's
        named = tool_choice.get("function", tool_choice).get("name")
        tool_choice = named or tool_choice.get("type", "")
    choice = _CHOICES.get(tool_choice, tool_choice)
    if choice not in ("auto", "none", "required", *names):
        raise ConfigError(f"there is no tool {choice!r} to be called; there are {names}")
    return {"tools": found, "tool_choice": choice, "parallel_tool_calls": parallel}


def taken(engine: Engine, options: dict[str, Any]) -> Tools:
    """The tools and the form among a call's options, which lose them, and notes for traces.

    Raises:
        ValueError: a response format that is not known.
    """
    given = {name: options.pop(name, None) for name in (*_OPTIONS, *_NOTES)}
    tools = given["tools"] or []
    parallel = given["parallel_tool_calls"]
    made = bound(tools, given["tool_choice"] if tools else None, parallel=parallel)
    schema = _schema(given["response_format"])
    form = (made["tools"], made["tool_choice"], parallel, schema)
    return Tools(engine.tokenization, *form, parts_thoughts=options.get("grammar") is None)


def _schema(wanted: Any) -> Any:
    """The JSON schema in a response format of OpenAI's form, or a schema itself."""
    if wanted is None or (isinstance(wanted, Mapping) and wanted.get("type") == "text"):
        return None
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_object":
        return True
    return json_schema(wanted)


def as_calls(calls: Sequence[Call]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls of an answer, and those that its end cut off."""
    good, bad = [], []
    for call in calls:
        known: Any = {"name": call.name, "id": new_call_id()}
        if call.is_complete:
            good.append(tool_call(args=json.loads(call.arguments), **known))
        else:
            error = "the answer ended before the call did; raise max_tokens"
            bad.append(invalid_tool_call(args=call.arguments, error=error, **known))
    return good, bad


class GrowingChunks:
    """An answer that comes in pieces, as LangChain has it in chunks: its text, and its calls.

    Each chunk has one of them: of one with text, and of the last one, LangChain's streams of events
    take no call.
    """

    def __init__(self, tools: Tools) -> None:
        self._growing = tools.growing()

    def push(self, piece: str, *, is_over: bool = False) -> Iterator[ChatGenerationChunk]:
        """What is new and certain: a thought, text, and parts of calls."""
        said, parts = self._growing.push(piece, is_over=is_over)
        if thought := self._growing.new_thought:
            yield _chunk(additional_kwargs=as_reasoning(thought))
        if said:
            yield _chunk(content=said)
        yield from map(_of_call, parts)

    def end(self) -> Iterator[ChatGenerationChunk]:
        """The rest, in which calls that were cut off are made invalid."""
        yield from self.push("", is_over=True)
        for index, call in enumerate(self._growing.calls):
            if not call.is_complete:
                brackets = "]" * (call.arguments.count("[") + 1)
                yield _of_call(CallPart(index, None, _CUT_OFF.format(brackets=brackets)))

    @property
    def has_calls(self) -> bool:
        """Whether any call is whole."""
        return any(call.is_complete for call in self._growing.calls)


def _chunk(content: str = "", **more: Any) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=content, **more))


def _of_call(part: CallPart) -> ChatGenerationChunk:
    """A part of a call in LangChain's words; a call's first part has its id."""
    key = None if part.name is None else new_call_id()
    told = tool_call_chunk(name=part.name, args=part.arguments, id=key, index=part.index)
    return _chunk(tool_call_chunks=[told])


def json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class, a TypedDict, a dict, or OpenAI's form of one.

    LangChain's own conversion makes a function of it, which has properties or nothing, and no
    references to itself. So what is a JSON schema stays as it is.

    Raises:
        ConfigError: it says nothing of an answer's form. A `ValueError`, too.
    """
    if not isinstance(schema, Mapping):
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            return dict(schema.model_json_schema())
        return convert_to_json_schema(schema)
    if schema.get("type") == "json_schema":
        schema = schema.get("json_schema", schema)
    if isinstance(inner := schema.get("schema"), Mapping):
        schema = {"title": schema.get("name", "answer"), **inner}
    is_function = bool(_OF_FUNCTIONS & schema.keys())
    found = convert_to_json_schema(dict(schema)) if is_function else dict(schema)
    if not _KEYWORDS & found.keys():
        raise ConfigError(f"a schema says of what type or form an answer is; got {dict(schema)!r}")
    return found


def answer_form(schema: Any) -> dict[str, Any]:
    """OpenAI's response format for a pydantic class, TypedDict or JSON schema."""
    found = json_schema(schema)
    name = str(found.get("title", "answer"))
    return {"type": "json_schema", "json_schema": {"name": name, "schema": found}}


def parser(schema: Any, *, of_a_call: bool = False) -> Runnable[AIMessage, Any]:
    """What makes an object of a structured answer; a dict for all but pydantic classes.

    LangChain's parsers close the strings and braces that a cut answer leaves open, and leave out
    calls that are not whole: what remains may fit the schema, and is not what was to be said. So
    what `max_tokens` cut off does not reach them.

    Args:
        of_a_call: the answer is a call of the tool of that schema.
    """
    inside: BaseCumulativeTransformOutputParser[Any]
    is_class = is_basemodel_subclass(schema)
    if not of_a_call:
        inside = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    elif is_class:
        inside = PydanticToolsParser(tools=[schema], first_tool_only=True)
    else:
        name = convert_to_openai_tool(schema)["function"]["name"]
        inside = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return RunnablePassthrough(_refuse_cut) | inside


def _refuse_cut(answer: AIMessage) -> None:
    if answer.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(
            "max_tokens cut the answer off before its object was whole; raise max_tokens, or ask "
            "for a smaller object",
            llm_output=answer.text,
        )
