"""LlamaIndex's prompts and messages as roles and strings, and answers in LlamaIndex's words.

Knows templates and tools; knows no engine.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from copy import copy
from typing import Any, TypeVar

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import LogProb, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.prompts import BasePromptTemplate
from llama_index.llms.cached_rag.tools import blocks, called
from pydantic import Field

from cached_rag import Report, Tools
from cached_rag.pml import Fillable, Schema, SchemaTemplate, sent
from cached_rag.spi import FrameworkModel, Stream, shown_logprob

_T = TypeVar("_T")
_ROLES = {"function": "tool", "chatbot": "assistant", "model": "assistant", "developer": "system"}
_SAID = (TextBlock, ThinkingBlock, ToolCallBlock)


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form.

    Raises:
        ValueError: content that is no text.
    """
    return [_plain(message) for message in messages]


def _plain(message: ChatMessage) -> dict[str, Any]:
    role = _ROLES.get(message.role.value, message.role.value)
    known = _SAID if role == "assistant" else TextBlock
    for block in message.blocks:
        if not isinstance(block, known):
            raise ValueError(
                f"a message of role {role!r} holds a block of type {block.block_type!r}, "
                "and the model reads text only; take it out, or turn it into text first"
            )
    found: dict[str, Any] = {"role": role, "content": message.content or ""}
    if role == "assistant" and (calls := called(message)):
        found["tool_calls"] = calls
    thoughts = [block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock)]
    if thought := "".join(thoughts):
        found["reasoning_content"] = thought
    if role == "tool":
        found["tool_call_id"] = str(message.additional_kwargs.get("tool_call_id", ""))
        found["name"] = str(message.additional_kwargs.get("name", ""))
    return found


class GrowingChat:
    """A chat answer in LlamaIndex's words, as far as it has come; its calls keep their ids."""

    def __init__(self, llm: FrameworkModel, stream: Stream, tools: Tools) -> None:
        self._llm, self._stream, self._tools = llm, stream, tools
        self._ids: list[str] = []
        self._said = ""

    def response(self, text: str, piece: str | None = None) -> ChatResponse:
        """What there is of it, with the report in `raw` and token counts beside the message.

        Log probabilities come with the whole answer, each token's before those of its alternatives.

        Args:
            piece: what has just come; "" if nothing more does, None if all came at once.
        """
        found = blocks(self._tools, text, self._ids, is_over=not piece)
        before = len(self._said)
        self._said = next((b.text for b in found if isinstance(b, TextBlock)), "")
        message = ChatMessage(
            role=MessageRole.ASSISTANT, blocks=found, additional_kwargs=_counts(self._stream)
        )
        if calls := called(message):  # where LlamaIndex's programs look for them
            message.additional_kwargs["tool_calls"] = calls
        delta = None if piece is None else self._said[before:]
        return ChatResponse(message=message, delta=delta, **_about(self._llm, self._stream, piece))


def completion(
    llm: FrameworkModel, stream: Stream, tools: Tools, text: str, piece: str | None = None
) -> CompletionResponse:
    """As `GrowingChat.response`, for a completion: what is said, without a thought before it."""
    about, counts = _about(llm, stream, piece), _counts(stream)
    said, delta = tools.read(text, is_over=not piece)[0], None
    if piece is not None:
        delta = said.removeprefix(tools.read(text.removesuffix(piece), is_over=False)[0])
    return CompletionResponse(text=said, delta=delta, **about, additional_kwargs=counts)


def _logprobs(llm: FrameworkModel, stream: Stream) -> list[list[LogProb]] | None:
    """None if they were not asked for."""
    by = llm.loaded_engine().tokenization

    def one(token: int, logprob: float) -> LogProb:
        return LogProb(**shown_logprob(by, token, logprob))

    shown = [
        [one(at.token, at.logprob), *(one(*pair) for pair in at.top if pair[0] != at.token)]
        for at in stream.logprobs
    ]
    return shown or None


def _counts(stream: Stream) -> dict[str, Any]:
    report = stream.report
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": len(stream.token_ids),
        "total_tokens": report.prompt_tokens + len(stream.token_ids),
        "cached_tokens": report.cached_tokens,
    }


