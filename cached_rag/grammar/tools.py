"""Messages and tools in OpenAI's form: checked, told to a model, held to and read in its answer.

Where a model's template lists no tools or writes no calls, the messages do so as text. Knows forms
of calls; knows no model.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from cached_rag.errors import ConfigError
from cached_rag.grammar.arguments import TEXT_RULE, as_json, until
from cached_rag.grammar.call_form import HERMES, CallForm, Message, Tool, ToolCall
from cached_rag.grammar.grammar import Grammar, Json, json_rule, overlap, quoted
from cached_rag.grammar.thought import ThoughtForm
from cached_rag.options import require

_INSTRUCTIONS = """You may call functions. These are their signatures, one JSON object each:
<tools>
{tools}
</tools>

To call a function, answer {how}, and nothing after it:
{call}"""
# "none", "auto" (as the model likes), "required" (at least one), or the name of the tool to call.
ToolChoice = str
_NO_PARAMETERS: Json = {"properties": {}}
_DEEPEST = 64
# Most characters of all tools' rules. Where each argument has a place of its own, each has a copy
# of the definitions that a schema's parts share.
_LARGEST = 1 << 24
_TOO_LARGE = (
    f"the tools' parameters make a grammar of more than {_LARGEST} characters; offer fewer tools, "
    "or with fewer parameters and definitions ($defs)"
)


def checked(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with a role, a content, and the arguments of tool calls as objects.

    Raises:
        ConfigError: it is malformed.
    """
    if not isinstance(message, Mapping):
        raise ConfigError(
            f"a prompt is a string, or messages with a role and a content; {message!r} is none"
        )
    found = dict(message)
    calls = found.get("tool_calls")
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
        found["content"] = found.get("content") or ""
    if not isinstance(found.get("role"), str) or not isinstance(found.get("content"), str):
        raise ConfigError(f"a message needs a role and a content, both strings; got {message!r}")
    for name, value in found.items():
        if name != "content":
            check_text(value)
    return found


def check_text(value: Any, depth: int = 0) -> None:
    """See that tools and the like are JSON whose texts can be encoded, and that they are not deep.

    Raises:
        ConfigError: half of a surrogate pair, which no tokenizer takes; NaN; more than 64 levels.
    """
    if depth > _DEEPEST:
        raise ConfigError(
            f"tools, calls, schemas and chat_template_kwargs are {_DEEPEST} levels deep at most; "
            "send them with fewer levels"
        )
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                "half of a surrogate pair stands alone; send whole characters"
            ) from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{value} is no number of JSON; send a finite one")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            check_text(str(key), depth)
            check_text(part, depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            check_text(part, depth + 1)


def is_about_tools(message: Mapping[str, Any]) -> bool:
    """Whether it calls tools or has what one gave."""
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def mapped_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all of its texts changed, names among them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): mapped_texts(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [mapped_texts(part, change) for part in value]
    return value


def _call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            'a tool call is {"type": "function", "id": ..., "function": {"name": ..., '
            f'"arguments": ...}}}}, not {call!r}'
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) or {}  # null is none, too
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}  # what a model was cut off at, shown as it is
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"the arguments of a tool call are a JSON object, not {arguments!r}")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def told(
    messages: Sequence[Message], tools: Sequence[Tool], form: CallForm
) -> tuple[list[Message], Sequence[Tool]]:
    """Messages in which what a template does not write is text, and the tools that it lists."""
    found = [_told(message, form) for message in messages]
    if form.lists or not tools:
        return found, tools
    text = _INSTRUCTIONS.format(
        tools="\n".join(as_json(tool.get("function", tool)) for tool in tools),
        how="with a JSON object in <tool_call></tool_call>" if form is HERMES else "in this form",
        call=f"{form.start}<function name>{form.middle}<JSON object>{form.end}{form.close}",
    )
    if found and found[0]["role"] == "system":
        found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{text}"}
    else:
        found.insert(0, {"role": "system", "content": text})
    return found, []


