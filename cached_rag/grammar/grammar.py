"""A grammar: the form that an answer must have. Knows text; knows no tokenizer and no library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cached_rag.errors import ConfigError

Json = Mapping[str, Any]
# As most templates write JSON. White space of any length would be a loop that small models do not
# find out of.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Where a schema has others: by name, and by themselves or in lists.
_MAPS = {"properties", "$defs", "definitions"}
_SCHEMAS = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}


@dataclass(frozen=True)
class Grammar:
    """What an answer may be, written as a Lark grammar of the llguidance library.

    In every step only tokens with which the answer can still become complete are allowed, so it is
    valid unless `max_tokens` cuts it off. https://github.com/guidance-ai/llguidance describes the
    language; `json`, `regex` and `choice` make the usual ones.

    Attributes:
        text: the grammar.
        shows_control: control tokens of the answer stand in its text, as marks of tool calls do.
    """

    text: str
    shows_control: bool = False

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ConfigError("a grammar cannot be empty")

    @classmethod
    def json(cls, schema: Json | bool | None = None) -> Grammar:
        """A JSON value.

        Args:
            schema: the JSON schema that it fits; None for any object. Objects have only the
                properties that it lists, unless it says otherwise (`additionalProperties`).

        Raises:
            ConfigError: it is no JSON.
        """
        return cls(f"start: {json_rule({'type': 'object'} if schema is None else schema)}")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole; of Rust's syntax, no look-around."""
        escaped = pattern.replace("/", r"\/")
        return cls(f"start: TEXT\nTEXT: /{escaped}/")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts.

        Raises:
            ConfigError: there is none, or one is empty.
        """
        if not texts or not all(texts):
            raise ConfigError("there must be a text to choose, and none may be empty")
        return cls("start: " + " | ".join(map(quoted, texts)))


def json_rule(schema: Json | bool) -> str:
    """The grammar's notation for a JSON value that fits a schema.

    Raises:
        ConfigError: it is no JSON, or nested too deeply.
    """
    try:
        if isinstance(schema, Mapping):
            has_all_of = '"allOf"' in json.dumps(schema)
            own = schema.get("x-guidance")
            layout = _LAYOUT | (dict(own) if isinstance(own, Mapping) else {})
            schema = {**(schema if has_all_of else _closed(schema)), "x-guidance": layout}
        return "%json " + json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a JSON schema must be JSON of some depth at most: {error}") from error


def _closed(schema: Any) -> Any:
    """The schema, in which objects whose properties are listed have no others, unless it says so.

    A model that may add properties does not know when to stop. Schemas in which several parts say
    together what an object has (`allOf`, or others beside `properties`) are left as they are.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in _MAPS & schema.keys():
        if isinstance(schema[name], Mapping):
            found[name] = {key: _closed(part) for key, part in schema[name].items()}
    for name in _SCHEMAS & schema.keys():
        found[name] = _closed(schema[name])
    is_alone = not ({"anyOf", "oneOf", "$ref", "if", "patternProperties"} & schema.keys())
    if isinstance(schema.get("properties"), Mapping) and is_alone:
        found.setdefault("additionalProperties", False)
    return found


def quoted(text: str) -> str:
    """The grammar's notation for a text."""
    return json.dumps(text)


def overlap(text: str, other: str) -> int:
    """Length of the longest ending of a text that `other` begins with, but does not end with."""
    for length in range(min(len(text), len(other) - 1), 0, -1):
        if text.endswith(other[:length]):
            return length
    return 0
