"""Tools: how a model is told of them and calls them, the grammar of calls, and reading them.

How a model writes calls is found out from its chat template, or else told to it. A template that
knows tools lists them for the model, and writes the calls of earlier turns as the model learned
them. So two made-up calls are rendered, and what stands around their names and arguments is the
form. Templates that know no tools, or write arguments otherwise than as JSON, get messages in which
tools, calls and results are text. Knows templates; knows no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from cached_rag.errors import ConfigError
from cached_rag.grammar.grammar import Grammar, Json, json_rule, overlap, quoted

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
# "none", "auto" (as the model likes), "required" (at least one), or the name of the tool to call.
ToolChoice = str
_NO_PARAMETERS: Json = {"properties": {}}
_DECODER = json.JSONDecoder()


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
        texts = [_in_our_form(call["function"]) for call in calls]
        content = "\n".join(filter(None, [message["content"], *texts]))
        return {"role": message["role"], "content": content}
    return message


def _in_our_form(called: Mapping[str, Any]) -> str:
    return f"{_OURS.begin}{called['name']}{_OURS.middle}{_json(called['arguments'])}{_OURS.end}"


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


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: as JSON; what there is of it, if the answer was cut off.
        is_complete: whether it is all there.
    """

    name: str
    arguments: str
    is_complete: bool = True


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    form: CallForm,
    controls: Mapping[str, int],
    *,
    parallel: bool = True,
    schema: Json | None = None,
) -> Grammar:
    """The grammar of an answer that calls tools.

    Args:
        tools: in OpenAI's form, {"type": "function", "function": {"name", "parameters", ...}}.
        choice: see `ToolChoice`.
        form: how the model writes calls.
        controls: ids of the control tokens, which are no text to the grammar.
        parallel: whether there may be several calls.
        schema: JSON schema of an answer without calls; None for any text.

    Raises:
        ConfigError: no such tool, or one without a name, or whose parameters are no object.
    """
    wanted = {_name(tool): _parameters(tool) for tool in tools}
    if choice not in ("auto", "required"):
        if choice not in wanted:
            raise ConfigError(f"there is no tool {choice!r}; there are {', '.join(wanted)}")
        wanted = {choice: wanted[choice]}
    if not wanted:
        raise ConfigError("tools are to be called, and there is none")

    def text(literal: str) -> str:
        return _literal(literal, controls)

    named = " | ".join(
        f"{quoted(name)} {text(form.middle)} {json_rule(schema)}" for name, schema in wanted.items()
    )
    rules = [f"call: ({named}) {text(form.end)}"]
    several = ""
    if form.separator is not None and parallel:
        several = f"({text(form.separator)} {text(form.begin)} call)*"
    rest = f"call {several} {text(form.close)}"
    start = text(form.opening + form.begin)
    said = r"SAID: /(.|\n)*/"
    if choice != "auto":
        rules += [f"start: {start} {rest}"]
    elif schema is not None:
        rules += [f"start: {start} {rest} | {json_rule(schema)}"]
    elif start.startswith("<["):  # a control token: no text can be mistaken for it
        rules += [said, f"start: SAID ({start} {rest})?"]
    else:  # the first place where the text reads so begins a call
        rules += [said, f"head[lazy]: SAID {start}", f"start: head {rest} | SAID"]
    return Grammar("\n".join(rules), shows_control=True)


def _name(tool: Tool) -> str:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            'a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}, not '
            f"{tool!r}"
        )
    name: str = function["name"]
    return name


def _parameters(tool: Tool) -> Json:
    schema = tool["function"].get("parameters") or _NO_PARAMETERS
    kinds = schema.get("type", "object") if isinstance(schema, Mapping) else None
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ConfigError(
            f"the parameters of tool {_name(tool)!r} are no object; models write calls with one: "
            '{"type": "object", "properties": ...}'
        )
    return {**schema, "type": "object"}


def _literal(text: str, controls: Mapping[str, int]) -> str:
    """The grammar's notation for a text in which control tokens are meant as such."""
    longest_first = sorted(controls, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if controls else [text]
    return " ".join(
        f"<[{controls[part]}]>" if part in controls else quoted(part) for part in parts if part
    )


def read_answer(
    text: str,
    form: CallForm,
    names: Collection[str],
    *,
    is_over: bool = True,
    is_forced: bool = False,
) -> tuple[str, list[ToolCall]]:
    """What an answer says before its calls, and the calls.

    Small models forget the mark before a call. So an answer that is nothing but a call of a known
    tool without its mark is read as that call.

    Args:
        text: the answer, control tokens included.
        names: of the tools that may be called.
        is_over: no more of it comes; else an ending that may begin a call is not said yet.
        is_forced: the answer can be nothing but calls, so what begins one is never said.
    """
    start = form.opening + form.begin
    if is_forced and start.startswith(text):
        return "", []
    said, found, rest = text.partition(start)
    if found:
        calls = _calls(rest, form)
        return (said.rstrip(), calls) if _are_known(calls, names) else (text, [])
    alone, brace = text.lstrip(), form.begin.find("{")
    unmarked = form.begin[brace:] if brace >= 0 else ""
    if unmarked and alone.startswith(unmarked):
        rest = alone[len(unmarked) :]
        calls = _calls(rest, form)
        may_begin = not is_over and any((name + form.middle).startswith(rest) for name in names)
        if _are_known(calls, names) and (calls or may_begin):
            return "", calls
    elif unmarked and not is_over and unmarked.startswith(alone):
        return "", []
    held = 0 if is_over else overlap(text, start)
    return text[: len(text) - held], []


def _are_known(calls: Sequence[ToolCall], names: Collection[str]) -> bool:
    """Whether these are calls of known tools, whose arguments are objects."""
    return all(
        call.name in names and (call.arguments.lstrip() or "{").startswith("{") for call in calls
    )


def _calls(rest: str, form: CallForm) -> list[ToolCall]:
    """The calls in a text that goes on behind what begins the first one."""
    calls: list[ToolCall] = []
    while True:
        name, found, rest = rest.partition(form.middle)
        if not found:
            return calls
        try:
            _, end = _DECODER.raw_decode(rest)
        except ValueError:
            return [*calls, ToolCall(name, rest, is_complete=False)]
        calls.append(ToolCall(name, rest[:end]))
        next_one = form.end + (form.separator or "") + form.begin
        if form.separator is None or not rest.startswith(next_one, end):
            return calls
        rest = rest[end + len(next_one) :]
