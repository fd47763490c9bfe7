"""Requests: OpenAI's chat completions and completions, and our own for documents.

A setting that this server cannot follow is an error, never ignored. Knows JSON; knows no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field, ValidationInfo, field_validator, model_validator

from cached_rag.server.forms import (
    CalledTool,
    Choice,
    NamedChoice,
    Offered,
    ResponseFormat,
    Strict,
    Text,
)

_DEFAULT_TOKENS = 256
# Most messages or texts of a request; each costs far more than its few bytes of JSON.
_MOST = 10_000
_MOST_ANSWERS = 16
_MOST_STOPS = 32  # Continue's autocomplete sends up to two dozen, where OpenAI takes 4
# OpenAI's settings that we lack, with the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "options": (None, {}),
    "web_search_options": (None,),
}
# Settings that never change an answer: who asks, how it is billed, how long a model stays loaded;
# a guess at the answer, to make it sooner.
WITHOUT_EFFECT: tuple[str, ...] = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "keep_alive", "verbosity"),
    "prediction",
)

# Settings that are a `GenerationConfig`'s as they are.
_PASSED_ON = (
    *("top_p", "top_k", "seed", "method", "quality", "recompute_ratio", "drafts"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
# The latter is what llama.cpp and Ollama call it, and Open WebUI for both.
_PENALTY = AliasChoices("repetition_penalty", "repeat_penalty")
# What it thought before it answered.
_THOUGHT = AliasChoices("reasoning_content", "reasoning")


Name = Annotated[Text, Field(max_length=256)]
Value = Annotated[Text, Field(max_length=1000)] | int | float
Values = Annotated[list[Value], Field(max_length=_MOST)]
Chunks = Annotated[int, Field(ge=1, le=100)]  # as `Retrieval`, whose packages may be missing
Score = Annotated[float, Field(ge=-1, le=1)]
Stop = Annotated[Text, Field(max_length=1000)]


class TextPart(Strict):
    """A piece of a message's content."""

    # Where Anthropic's cache should end, as ours finds that by itself; what our Responses have.
    _ignored = ("cache_control", "annotations", "logprobs")

    type: Literal["text"]
    text: Text


class ChatMessage(Strict):
    """One message of a conversation; content in several parts is joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=_MOST)] = ""
    name: Name | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=_MOST)] | None = None
    tool_call_id: Name | None = None
    thought: Text | None = Field(None, validation_alias=_THOUGHT)

    # What our answers have besides, which clients send back to us; and their content once more,
    # which OpenAI's `parse()` adds.
    _neutral = dict.fromkeys(("refusal", "function_call", "audio", "annotations"), (None, []))
    _ignored = ("parsed",)
    _twice: ClassVar[dict[str, str]] = {"reasoning": "reasoning_content"}

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: Any, given: ValidationInfo) -> Any:
        """Refuses pictures, sound and files, in one sentence."""
        if content is None and given.data.get("role") == "assistant":  # it has called tools
            return ""
        parts = content if isinstance(content, list) else []
        kinds = [part.get("type") for part in parts if isinstance(part, dict)]
        if other := next((str(kind) for kind in kinds if kind != "text"), None):
            raise ValueError(
                f"the model reads text only, and no {other[:50]!r}: send parts of type 'text'"
            )
        if not isinstance(content, str | list):
            raise ValueError("it is neither text nor a list of parts of type 'text'")
        return content

    @model_validator(mode="after")
    def _is_whole(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} cannot have tool_calls")
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs a content")
        if self.thought and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} cannot have a reasoning")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            calls = [call.model_dump() for call in self.tool_calls]
            found["tool_calls"] = calls
        if self.thought:
            found["reasoning_content"] = self.thought
        if role == "tool":
            found |= {"tool_call_id": self.tool_call_id or "", "name": self.name or ""}
        elif self.name is not None:
            found["name"] = self.name
        return found


class StreamOptions(Strict):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    # Random padding that hides how long pieces are. It is no part of the answer, and we add none.
    include_obfuscation: bool | None = None


class Basics(Strict):
    """What every request for an answer may say.

    Not OpenAI's but ours are `method`, `quality` and `recompute_ratio`, as in `GenerationConfig`,
    and `cache_salt`: requests with different salts share no KV.
    """

    model: Annotated[Text, Field(max_length=1000)]
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    method: Name | None = None
    quality: Name | None = None
    recompute_ratio: float | None = None
    cache_salt: Name | None = None


class _Settings(Basics):
    """The settings of both kinds of completion.

    Ours are `top_k`, `repetition_penalty` and `drafts`, as in `GenerationConfig`.
    """

    _ignored = WITHOUT_EFFECT
    _neutral = _NEUTRAL
    _twice: ClassVar[dict[str, str]] = {"repeat_penalty": "repetition_penalty"}

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    seed: int | None = None
    top_k: int | None = None
    repetition_penalty: float | None = Field(None, validation_alias=_PENALTY)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    n: int | None = Field(None, ge=1, le=_MOST_ANSWERS)
    drafts: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens of the answer, for which OpenAI has two names; None if neither is given."""
        return self.max_completion_tokens or self.max_tokens

    def options(self) -> dict[str, Any]:
        """The settings as those of a `GenerationConfig`; the default temperature is OpenAI's, 1."""
        return self.model_dump(include={*_PASSED_ON}, exclude_none=True) | {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "stop": tuple([self.stop] if isinstance(self.stop, str) else self.stop or ()),
            "max_tokens": self.wanted_tokens or _DEFAULT_TOKENS,
        }


