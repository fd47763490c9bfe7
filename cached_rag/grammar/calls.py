"""How a model writes calls of tools: found out from its chat template, or else told to it.

A template that knows tools lists them for the model, and writes the calls of earlier turns as the
model learned them. So two made-up calls are rendered, and what stands around their names and
arguments is the form. Templates that know no tools, or write arguments otherwise than as JSON, get
messages in which tools, calls and results are text. Knows templates; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]
Tool = Mapping[str, Any]
# Renders messages with tools, with or without the header of an answer at the end.
Apply = Callable[[list[Message], Sequence[Tool], bool], str]

_NAME, _KEY, _SAID = "qx_name", "qx_key", "qx said"
_ID = "qxcall000"  # Mistral's templates want nine letters and digits
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "qx",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_INSTRUCTIONS = """You may call functions. These are their signatures, one JSON object each:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object in <tool_call></tool_call>, and nothing after it:
<tool_call>
{{"name": <function name>, "arguments": <JSON object>}}
</tool_call>"""


@dataclass(frozen=True)
class CallForm:
    """The text around calls: open, then for each call begin name middle arguments end, then close.

    Attributes:
        separator: between two calls; None if a turn has one call at most.
        is_native: the template writes it; else messages are rewritten by `told`.
    """

    opening: str
    begin: str
    middle: str
    end: str
    separator: str | None
    close: str
    is_native: bool = True

    @classmethod
    def of(cls, apply: Apply) -> CallForm:
        """The form that a template writes, or ours, which is that of the Hermes and Qwen models."""
        try:
            return _native(apply) or _OURS
        except (TemplateError, TypeError, ValueError):
            return _OURS


_OURS = CallForm(
    "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "", is_native=False
)


def told(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Messages in which tools, calls and results are text, in our form."""
    found = [_told(message) for message in messages]
    if tools:
        listed = "\n".join(_json(tool.get("function", tool)) for tool in tools)
        text = _INSTRUCTIONS.format(tools=listed)
        if found and found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{text}"}
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


def _told(message: Message) -> Message:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    if calls := message.get("tool_calls"):
        texts = [_OURS.begin + call["function"]["name"] + _OURS.middle for call in calls]
        texts = [
            text + _json(call["function"]["arguments"]) + _OURS.end
            for text, call in zip(texts, calls, strict=True)
        ]
        content = "\n".join(filter(None, [message["content"], *texts]))
        return {"role": message["role"], "content": content}
    return message


def _native(apply: Apply) -> CallForm | None:
    user = {"role": "user", "content": "qx"}
    header = apply([user], [_TOOL], True)
    said = apply([user, {"role": "assistant", "content": _SAID}], [_TOOL], False)
    if _NAME not in header or not said.startswith(header):
        return None
    after = said[said.index(_SAID) + len(_SAID) :]
    one = _called(apply, user, 1, header, after)
    if one is None:
        return None
    try:
        two = _called(apply, user, 2, header, after)
    except TemplateError:
        two = None
    lead = said[len(header) : said.index(_SAID)]  # such as an empty thought, which is no mark
    opening, middle, last = one[0].removeprefix(lead), one[1], one[-1]
    if two is None:
        return CallForm("", opening, middle, last, None, "")
    between = two[2]
    begin = _common(opening[::-1], between[::-1])[::-1]
    rest = between[: len(between) - len(begin)]
    end = _common(rest, last)
    first = opening[: len(opening) - len(begin)]
    return CallForm(first, begin, middle, end, rest[len(end) :], last[len(end) :])


def _called(apply: Apply, user: Message, count: int, header: str, after: str) -> list[str] | None:
    """What is written around the names and arguments of some calls: before, within, ..., after."""
    call = {"name": _NAME, "arguments": {_KEY: "v"}}
    calls = [{"type": "function", "id": _ID, "function": call}] * count
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = apply([user, turn], [_TOOL], False)
    if not text.startswith(header) or not text.endswith(after):
        return None
    text, parts = text[len(header) : len(text) - len(after)], []
    for _ in calls:
        name, key = text.find(_NAME), text.find(f'"{_KEY}"')
        begin = text.rfind("{", 0, key)
        if not 0 <= name < begin:
            return None
        arguments, end = json.JSONDecoder().raw_decode(text, begin)
        if arguments != call["arguments"]:
            return None
        parts += [text[:name], text[name + len(_NAME) : begin]]
        text = text[end:]
    return [*parts, text]


def _common(one: str, other: str) -> str:
    """What both texts begin with."""
    pairs = zip(one, other, strict=False)
    return "".join(mine for mine, its in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
