"""OpenAI's forms: tools, their choice and formats as requests ask for them, and the response.

Knows JSON and finished answers; knows no engine.
"""

from __future__ import annotations

import reprlib
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic
from pydantic_core import PydanticCustomError

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.engine.decoding import Generation, TokenLogprobs, shown_logprobs
from cached_rag.engine.report import Report
from cached_rag.engine.tools import CallPart, Tools, new_call_id
from cached_rag.grammar.tools import check_text

Json = dict[str, Any]
_MOST_TOOLS = 128  # as OpenAI's
_MOST_ARGUMENTS = 100_000
_MOST_FIELDS = 100
_MOST_SAID = 1000
# The kind of the errors by settings that this server lacks, whose context names the "field".
REFUSED = "refused"
_Word = Literal["none", "auto", "required"]


def _whole(text: str) -> str:
    """Refuses half a surrogate pair, which JSON can spell and no tokenizer or file can take."""
    check_text(text)
    return text


Text = Annotated[str, pydantic.AfterValidator(_whole)]


class Strict(pydantic.BaseModel):
    """A part of a body, whose unknown fields are errors, but for those that change nothing."""

    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
    # Fields that never change anything, and those that do not at these values.
    _ignored: ClassVar[Collection[str]] = ()
    _neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # What is said of the latter at other values, where there is more to say.
    _refusals: ClassVar[Mapping[str, str]] = {}
    # Other names of fields, which may stand beside these if they say the same.
    _twice: ClassVar[Mapping[str, str]] = {}

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _without_what_is_neutral(
        cls, data: Any, read: pydantic.ModelWrapValidatorHandler[Any]
    ) -> Any:
        """Leaves these out. A body has room for a million unknown fields, each of them an error."""
        if not isinstance(data, dict):
            return read(data)
        if len(data) > _MOST_FIELDS:
            raise ValueError(f"more than {_MOST_FIELDS} fields")
        kept = {name: value for name, value in data.items() if name not in cls._ignored}
        for name, own in cls._twice.items():
            if name in kept and own in kept and kept[name] == kept[own]:
                del kept[name]
        for name in [one for one in cls._neutral if one in kept and one not in cls.model_fields]:
            if (value := kept.pop(name)) not in cls._neutral[name]:
                cannot = cls._refusals.get(name, "this server does not take")
                says = f"{cannot} {reprlib.repr(value)}"
                raise PydanticCustomError(REFUSED, "{says}", {"says": says, "field": name})
        return read(kept)


class Function(Strict):
    """A function that may be called. Its arguments are held to the schema, strict or not."""

    name: Annotated[str, pydantic.Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, data: Any) -> Any:
        """Refuses a vendor's own tools in one sentence: their other fields are not to blame."""
        kind = data.get("type", "function") if isinstance(data, dict) else "function"
        if kind != "function":
            raise ValueError(
                f"this server has no tool of type {str(kind)[:50]!r}; only type 'function' is "
                "supported, which the client runs itself"
            )
        return data

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class _Named(Strict):
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def _is_no_choice(cls, name: str) -> str:
        """Refuses a name that would be read as a choice of OpenAI's, and not as the tool's."""
        if name in get_args(_Word):
            raise ValueError(f"a tool cannot be forced that is called {name!r}; rename it")
        return name


class NamedChoice(Strict):
    """The choice of one tool."""

    type: Literal["function"]
    function: _Named


class CalledFunction(Strict):
    """A function that was called."""

    _ignored = ("parsed_arguments",)  # the arguments once more, which OpenAI's `parse()` adds

    name: Annotated[str, pydantic.Field(max_length=256)]
    arguments: Annotated[str, pydantic.Field(max_length=_MOST_ARGUMENTS)]