class ChatRequest(_Settings):
    """POST /v1/chat/completions.

    Ours are `k`, `min_score` and `where`: what an index answers from, see `Retrieval`. What the
    model's chat template is given (`chat_template_kwargs`) is vLLM's and llama.cpp's, `think` is
    Ollama's.
    """

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MOST)
    tools: Offered | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=16)] | None = None
    think: bool | None = None
    reasoning_effort: Name | None = None
    k: Chunks | None = None
    min_score: Score | None = None
    where: Annotated[dict[Name, Values | Value], Field(max_length=16)] | None = None

    @model_validator(mode="after")
    def _shows_what_is_asked_for(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is shown with logprobs only; send logprobs=true, too")
        return self

    def options(self) -> dict[str, Any]:
        """As above."""
        shown = (self.top_logprobs or 0) if self.logprobs else None
        return super().options() | {"logprobs": shown}

    def prompts(self) -> list[list[dict[str, Any]]]:
        """The conversation, as a list of one."""
        return [[message.plain() for message in self.messages]]

    def retrieval(self) -> dict[str, Any]:
        """What is asked of an index, as settings of a `Retrieval`; empty if nothing is."""
        given = {"k": self.k, "min_score": self.min_score, "where": self.where or None}
        return {name: value for name, value in given.items() if value is not None}

    def form(self) -> dict[str, Any]:
        """The form of the answer, as the settings of an engine's `Tools`."""
        choice = self.tool_choice or "auto"
        return {
            "tools": [tool.plain() for tool in self.tools or ()],
            "choice": choice.function.name if isinstance(choice, NamedChoice) else choice,
            "parallel": self.parallel_tool_calls,
            "schema": self.response_format.schema_wanted() if self.response_format else None,
            "template_kwargs": self._for_template(),
        }

    def _for_template(self) -> dict[str, Any]:
        """What the chat template is given; templates pass over what they do not know."""
        found = {"enable_thinking": self.think, "reasoning_effort": self.reasoning_effort}
        given = {name: value for name, value in found.items() if value is not None}
        return {**given, **(self.chat_template_kwargs or {})}


class CompletionRequest(_Settings):
    """POST /v1/completions."""

    prompt: (
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=64)]
    )
    logprobs: int | None = Field(None, ge=0, le=20)

    # No chat template is applied, which these are for.
    _ignored = (*WITHOUT_EFFECT, "reasoning_effort")
    _neutral = _NEUTRAL | {"chat_template_kwargs": (None, {}), "think": (None, False)}

    def options(self) -> dict[str, Any]:
        """As above."""
        return super().options() | {"logprobs": self.logprobs}

    def form(self) -> dict[str, Any]:
        """Any text."""
        return {"parts_thoughts": False}

    def prompts(self) -> list[str]:
        """The prompts; one string is a list of one."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class DocumentsRequest(Strict):
    """POST and DELETE /v1/documents: texts as they will stand in prompts.

    Attributes:
        texts: a list among them has the chunks of one document in their order; see `Engine.encode`.
        messages: how prompts with them begin; `{documents}` marks where the texts will stand.
        pinned, ttl_seconds: how long their KV is kept, see `Engine.hold`. Nothing to DELETE.
    """

    texts: list[Text | Annotated[list[Text], Field(min_length=1, max_length=_MOST)]] = Field(
        min_length=1, max_length=_MOST
    )
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=_MOST)] | None = None
    pinned: bool | None = None
    ttl_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: Name | None = None


class EmbeddingsRequest(Strict):
    """POST /v1/embeddings.

    Ours is `truncate`: whether to embed the beginning of a text that the model cannot read to its
    end (the default), or to refuse it.
    """

    model: Annotated[Text, Field(max_length=1000)]
    input: Text | Annotated[list[Text], Field(max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate: bool | None = None
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        """Refuses nothing, and tokens, which only the tokenizer they came from could read."""
        if data in ("", []) or (isinstance(data, list) and "" in data):
            raise ValueError("there is nothing to embed: send texts that are not empty")
        if isinstance(data, list) and any(isinstance(one, int | list) for one in data):
            raise ValueError(
                "tokens cannot be embedded, as they are another tokenizer's; send text "
                "(LangChain: check_embedding_ctx_length=False)"
            )
        return data
