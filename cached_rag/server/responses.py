"""OpenAI's Responses, told in chat completions: what is asked, and what is answered.

Nothing is kept between requests, so a conversation is sent whole. Knows JSON; knows no engine.
"""

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cached_rag.errors import ConfigError
from cached_rag.server.forms import Json, Strict
from cached_rag.server.protocol import WITHOUT_EFFECT, Basics, ChatRequest, Chunks, Name, Score

_KEEPS_NONE = "this server keeps no responses (send whole conversations as input) and does not take"
# Settings that the response has as they were asked for.
_TOLD = ("instructions", "max_output_tokens", "temperature", "top_p")
# Settings that chat completions have under the same name.
_SAME = (*Basics.model_fields, "parallel_tool_calls", "k", "min_score", "where")


class _Text(Strict):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _Reasoning(Strict):
    _ignored = ("summary", "generate_summary")

    effort: Name | None = None


class ResponsesRequest(Basics):
    """POST /v1/responses."""

    _ignored = (*WITHOUT_EFFECT, "include", "stream_options", "max_tool_calls")
    _neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "truncation": (None, "disabled"),
        "background": (None, False),
        "previous_response_id": (None,),
        "conversation": (None,),
        "prompt": (None,),
        "top_logprobs": (None, 0),
    }
    _refusals = dict.fromkeys(("background", "previous_response_id", "conversation"), _KEEPS_NONE)

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    k: Chunks | None = None
    min_score: Score | None = None
    where: Annotated[dict[str, Any], Field(max_length=16)] | None = None

    def chat(self) -> ChatRequest:
        """The same, as a chat completion.

        Raises:
            ConfigError: an input of a kind that this server cannot read.
            ValidationError: what is in it has not the form that it should have.
        """
        asked: Json = self.model_dump(include={*_SAME}, exclude_none=True)
        asked["messages"] = list(_messages(self.instructions, self.input))
        if self.max_output_tokens is not None:
            asked["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            asked["reasoning_effort"] = self.reasoning.effort
        if self.stream:
            asked["stream_options"] = {"include_usage": True}
        if self.tools:
            asked["tools"] = [_nested(tool) for tool in self.tools]
        if self.tool_choice is not None:
            choice = self.tool_choice
            asked["tool_choice"] = choice if isinstance(choice, str) else _nested(choice)
        if self.text is not None and (form := self.text.format) is not None:
            schema = {name: value for name, value in form.items() if name != "type"}
            asked["response_format"] = {"type": form.get("type")}
            if schema:
                asked["response_format"]["json_schema"] = schema
        return ChatRequest.model_validate(asked)


def _nested(tool: Json) -> Json:
    """A tool, or the choice of one, whose function chat completions have a level deeper."""
    if tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _messages(instructions: str | None, given: str | list[Json]) -> Iterator[Json]:
    if instructions:
        yield {"role": "system", "content": instructions}
    calls: list[Json] = []
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
            continue
        if calls:  # those that stand beside each other are one message's
            yield {"role": "assistant", "content": "", "tool_calls": calls}
            calls = []
        if kind == "function_call_output":
            said = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
            yield {"role": "tool", **said}
        elif kind == "message":
            yield {"role": item.get("role"), "content": _text(item.get("content"))}
        elif kind != "reasoning":
            raise ConfigError(f"this server cannot read an input of type {str(kind)[:50]!r}")
    if calls:
        yield {"role": "assistant", "content": "", "tool_calls": calls}


def _text(content: Any) -> Any:
    """Text, from parts of it; what else it is, chat completions refuse with their words."""
    if not isinstance(content, list):
        return content
    parts = [part if isinstance(part, dict) else {"type": part} for part in content]
    return [
        part | {"type": "text"} if part.get("type") in ("input_text", "output_text") else part
        for part in parts
    ]


class Reply:
    """One response, as it is made: whole, or as events.

    Attributes:
        asked: the request.
    """

    def __init__(self, asked: ResponsesRequest) -> None:
        self.asked = asked
        self._id = _name("resp")
        self._output: list[Json] = []
        self._number = 0

    def whole(self, completion: Json) -> Json:
        """The response that a chat completion is."""
        [choice] = completion["choices"]
        for _ in self._told(choice["message"]):
            pass  # nobody is sent these
        return self._shown(completion, choice["finish_reason"], completion["usage"])

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[str]:
        """Server-sent events, from a chat completion's chunks."""
        reason, usage, head = "stop", None, None
        async for chunk in chunks:
            if head is None:
                head = chunk
                yield self._event("created", response=self._shown(chunk, None, None))
                yield self._event("in_progress", response=self._shown(chunk, None, None))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                reason = choice["finish_reason"] or reason
                for event in self._told(choice["delta"]):
                    yield event
        for event in self._ended():
            yield event
        assert head is not None
        done = self._shown(head, reason, usage)
        yield self._event(done["status"], response=done)

    def _told(self, said: Json) -> Iterator[str]:
        """The events of a message, or of what a chunk adds to it."""
        for name, begun in (("reasoning_content", _thought), ("content", _message)):
            if said.get(name):
                yield from self._said(said[name], begun(""))
        for part in said.get("tool_calls", ()):
            yield from self._called(part)

    def _said(self, text: str, empty: Json) -> Iterator[str]:
        """More of an item that has text; `empty` is one, to begin with if the last is another."""
        if not self._output or self._output[-1]["type"] != empty["type"]:
            yield from self._ended()
            yield from self._begun(empty)
            part = empty["content"][0]
            yield self._event("content_part.added", **self._at(), content_index=0, part=part)
        part = self._output[-1]["content"][0]
        part["text"] += text
        yield self._event(f"{part['type']}.delta", **self._at(), content_index=0, delta=text)

    def _called(self, part: Json) -> Iterator[str]:
        if "id" in part:
            yield from self._ended()
            yield from self._begun(_call(part["id"], part["function"]["name"], ""))
        more = part["function"].get("arguments") or ""
        if more:
            self._output[-1]["arguments"] += more
            yield self._event("function_call_arguments.delta", **self._at(), delta=more)

    def _begun(self, item: Json) -> Iterator[str]:
        self._output.append(item)
        begun = item | {"status": "in_progress"} | ({"content": []} if "content" in item else {})
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=begun)

    def _ended(self) -> Iterator[str]:
        """The events behind an item's last piece; nothing before the first item."""
        if not self._output:
            return
        item = self._output[-1]
        if item["type"] != "function_call":
            [part] = item["content"]
            place = self._at() | {"content_index": 0}
            yield self._event(f"{part['type']}.done", **place, text=part["text"])
            yield self._event("content_part.done", **place, part=part)
        else:
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("function_call_arguments.done", **self._at(), **done)
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _at(self) -> Json:
        return {"output_index": len(self._output) - 1, "item_id": self._output[-1]["id"]}

    def _event(self, name: str, /, **content: Any) -> str:
        kind = f"response.{name}"
        data = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

    def _shown(self, chat: Json, reason: str | None, usage: Json | None) -> Json:
        """The response as far as it is made.

        Args:
            chat: the chat completion, or one of its chunks.
            reason: why it ended; None while it is made.
        """
        asked = self.asked
        is_cut = reason == "length"
        done = "incomplete" if is_cut else "completed"
        found = {} if "sources" not in chat else {"sources": chat["sources"]}
        return {
            "id": self._id,
            "object": "response",
            "created_at": chat["created"],
            "status": "in_progress" if reason is None else done,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": chat["model"],
            "output": self._output,
            **asked.model_dump(include={*_TOLD}),
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "tools": asked.tools or [],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "metadata": {},
            "usage": None if usage is None else _usage(usage),
            **found,
        }


def _message(text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    head = {"type": "message", "id": _name("msg"), "role": "assistant", "status": "completed"}
    return {**head, "content": [part]}


def _thought(text: str) -> Json:
    part = {"type": "reasoning_text", "text": text}
    head = {"type": "reasoning", "id": _name("rs"), "summary": [], "status": "completed"}
    return {**head, "content": [part]}


def _call(call_id: str, name: str, arguments: str) -> Json:
    head = {"type": "function_call", "id": _name("fc"), "call_id": call_id, "status": "completed"}
    return {**head, "name": name, "arguments": arguments}


def _usage(chat: Json) -> Json:
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": chat["prompt_tokens_details"],
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
