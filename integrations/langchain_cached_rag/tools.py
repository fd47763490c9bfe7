"""LangChain's tools and response formats, as the engine takes them and gives them back.

Knows messages and schemas; knows no model.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.utils.function_calling import convert_to_openai_tool

from cached_rag import ConfigError, Engine, Tools
from cached_rag.spi import CallPart
from cached_rag.spi import ToolCall as Call
from langchain_cached_rag.forms import json_schema

# Options of a call that say what form its answer has.
_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
# LangChain notes here how a structured answer was asked for, for traces.
_NOTES = ("strict", "ls_structured_output_format")
# Quotes and brackets that no JSON goes on with, so that LangChain does not close arguments which an
# answer's end cut off: within a string the first quote ends it, elsewhere the second.
_CUT_OFF = ' (cut off)"{brackets} (cut off)"{brackets}'
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
    """The tools and the form among a call's options, which lose them.

    Raises:
        ValueError: a response format that is not known.
    """
    given = {name: options.pop(name, None) for name in _OPTIONS}
    for name in _NOTES:
        options.pop(name, None)
    tools = given["tools"] or []
    parallel = given["parallel_tool_calls"]
    made = bound(tools, given["tool_choice"] if tools else None, parallel=parallel)
    schema = _schema(given["response_format"])
    return Tools(engine.tokenization, made["tools"], made["tool_choice"], parallel, schema)


def _schema(wanted: Any) -> Any:
    """The JSON schema in a response format of OpenAI's form, or a schema itself."""
    if wanted is None or (isinstance(wanted, Mapping) and wanted.get("type") == "text"):
        return None
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_object":
        return True
    return json_schema(wanted)


def as_calls(calls: Sequence[Call]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls of an answer, and those that its end cut off."""
    good = [
        ToolCall(name=call.name, args=json.loads(call.arguments), id=_new_id(), type="tool_call")
        for call in calls
        if call.is_complete
    ]
    bad = [
        InvalidToolCall(
            name=call.name,
            args=call.arguments,
            id=_new_id(),
            error="the answer ended before the call did; raise max_tokens",
            type="invalid_tool_call",
        )
        for call in calls
        if not call.is_complete
    ]
    return good, bad


class GrowingChunks:
    """An answer that comes in pieces: its text, and its calls as LangChain has them in chunks."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._growing = tools, tools.growing()
        self._text = ""

    def push(self, piece: str) -> tuple[str, list[ToolCallChunk]]:
        """What is new and certain: text, and parts of calls."""
        self._text += piece
        said, parts = self._growing.push(piece)
        return said, [_as_chunk(part) for part in parts]

    def end(self) -> tuple[str, list[ToolCallChunk], bool]:
        """The rest, in which calls that were cut off are made invalid; whether any call is not."""
        said, parts = self._growing.push("", is_over=True)
        _, calls = self._tools.read(self._text)
        parts += [_cut_off(at, call) for at, call in enumerate(calls) if not call.is_complete]
        return said, [_as_chunk(part) for part in parts], any(call.is_complete for call in calls)


def _cut_off(index: int, call: Call) -> CallPart:
    brackets = "]" * (call.arguments.count("[") + 1)
    return CallPart(index, None, _CUT_OFF.format(brackets=brackets))


def _as_chunk(part: CallPart) -> ToolCallChunk:
    """A part of a call in LangChain's words; a call's first part has its id."""
    return ToolCallChunk(
        name=part.name,
        args=part.arguments,
        id=None if part.name is None else _new_id(),
        index=part.index,
        type="tool_call_chunk",
    )


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
