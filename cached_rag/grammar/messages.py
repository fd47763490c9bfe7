"""Messages in OpenAI's form: checked, and their texts changed. Knows no template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cached_rag.errors import ConfigError

_DEEPEST = 64


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
    """See that all texts in tools, calls or schemas can be encoded, and that they are not deep.

    Raises:
        ConfigError: half of a surrogate pair, which no tokenizer takes; or more than 64 levels.
    """
    if depth > _DEEPEST:
        raise ConfigError(f"tools, calls and schemas may be nested {_DEEPEST} levels deep at most")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError("half of a surrogate pair stands alone in a tool or call") from error
    elif isinstance(value, Mapping):
        for key, part in value.items():
            check_text(str(key), depth)
            check_text(part, depth + 1)
    elif isinstance(value, list):
        for part in value:
            check_text(part, depth + 1)


def is_about_tools(message: Mapping[str, Any]) -> bool:
    """Whether it calls tools or has what one gave."""
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def mapped(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The message with all of its texts changed, whatever else than a content it has."""
    return {name: mapped_texts(value, change) for name, value in message.items()}


def mapped_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all of its texts changed, names among them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): mapped_texts(part, change) for key, part in value.items()}
    return [mapped_texts(part, change) for part in value] if isinstance(value, list) else value


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
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}  # what a model was cut off at, shown as it is
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"the arguments of a tool call are a JSON object, not {arguments!r}")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