class CalledTool(Strict):
    """A call in a message of the conversation."""

    _ignored = ("index",)  # which it has in a stream

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class _Schema(Strict):
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = pydantic.Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of an answer that calls no tool."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @pydantic.model_validator(mode="after")
    def _has_what_it_says(self) -> ResponseFormat:
        """Refuses a schema that is missing, or that would be passed over."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for the type 'json_schema', which needs one")
        return self

    def schema_wanted(self) -> dict[str, Any] | bool | None:
        """The JSON schema; True for any object, None for text."""
        if self.type == "text":
            return None
        given = self.json_schema.schema_ if self.json_schema else None
        return True if self.type == "json_object" or given is None else given


Offered = Annotated[list[Tool], pydantic.Field(max_length=_MOST_TOOLS)]
Choice = _Word | NamedChoice


@dataclass(frozen=True)
class Envelope:
    """Makes the JSON of one response, whole or in chunks; has what all chunks have in common.

    Attributes:
        model: the name by which clients know it.
        is_chat: whether it is a chat completion, else a completion.
        tokenization: spells tokens, where log probabilities are asked for.
        num_answers: to each prompt.
        sources: the chunks that an index found for the question; None without an index.
        created: seconds since the epoch.
    """

    model: str
    is_chat: bool
    tokenization: Tokenization
    num_answers: int = 1
    sources: list[Json] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, answers: Sequence[Generation], tools: Tools) -> Json:
        """A whole response."""
        choices = [self._choice(index, answer, tools) for index, answer in enumerate(answers)]
        reports = [answer.report for answer in answers]
        found = {} if self.sources is None else {"sources": self.sources}
        counts = {"usage": usage(reports, self.num_answers)}
        return self._head("") | {"choices": choices} | counts | found

    def opening(self, index: int) -> Json:
        """The first chunk of a streamed choice."""
        start = {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": ""}
        found = {} if self.sources is None else {"sources": self.sources}
        return self._chunk(index, start) | found

    def piece(
        self,
        index: int,
        text: str,
        parts: Sequence[CallPart] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        thought: str = "",
    ) -> Json:
        """A chunk with text, a thought, parts of calls, or the log probabilities of tokens."""
        if not self.is_chat:
            return self._chunk(index, {"text": text}, logprobs=logprobs)
        delta: Json = {"content": text} if text or not (parts or thought) else {}
        if thought:
            delta["reasoning_content"] = thought
        if parts:
            called = [{"index": part.index, **_call(part.name, part.arguments)} for part in parts]
            delta["tool_calls"] = called
        return self._chunk(index, {"delta": delta}, logprobs=logprobs)

    def closing(self, index: int, reason: str) -> Json:
        """The last chunk of a streamed choice."""
        end: Json = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk(index, end, reason)

    def counted(self, reports: Sequence[Report]) -> Json:
        """The chunk that says how many tokens were used."""
        return self._head(".chunk") | {"choices": [], "usage": usage(reports, self.num_answers)}

    def _choice(self, index: int, answer: Generation, tools: Tools) -> Json:
        thought, text, calls = tools.parts(answer.text)
        said: Json = {"role": "assistant", "content": text, "refusal": None}
        if thought:
            said["reasoning_content"] = thought
        if calls:
            said["content"] = text or None
            said["tool_calls"] = [_call(call.name, call.arguments) for call in calls]
        content: Json = {"message": said} if self.is_chat else {"text": text}
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": ended(answer.finish_reason, has_calls=bool(calls)),
        }

    def _chunk(
        self,
        index: int,
        content: Json,
        reason: str | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Json:
        shown = self._logprobs(logprobs)
        choice = {"index": index, **content, "logprobs": shown, "finish_reason": reason}
        return self._head(".chunk") | {"choices": [choice]}

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> Json | None:
        """Log probabilities; of completions in the older form that these have."""
        if not found:
            return None
        if self.is_chat:
            return {"content": shown_logprobs(self.tokenization, found), "refusal": None}
        return {
            "tokens": [self._spelled(at.token) for at in found],
            "token_logprobs": [at.logprob for at in found],
            "top_logprobs": [{self._spelled(one): p for one, p in at.top} for at in found],
        }

    def _spelled(self, token: int) -> str:
        return self.tokenization.spelled(token).decode(errors="replace")

    def _head(self, suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def ended(reason: str, *, has_calls: bool) -> str:
    """Why an answer ended, in OpenAI's words."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def _call(name: str | None, arguments: str) -> Json:
    """A call of a tool, or more of its arguments if it has no name."""
    if name is None:
        return {"function": {"arguments": arguments}}
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def usage(reports: Sequence[Report], num_answers: int = 1) -> Json:
    """OpenAI's `usage`: tokens of the prompts, of these from the cache, and of the answers.

    Args:
        num_answers: how many neighbouring reports are of the same prompt, which counts once.
    """
    prompts = reports[::num_answers]
    read = sum(report.prompt_tokens for report in prompts)
    written = sum(report.output_tokens for report in reports)
    cached = sum(report.cached_tokens for report in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def failure(message: str, kind: str, code: str | None = None, param: str | None = None) -> Json:
    """An error in OpenAI's form; `param` is the field that it is about.

    Of a long message, which has what the client sent in it, the beginning is told.
    """
    if len(message) > _MOST_SAID:
        message = f"{message[:_MOST_SAID]} ..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
