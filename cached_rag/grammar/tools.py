"""Tools: the grammar of answers that may or must call them, and calls read from an answer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cached_rag.errors import ConfigError
from cached_rag.grammar.calls import CallForm, Tool
from cached_rag.grammar.grammar import Grammar, Json, json_rule, overlap, quoted

# "none", "auto" (as the model likes), "required" (at least one), or the name of the tool to call.
ToolChoice = str
_NO_PARAMETERS: Json = {"properties": {}}
_DECODER = json.JSONDecoder()


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
    start = form.opening + form.begin
    if choice != "auto":
        rules.append(f"start: {text(start)} {rest}")
        return Grammar("\n".join(rules), shows_control=True)
    if schema is not None:
        rules.append(f"start: {text(start)} {rest} | {json_rule(schema)}")
        return Grammar("\n".join(rules), shows_control=True)
    rules.append(r"SAID: /(.|\n)*/")
    if text(start).startswith("<["):  # a control token: no text can be mistaken for it
        rules.append(f"start: SAID ({text(start)} {rest})?")
    else:  # the first place where the text reads so begins a call
        rules += [f"head[lazy]: SAID {text(start)}", f"start: head {rest} | SAID"]
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
    parts: list[str] = []
    while text:
        at, token = min(
            ((found, token) for token in controls if (found := text.find(token)) >= 0),
            key=lambda pair: (pair[0], -len(pair[1])),
            default=(len(text), ""),
        )
        if at:
            parts.append(quoted(text[:at]))
        if token:
            parts.append(f"<[{controls[token]}]>")
        text = text[at + len(token) :]
    return " ".join(parts)


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
