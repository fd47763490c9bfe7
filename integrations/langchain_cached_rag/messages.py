"""LangChain's messages as roles and strings, and what a report is in LangChain's words.

Knows content blocks; knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    BaseMessageChunk,
    ChatMessage,
    HumanMessage,
    ToolMessage,
    message_chunk_to_message,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder

from cached_rag import Engine, Report
from cached_rag.spi import TokenLogprobs

Prompt = str | list[dict[str, Any]]
_ROLES = {
    **{"human": "user", "ai": "assistant", "system": "system", "developer": "system"},
    **{"tool": "tool", "function": "tool"},
}


def plain(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form; text blocks are joined as LangChain joins them.

    Raises:
        ValueError: content that is no text, or a message of an unknown kind.
    """
    whole = [
        message_chunk_to_message(message) if isinstance(message, BaseMessageChunk) else message
        for message in messages
    ]
    return [_plain(message) for message in whole]


def _plain(message: BaseMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": _role(message), "content": _content(message)}
    if isinstance(message, AIMessage) and message.tool_calls:
        found["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"] or "",
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, AIMessage):  # a template wants arguments that are whole
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


def logprobs(found: Sequence[TokenLogprobs], engine: Engine) -> dict[str, Any]:
    """Log probabilities in OpenAI's form."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = engine.tokenization.spelled(token)
        text = spelled.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}

    return {
        "content": [
            {**one(at.token, at.logprob), "top_logprobs": [one(*pair) for pair in at.top]}
            for at in found
        ]
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
    return message.content if isinstance(message.content, str) else "".join(_texts(message))


def _texts(message: BaseMessage) -> Iterator[str]:
    """The text blocks, but for those without a text, which LangChain's own `text` leaves out, too.

    A model's own message may hold more, such as reasoning: not shown again.
    """
    for block in message.content:
        kind, text = ("text", block) if isinstance(block, str) else map(block.get, ("type", "text"))
        if kind in ("text", "text-plain") and text is not None:
            yield str(text)
        elif kind != "text" and not isinstance(message, AIMessage):
            raise ValueError(
                f"a {message.type} message holds a content block of type {kind!r}, and the model "
                "reads text only; take it out, or turn it into text first"
            )
