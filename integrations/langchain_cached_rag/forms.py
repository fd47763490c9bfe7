"""The JSON schema of an answer, in whatever form LangChain's users give it. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema

from cached_rag import ConfigError

# A dict with one of these is a JSON schema already; others are OpenAI's or Anthropic's functions.
_KEYWORDS = {
    *("type", "properties", "additionalProperties", "items", "enum", "const", "pattern", "format"),
    *("$ref", "$defs", "definitions", "anyOf", "oneOf", "allOf"),
}
_OF_FUNCTIONS = {"function", "parameters", "input_schema"}


def json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class, a TypedDict, a dict, or OpenAI's form of one.

    LangChain's own conversion makes a function of it, which has properties or nothing, and no
    references to itself. So what is a JSON schema stays as it is.

    Raises:
        ConfigError: it says nothing of an answer's form. A `ValueError`, too.
    """
    if not isinstance(schema, Mapping):
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            return dict(schema.model_json_schema())
        return convert_to_json_schema(schema)
    if schema.get("type") == "json_schema":
        schema = schema.get("json_schema", schema)
    if isinstance(inner := schema.get("schema"), Mapping):
        schema = {"title": schema.get("name", "answer"), **inner}
    is_function = bool(_OF_FUNCTIONS & schema.keys())
    found = convert_to_json_schema(dict(schema)) if is_function else dict(schema)
    if not _KEYWORDS & found.keys():
        raise ConfigError(f"a schema says of what type or form an answer is; got {dict(schema)!r}")
    return found
