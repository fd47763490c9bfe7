"""LlamaIndex's tools as the engine takes them, and calls and objects in LlamaIndex's words."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ContentBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms import ChatMessage, ChatResponse, TextBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.program.function_program import get_function_tool
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools.types import BaseTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel

from cached_rag import Engine, Tools
from cached_rag.errors import CutOffError
from cached_rag.spi import new_call_id

# Options of a call that say what form its answer has.
_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
# Modes of programs in which an object is the arguments of a call.
CALLING = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)
# Options of a program, which are not the caller's to choose.
_OWN = frozenset({"tool_required", "tool_choice", "allow_parallel_tool_calls"})


def offered(tools: Sequence[BaseTool], choice: str, *, parallel: bool) -> dict[str, Any]:
    """Options of a call in which these tools may be called; one that is named, once.

    Agents allow several calls whatever the choice, and a small model that must call repeats itself.
    """
    listed = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
    several = parallel and choice in ("auto", "required")
    return {"tools": listed, "tool_choice": choice, "parallel_tool_calls": several}


def taken(engine: Engine, options: dict[str, Any]) -> Tools:
    """The tools among a call's options, which lose them."""
    tools, choice, parallel = (options.pop(name, None) for name in _OPTIONS)
    if isinstance(choice, Mapping):  # OpenAI's form, or Anthropic's
        choice = choice.get("function", choice).get("name") or choice.get("type")
    form = (tools or (), choice or "auto", parallel)
    return Tools(engine.tokenization, *form, parts_thoughts=options.get("grammar") is None)


def blocks(tools: Tools, text: str, ids: list[str], *, is_over: bool) -> list[ContentBlock]:
    """An answer as blocks: its thought, what it says, and its calls.

    Args:
        ids: of the calls; an answer that grows keeps those it has.
        is_over: no more of it comes.
    """
    thought, said, calls = tools.parts(text, is_over=is_over)
    found: list[ContentBlock] = [ThinkingBlock(content=thought)] if thought else []
    if said or not calls:
        found.append(TextBlock(text=said))
    ids += [new_call_id() for _ in calls[len(ids) :]]
    for call, name in zip(calls, ids, strict=True):
        arguments = json.loads(call.arguments) if call.is_complete else call.arguments
        block = ToolCallBlock(tool_call_id=name, tool_name=call.name, tool_kwargs=arguments)
        found.append(block)
    return found


def _selections(message: ChatMessage) -> list[ToolSelection]:
    """The calls in a message; of one that is not complete yet, the arguments so far."""
    return [
        _selected(block.tool_call_id, block.tool_name, block.tool_kwargs)
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def selections(response: ChatResponse, *, must_call: bool) -> list[ToolSelection]:
    """The calls in an answer; in a finished one, none may lack its end: it would be made as it is.

    Args:
        must_call: see also that there is one.

    Raises:
        CutOffError: `max_tokens` or a stop string ended the answer too early.
        ValueError: there is none.
    """
    calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    reason = response.raw.get("finish_reason") if isinstance(response.raw, dict) else None
    is_cut = reason == "length"
    by = "max_tokens" if is_cut else "a stop string"
    mend = "raise max_tokens, or ask for less" if is_cut else "leave the stop string out"
    for block in calls:
        if reason is not None and isinstance(block.tool_kwargs, str):
            where = f"within its call of {block.tool_name!r}"
            raise CutOffError(f"{by} cut the answer off {where}; {mend}")
    if must_call and not calls:
        if is_cut:
            raise CutOffError(f"{by} cut the answer off before it called a tool; {mend}")
        raise ValueError(f"the answer calls no tool: {response.message.content!r}")
    return _selections(response.message)


def called(message: ChatMessage) -> list[dict[str, Any]]:
    """The calls in a message of the conversation, in OpenAI's form.

    Messages that were saved by earlier LlamaIndex have them beside their blocks.
    """
    beside = message.additional_kwargs.get("tool_calls") or ()
    return [
        {
            "type": "function",
            "id": one.tool_id,
            "function": {"name": one.tool_name, "arguments": one.tool_kwargs},
        }
        for one in _selections(message) or map(_selection, beside)
    ]


def _selection(call: Any) -> ToolSelection:
    """A call as OpenAI's or Ollama's package has it, or as JSON has that.

    Raises:
        ValueError: it names no function.
    """
    plain = call.model_dump() if hasattr(call, "model_dump") else call
    function = plain.get("function") if isinstance(plain, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        raise ValueError(f"a message's tool_calls has {call!r}, which names no function")
    return _selected(plain.get("id"), function["name"], function.get("arguments") or {})


def _selected(key: str | None, name: str, given: dict[str, Any] | str) -> ToolSelection:
    return ToolSelection(tool_id=key or "", tool_name=name, tool_kwargs=_arguments(given))


def _arguments(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        found = parse_partial_json(given)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class GrowingObject:
    """An object that grows, as LlamaIndex's programs stream it; the last one is whole.

    Its own let the model choose whether it gives the object at all, and log what fails: an object
    that `max_tokens` cut off would look like any other.
    """

    def __init__(
        self,
        llm: FunctionCallingLLM,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        options: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        """Make the prompt.

        Args:
            options: of the call, as `GenerationConfig` has them.
            values: of the prompt's variables.
        """
        self._llm, self._output_cls = llm, output_cls
        self._asked: dict[str, Any] = {
            "tools": [get_function_tool(output_cls)],
            "chat_history": llm._extend_messages(prompt.format_messages(llm=llm, **values)),
            "tool_required": True,
            **{name: value for name, value in options.items() if name not in _OWN},
        }
        self._objects: list[Any] | None = None
        self._last: ChatResponse | None = None

    def stream(self) -> Generator[Any, None, None]:
        """The object so far, or a looser one with the fields that there are.

        Raises:
            ValueError: the answer calls no tool.
            CutOffError: `max_tokens` cut it off.
            ConfigError: there is no such option.
        """
        for response in self._llm.stream_chat_with_tools(**self._asked):
            yield self._after(response)
        self._check()

    async def astream(self) -> AsyncGenerator[Any, None]:
        """As `stream`, off the event loop."""
        async for response in await self._llm.astream_chat_with_tools(**self._asked):
            yield self._after(response)
        self._check()

    def _after(self, response: ChatResponse) -> Any:
        self._last = response
        one: Any = process_streaming_objects(
            response, self._output_cls, cur_objects=self._objects, llm=self._llm
        )
        self._objects = [one]
        return one

    def _check(self) -> None:
        """See that there is one at the end."""
        assert self._last is not None
        self._llm.get_tool_calls_from_response(self._last)
