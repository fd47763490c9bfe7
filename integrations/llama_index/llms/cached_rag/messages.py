"""LlamaIndex's messages as roles and strings, and an engine's answer in LlamaIndex's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
)
from llama_index.llms.cached_rag.settings import EngineSettings
from llama_index.llms.cached_rag.tools import called

from cached_rag.spi import Stream

Prompt = str | list[dict[str, Any]]
_ROLES = {"function": "tool", "chatbot": "assistant", "model": "assistant", "developer": "system"}


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form.

    Raises:
        ValueError: content that is no text.
    """
    return [_plain(message) for message in messages]


def _plain(message: ChatMessage) -> dict[str, Any]:
    for block in message.blocks:
        if message.role != MessageRole.ASSISTANT and not isinstance(block, TextBlock):
            raise ValueError(
                f"a {message.role.value} message holds a block of type {block.block_type!r}, "
                "and the model reads text only; take it out, or turn it into text first"
            )
    role = _ROLES.get(message.role.value, message.role.value)
    found: dict[str, Any] = {"role": role, "content": message.content or ""}
    if role == "assistant" and (calls := called(message)):
        found["tool_calls"] = calls
    if role == "tool":
        found["tool_call_id"] = str(message.additional_kwargs.get("tool_call_id", ""))
        found["name"] = str(message.additional_kwargs.get("name", ""))
    return found


@dataclass(frozen=True, eq=False, repr=False)
class OwnTemplate:
    """A model's own chat template, for those who ask for a prompt as a string.

    Its repr holds no model's, which would hold this, and so on without end.
    """

    llm: EngineSettings

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnTemplate:
        """The copy's, where the LLM is copied, too."""
        return OwnTemplate(memo.get(id(self.llm), self.llm))

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt."""
        return self.llm.loaded_engine().tokenization.template.render(plain(messages)).text


def chat_response(
    llm: EngineSettings,
    blocks: Sequence[ContentBlock],
    stream: Stream,
    delta: str | None = None,
    *,
    is_over: bool = True,
) -> ChatResponse:
    """What there is of an answer, with the report in `raw` and token counts beside the message.

    Log probabilities come with the whole answer, each token's before those of its alternatives.
    """
    more: dict[str, Any] = _counts(stream)
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=list(blocks), additional_kwargs=more)
    if calls := called(message):  # where LlamaIndex's programs look for them
        message.additional_kwargs["tool_calls"] = calls
    return ChatResponse(
        message=message,
        delta=delta,
        raw=_raw(llm.model, stream, is_over),
        logprobs=_logprobs(llm, stream) if is_over else None,
    )


def completion_response(
    llm: EngineSettings, text: str, stream: Stream, delta: str | None = None
) -> CompletionResponse:
    """As `chat_response`, for a completion."""
    is_over = not delta
    return CompletionResponse(
        text=text,
        delta=delta,
        raw=_raw(llm.model, stream, is_over),
        logprobs=_logprobs(llm, stream) if is_over else None,
        additional_kwargs=_counts(stream),
    )


def _logprobs(llm: EngineSettings, stream: Stream) -> list[list[LogProb]] | None:
    """None if they were not asked for."""
    spelled = llm.loaded_engine().tokenization.spelled

    def one(token: int, logprob: float) -> LogProb:
        found = spelled(token)
        text = found.decode(errors="replace")
        return LogProb(token=text, logprob=logprob, bytes=list(found))

    shown = [
        [one(at.token, at.logprob), *(one(*pair) for pair in at.top if pair[0] != at.token)]
        for at in stream.logprobs
    ]
    return shown or None


def _counts(stream: Stream) -> dict[str, int]:
    report = stream.report
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": len(stream.token_ids),
        "total_tokens": report.prompt_tokens + len(stream.token_ids),
        "cached_tokens": report.cached_tokens,
    }


def _raw(model: str, stream: Stream, is_over: bool) -> dict[str, Any]:
    """Names as in OpenAI's answers, which LlamaIndex's token counters look for."""
    counts = _counts(stream)
    details = {"cached_tokens": counts.pop("cached_tokens")}
    return {
        "model": model,
        "usage": {**counts, "prompt_tokens_details": details},
        "finish_reason": stream.finish_reason if is_over else None,
        "cached_rag": stream.report.to_dict(),
    }
