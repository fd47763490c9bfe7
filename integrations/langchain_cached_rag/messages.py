"""LangChain's prompts and messages as roles and strings, and reports in LangChain's words.

Knows content blocks; knows no engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.base import BaseMessage
from langchain_core.messages.utils import convert_to_messages, message_chunk_to_message
from langchain_core.outputs import LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder
from pydantic import ConfigDict, Field

from cached_rag import Report
from cached_rag.pml import Fillable, Schema, SchemaTemplate, sent

Prompt = str | list[dict[str, Any]]
_ROLES = {
    **{"human": "user", "ai": "assistant", "system": "system", "developer": "system"},
    **{"tool": "tool", "function": "tool"},
}

_MEDIA = ("image", "image_url", "input_image", "audio", "input_audio", "video", "file", "media")


def plain(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form; text blocks are joined as LangChain joins them.

    Raises:
        ValueError: content that is no text, or a message of an unknown kind.
    """
    return [_plain(message_chunk_to_message(message)) for message in messages]


def as_reasoning(thought: str) -> dict[str, str]:
    """A thought where LangChain finds it for `content_blocks`, beside what is said."""
    return {"reasoning_content": thought} if thought else {}


def _plain(message: BaseMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": _role(message), "content": _content(message)}
    if isinstance(message, AIMessage):
        if message.tool_calls:
            found["tool_calls"] = [
                {"type": "function", "id": call["id"] or "", "function": _function(call)}
                for call in message.tool_calls
            ]
        thoughts = [b.get("reasoning") for b in message.content_blocks if b["type"] == "reasoning"]
        if thought := "".join(filter(None, thoughts)):
            found["reasoning_content"] = thought
        # A template wants arguments that are whole.
        cut = [f"{c['name']}({c['args'] or ''}" for c in message.invalid_tool_calls if c["name"]]
        found["content"] = "\n".join(filter(None, [found["content"], *cut]))
    if isinstance(message, ToolMessage):
        found |= {"tool_call_id": message.tool_call_id, "name": message.name or ""}
    return found


def filled(template: BasePromptTemplate[Any], values: Mapping[str, str]) -> PromptValue:
    """A template with strings for its variables; those that stand for messages get a user's."""
    parts = template.messages if isinstance(template, ChatPromptTemplate) else []
    listed = {part.variable_name for part in parts if isinstance(part, MessagesPlaceholder)}
    messages = {name: [HumanMessage(value)] for name, value in values.items() if name in listed}
    return template.format_prompt(**{**values, **messages})


def handed_over(messages: Sequence[BaseMessage]) -> list[str]:
    """Texts given as chunks: the text blocks of users' block lists.

    The last block of a list is a question, and no chunk, unless the user goes on in another
    message.
    """
    chunks: list[str] = []
    for message, following in zip_longest(messages, messages[1:]):
        if isinstance(message, HumanMessage) and isinstance(message.content, list):
            blocks = list(_texts(message))
            chunks += blocks if isinstance(following, HumanMessage) else blocks[:-1]
    return chunks


def usage(report: Report) -> UsageMetadata:
    """Token counts; `cache_creation` are tokens that were computed and are now being kept."""
    read, asked, made = report.cached_tokens, report.prompt_tokens, report.output_tokens
    kept = min(report.missed_tokens, asked - read)
    told = InputTokenDetails(cache_read=read, cache_creation=kept)
    return UsageMetadata(
        input_tokens=asked, output_tokens=made, total_tokens=asked + made, input_token_details=told
    )


def _function(call: ToolCall) -> dict[str, Any]:
    return {"name": call["name"], "arguments": call["args"]}


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return _ROLES.get(message.role, message.role)
    if message.type not in _ROLES:
        raise ValueError(
            f"a message of type {message.type!r} cannot be shown to the model, which knows "
            f"{sorted(_ROLES)}; turn it into one of these, or leave it out"
        )
    return _ROLES[message.type]


def _content(message: BaseMessage) -> str:
    return message.content if isinstance(message.content, str) else "".join(_texts(message))


def _texts(message: BaseMessage) -> Iterator[str]:
    """The text blocks, but for those without a text, which LangChain's own `text` leaves out, too.

    A model's own message may hold more: what it thought, and its calls, have places of their own.
    """
    for block in message.content:
        kind, text = ("text", block) if isinstance(block, str) else map(block.get, ("type", "text"))
        if kind in ("text", "text-plain") and text is not None:
            yield str(text)
        elif kind in _MEDIA or (kind != "text" and not isinstance(message, AIMessage)):
            raise ValueError(
                f"a message of type {message.type!r} holds a block of type {kind!r}, and the model "
                "reads text only; take it out, or turn it into text first"
            )


class PMLPromptTemplate(BasePromptTemplate[Any]):
    """Renders prompts of a schema.

    `ChatCachedRAG` (for schemas with messages) and `CachedRAGLLM` (for those without) take the KV
    of the schema's modules; other models get the same text.

    Example:
        template = PMLPromptTemplate.from_schema(
            Schema.from_file("trip.xml"),
            '<prompt schema="trip"><plan days="{days}"/><user>{question}</user></prompt>',
        )
        chain = template | ChatCachedRAG()
        chain.invoke({"days": "a week", "question": "Where to?"})
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    source: Any = Field(exclude=True, repr=False)
    """A `SchemaTemplate` or a prompt function."""

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
        return cls(
            source=function,
            input_variables=list(function.variables),
            optional_variables=list(function.optional),
        )

    @property
    def _prompt_type(self) -> str:
        return "pml"

    def format_prompt(self, **kwargs: Any) -> PromptValue:
        """The prompt as messages, or, of a schema without messages, as a string."""
        plain = sent(self.source, self._merge_partial_and_user_variables(**kwargs))
        if isinstance(plain, str):
            return StringPromptValue(text=plain)
        return ChatPromptValue(messages=convert_to_messages(plain))

    def format(self, **kwargs: Any) -> str:
        """The prompt as a string."""
        return self.format_prompt(**kwargs).to_string()


class CacheReportHandler(BaseCallbackHandler):
    """Collects the report of every request it hears of, and prints it if told to.

    Example:
        reports = CacheReportHandler(prints=True)
        chain.invoke(question, config={"callbacks": [reports]})
        reports.reports[-1].cached_tokens

    Attributes:
        reports: in the order in which the requests ended. Safe for several threads.
    """

    def __init__(self, *, prints: bool = False) -> None:
        self.reports: list[Report] = []
        self._prints = prints

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        """Take the reports out of a result; other models have none."""
        for generation in chain.from_iterable(response.generations):
            message = getattr(generation, "message", None)
            about = getattr(message, "response_metadata", generation.generation_info) or {}
            # What a response cache answers was reported when it was computed.
            usage = getattr(message, "usage_metadata", None) or {}
            if "cached_rag" in about and "total_cost" not in usage:
                report = Report(**about["cached_rag"])
                self.reports.append(report)
                if self._prints:
                    print(f"{report.to_line()}\n", end="", file=sys.stderr)
