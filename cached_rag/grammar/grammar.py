"""A grammar: the form that an answer must have. Knows text; knows no tokenizer and no library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cached_rag.errors import ConfigError
from cached_rag.grammar.schema import Json, prepared

_ESCAPED_OR_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


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
                properties that it lists, unless it says otherwise (`additionalProperties`). Some
                keywords are not held to; docs/tools.md lists them.

        Raises:
            ConfigError: it is no JSON.
        """
        return cls(f"start: {json_rule({'type': 'object'} if schema is None else schema)}")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole; of Rust's syntax, no look-around."""
        # A slash ends the expression in the grammar's notation; one that is escaped already stays.
        escaped = _ESCAPED_OR_SLASH.sub(lambda found: found[1] or r"\/", pattern)
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
            schema = prepared(schema)
        return "%json " + json.dumps(schema)
    except ConfigError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a JSON schema must be JSON of some depth at most: {error}") from error


def quoted(text: str) -> str:
    """The grammar's notation for a text."""
    return json.dumps(text)


def overlap(text: str, other: str) -> int:
    """Length of the longest ending of a text that `other` begins with, but does not end with."""
    for length in range(min(len(text), len(other) - 1), 0, -1):
        if text.endswith(other[:length]):
            return length
    return 0
