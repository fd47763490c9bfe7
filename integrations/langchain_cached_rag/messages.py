"""LangChain's messages as roles and strings, and what a report is in LangChain's words.

Knows content blocks; knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    BaseMessageChunk,
    ChatMessage,
    HumanMessage,
    message_chunk_to_message,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder

from cached_rag import Report

Prompt = str | list[dict[str, str]]
# Tools' and functions' results are something the model is told, as by a user: few templates of
# local models know more roles.
_ROLES = {
    **{"human": "user", "ai": "assistant", "system": "system", "developer": "system"},
    **{"tool": "user", "function": "user"},
}


def plain(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Messages as roles and strings; text blocks are joined as LangChain joins them.

    Raises:
        ValueError: content that is no text, or a message of an unknown kind.
    """
    whole = [
        message_chunk_to_message(message) if isinstance(message, BaseMessageChunk) else message
        for message in messages
    ]
    return [{"role": _role(message), "content": _content(message)} for message in whole]


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
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        if isinstance(message, HumanMessage) and isinstance(message.content, list):
            blocks = list(_texts(message))
            chunks += blocks if isinstance(following, HumanMessage) else blocks[:-1]
    return chunks


def usage(report: Report) -> UsageMetadata:
    """Token counts; `cache_creation` are tokens that were computed and are now being kept."""
    read = report.cached_tokens
    details = InputTokenDetails(
        cache_read=read, cache_creation=min(report.missed_tokens, report.prompt_tokens - read)
    )
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.output_tokens,
        total_tokens=report.prompt_tokens + report.output_tokens,
        input_token_details=details,
    )


def metadata(model: str, report: Report, finish_reason: str) -> dict[str, Any]:
    """What goes with an answer: the model, why the answer ended, and the whole report."""
    return {
        "model_name": model,
        "model_provider": "cached-rag",
        "finish_reason": finish_reason,
        "cached_rag": report.to_dict(),
    }


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
    text = message.content if isinstance(message.content, str) else "".join(_texts(message))
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [{"name": call["name"], "args": call["args"]} for call in message.tool_calls]
        return "\n".join(filter(None, [text, json.dumps(calls, ensure_ascii=False)]))
    return text


def _texts(message: BaseMessage) -> Iterator[str]:
    """The text blocks. A model's own message may hold more, such as reasoning: not shown again."""
    for block in message.content:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind in ("text", "text-plain"):
            yield block if isinstance(block, str) else str(block["text"])
        elif not isinstance(message, AIMessage):
            raise ValueError(
                f"a {message.type} message holds a content block of type {kind!r}, and the model "
                "reads text only; take it out, or turn it into text first"
            )