def _about(llm: FrameworkModel, stream: Stream, piece: str | None) -> dict[str, Any]:
    """What goes with an answer; names in `raw` are OpenAI's, which token counters look for."""
    counts = _counts(stream)
    details = {"cached_tokens": counts.pop("cached_tokens")}
    raw = {
        "model": llm.model,
        "usage": {**counts, "prompt_tokens_details": details},
        "finish_reason": None if piece else stream.finish_reason,
        "cached_rag": stream.report.to_dict(),
    }
    return {"raw": raw, "logprobs": None if piece else _logprobs(llm, stream)}


def pieces(stream: Stream, response: Callable[[str, str], _T]) -> Generator[_T, None, None]:
    """A response for every piece, and one with the finished report."""
    text = ""
    for piece in stream:
        text += piece
        yield response(text, piece)
    yield response(text, "")


async def apieces(stream: Stream, response: Callable[[str, str], _T]) -> AsyncGenerator[_T, None]:
    """As `pieces`, off the event loop."""
    text = ""
    async for piece in stream.apieces():
        text += piece
        yield response(text, piece)
    yield response(text, "")


class PMLPromptTemplate(BasePromptTemplate):
    """Renders prompts of a schema.

    `CachedRAGLLM` takes the KV of the schema's modules; other models get the same text. A chat
    model wants a schema with messages, a completing model one without.

    Example:
        template = PMLPromptTemplate.from_schema(
            Schema.from_file("manual.xml"),
            '<prompt schema="manual"><rules/>{context_str}<user>{query_str}</user></prompt>',
        )
        index.as_query_engine(text_qa_template=template)
    """

    source: Any = Field(exclude=True, repr=False)

    @classmethod
    def from_schema(cls, schema: Schema, prompt: str) -> PMLPromptTemplate:
        """A <prompt> with {variables} in its texts and arguments.

        Raises:
            cached_rag.errors.PMLError: it is wrong, or not of this schema.
        """
        return cls.from_function(SchemaTemplate.from_string(schema, prompt))

    @classmethod
    def from_function(cls, function: Fillable) -> PMLPromptTemplate:
        """A prompt function, whose parameters are the variables."""
        names = [*function.variables, *function.optional]
        return cls(source=function, metadata={}, template_vars=names, kwargs={}, output_parser=None)

    def partial_format(self, **kwargs: Any) -> PMLPromptTemplate:
        """The template with some values filled in."""
        filled = copy(self)
        filled.kwargs = {**self.kwargs, **kwargs}
        return filled

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        """The prompt as a string."""
        plain = self._plain(kwargs)
        return plain if isinstance(plain, str) else messages_to_prompt(_messages(plain))

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """The prompt as messages; of a schema without messages, one of the user's."""
        plain = self._plain(kwargs)
        said = [{"role": "user", "content": plain}] if isinstance(plain, str) else plain
        return _messages(said)

    def get_template(self, llm: BaseLLM | None = None) -> str:
        """The prompt with its variables' names in braces."""
        return self.format(llm, **{name: f"{{{name}}}" for name in self.template_vars})

    def _plain(self, values: dict[str, Any]) -> str | list[dict[str, str]]:
        return sent(self.source, self._map_all_vars({**self.kwargs, **values}))


def _messages(plain: list[dict[str, str]]) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole(said["role"]), content=said["content"]) for said in plain]


class CacheReportHandler(BaseEventHandler):
    """Collects the report of every request it hears of, and prints it if told to.

    Example:
        reports = CacheReportHandler(prints=True)
        get_dispatcher().add_event_handler(reports)  # llama_index.core.instrumentation
        reports.reports[-1].cached_tokens
    """

    reports: list[Any] = Field(default_factory=list, description="In the order of their ends.")
    prints: bool = Field(default=False, description="One line a request on standard error.")

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CacheReportHandler"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        """Take the report out of an ended request; other models have none."""
        if not isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            return
        raw = getattr(event.response, "raw", None)
        if isinstance(raw, dict) and "cached_rag" in raw:
            report = Report(**raw["cached_rag"])
            self.reports.append(report)
            if self.prints:
                print(report.to_line(), file=sys.stderr)