def _told(message: Message, form: CallForm) -> Message:
    if message["role"] == "tool" and form is HERMES:
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    if not form.writes and (calls := message.get("tool_calls")):
        functions = [call["function"] for call in calls]
        text = form.written([(called["name"], called["arguments"]) for called in functions])
        content = "\n".join(filter(None, [message["content"], text]))
        return {"role": message["role"], "content": content}
    return message


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    form: CallForm,
    controls: Mapping[str, int],
    *,
    parallel: bool = True,
    schema: Json | None = None,
    thought: ThoughtForm | None = None,
) -> Grammar:
    """The grammar of an answer that calls tools.

    Args:
        tools: in OpenAI's form, {"type": "function", "function": {"name", "parameters", ...}}.
        choice: see `ToolChoice`.
        form: how the model writes calls.
        controls: ids of the control tokens, which are no text to the grammar.
        parallel: whether there may be several calls.
        schema: JSON schema of an answer without calls; None for any text.
        thought: how the model writes thoughts; read where all that is said is in channels.

    Raises:
        ConfigError: no such tool, or one without a name, or whose parameters are no object.
    """
    wanted = {_name(tool): _parameters(tool) for tool in tools}
    if choice not in ("auto", "required"):
        require(choice in wanted, f"there is no tool {choice!r}; there are {', '.join(wanted)}")
        wanted = {choice: wanted[choice]}
    require(bool(wanted), "tools are to be called, and there is none")

    def text(literal: str) -> str:
        return _literal(literal, controls)

    bodies, rules, size = [], [TEXT_RULE], 0
    for at, (name, parameters) in enumerate(wanted.items()):
        bodies.append(f"{quoted(name)} {text(form.middle)} arguments{at}")
        for rule in form.arguments.rules(f"arguments{at}", parameters, form.end, text):
            size += len(rule)
            require(size <= _LARGEST, _TOO_LARGE)
            rules.append(rule)
    rules.append(f"call: {' | '.join(bodies)}")
    several = ""
    if form.separator is not None and parallel:
        several = f"({text(form.separator)} {text(form.begin)} call)*"
    rest = f"call {several} {text(form.close)}"
    start = text(form.start)
    if choice != "auto":
        rules += [f"start: {start} {rest}"]
    elif schema is not None:
        rules += [f"start: {start} {rest} | {json_rule(schema)}"]
    elif form.in_channels and thought is not None:
        before, behind = text(thought.opening), text(thought.close)
        said = f"{text(thought.lead)} SAID"
        rules += [f"start: ({before} SAID {behind})* ({start} {rest} | {said})"]
    else:
        rules += _free(start, rest, list(controls.values()))
    return Grammar("\n".join(dict.fromkeys(rules)))


def _free(start: str, rest: str, controls: Sequence[int]) -> list[str]:
    """Rules of an answer that may say anything, such as a thought between marks, and then call."""
    others = _ranges(token for token in controls if not start.startswith(f"<[{token}]>"))
    before = f"(SAID? <[{others}]>)*" if others else ""
    if start.startswith("<["):
        return [f"start: {before} SAID ({start} {rest})?"]
    head, rules = until("head", start)
    return [*rules, f"start: {before} ({head} {rest} | SAID)"]


def _ranges(tokens: Iterable[int]) -> str:
    """The grammar's notation for one of these tokens, of which there may be thousands."""
    runs = groupby(enumerate(sorted(tokens)), lambda pair: pair[1] - pair[0])
    ends = [(members[0][1], members[-1][1]) for members in (list(run) for _, run in runs)]
    return ",".join(f"{first}-{last}" for first, last in ends)


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
    tools: Sequence[Tool],
    *,
    is_over: bool = True,
    is_forced: bool = False,
) -> tuple[str, list[ToolCall]]:
    """What an answer says before its calls, and the calls.

    Small models forget the mark before a call. So an answer that begins with a call of a known tool
    without its mark is read as that call, and those behind it.

    Args:
        text: the answer without its thought, control tokens included.
        tools: that may be called.
        is_over: no more of it comes; else an ending that may begin a call is not said yet.
        is_forced: the answer can be nothing but calls, so what begins one is never said.
    """
    start = form.start
    schemas = {_name(tool): _parameters(tool) for tool in tools}
    if is_forced and start.startswith(text):
        return "", []
    alone, brace = text.lstrip(), form.begin.find("{")
    unmarked = form.begin[brace:] if brace >= 0 else ""
    if unmarked and alone.startswith(unmarked):
        rest = alone[len(unmarked) :]
        calls = form.read(rest, schemas)
        may_begin = not is_over and any((name + form.middle).startswith(rest) for name in schemas)
        if _are_known(calls, schemas) and (calls or may_begin):
            return "", calls
    said, found, rest = text.partition(start)
    if found:
        calls = form.read(rest, schemas)
        if _are_known(calls, schemas):
            return said.rstrip(), calls
        return text, []
    if unmarked and not is_over and unmarked.startswith(alone):
        return "", []
    held = 0 if is_over else overlap(text, start)
    return text[: len(text) - held], []


def _are_known(calls: Sequence[ToolCall], names: Collection[str]) -> bool:
    """Whether these are calls of known tools, whose arguments are objects."""
    return all(
        call.name in names and (call.arguments.lstrip() or "{").startswith("{") for call in calls
    )
