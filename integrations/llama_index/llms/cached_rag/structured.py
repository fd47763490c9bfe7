"""Objects that grow, as LlamaIndex's programs stream them.

Its own let the model choose whether it gives the object at all, and log what fails: an object that
`max_tokens` cut off would look like any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.function_program import get_function_tool
from llama_index.core.program.utils import get_program_for_llm, process_streaming_objects
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode

_CALLING = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)
# Options of a program, which are not the caller's to choose.
_OWN = frozenset({"tool_required", "tool_choice", "allow_parallel_tool_calls"})


def stream_objects(
    llm: FunctionCallingLLM,
    output_cls: type[BaseModel],
    prompt: BasePromptTemplate,
    options: Mapping[str, Any],
    values: Mapping[str, Any],
) -> Generator[Any, None, None]:
    """An object as it grows; the last one is whole.

    Args:
        options: of the call, as `GenerationConfig` has them.
        values: of the prompt's variables.

    Raises:
        ValueError: the answer calls no tool.
        CutOffError: `max_tokens` cut it off.
        ConfigError: there is no such option.
    """
    if not _calls(llm):
        yield from _program(llm, output_cls, prompt).stream_call(llm_kwargs=dict(options), **values)
        return
    found = _Growing(llm, output_cls)
    for response in llm.stream_chat_with_tools(**_asked(llm, output_cls, prompt, options, values)):
        yield found.after(response)
    found.check()


async def astream_objects(
    llm: FunctionCallingLLM,
    output_cls: type[BaseModel],
    prompt: BasePromptTemplate,
    options: Mapping[str, Any],
    values: Mapping[str, Any],
) -> AsyncGenerator[Any, None]:
    """As `stream_objects`, off the event loop."""
    if not _calls(llm):
        program = _program(llm, output_cls, prompt)
        async for one in await program.astream_call(llm_kwargs=dict(options), **values):
            yield one
        return
    found = _Growing(llm, output_cls)
    asked = _asked(llm, output_cls, prompt, options, values)
    async for response in await llm.astream_chat_with_tools(**asked):
        yield found.after(response)
    found.check()


class _Growing:
    """The object so far."""

    def __init__(self, llm: FunctionCallingLLM, output_cls: type[BaseModel]) -> None:
        self._llm, self._output_cls = llm, output_cls
        self._objects: list[Any] | None = None
        self._last: ChatResponse | None = None

    def after(self, response: ChatResponse) -> Any:
        """The object, or a looser one with the fields that there are."""
        self._last = response
        one: Any = process_streaming_objects(
            response, self._output_cls, cur_objects=self._objects, llm=self._llm
        )
        self._objects = [one]
        return one

    def check(self) -> None:
        """See that there is one at the end."""
        assert self._last is not None
        self._llm.get_tool_calls_from_response(self._last)


def _calls(llm: FunctionCallingLLM) -> bool:
    return llm.metadata.is_function_calling_model and llm.pydantic_program_mode in _CALLING


def _program(
    llm: FunctionCallingLLM, output_cls: type[BaseModel], prompt: BasePromptTemplate
) -> Any:
    """LlamaIndex's own, for other modes and models."""
    mode = llm.pydantic_program_mode
    return get_program_for_llm(output_cls, prompt, llm, pydantic_program_mode=mode)


def _asked(
    llm: FunctionCallingLLM,
    output_cls: type[BaseModel],
    prompt: BasePromptTemplate,
    options: Mapping[str, Any],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "tools": [get_function_tool(output_cls)],
        "chat_history": llm._extend_messages(prompt.format_messages(llm=llm, **values)),
        "tool_required": True,
        **{name: value for name, value in options.items() if name not in _OWN},
    }
