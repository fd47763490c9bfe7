"""Closes the objects of a JSON schema: they have the properties that it lists, and no others.

A model that may add properties does not know when to stop. Knows JSON; knows no grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]
_DEFINITIONS = {"$defs", "definitions"}
# Where a schema has others: by name, and by themselves or in lists.
_MAPS = _DEFINITIONS | {"properties"}
_SCHEMAS = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}
_BRANCHES = {"anyOf", "oneOf"}
_CONDITIONS = {"if", "then", "else", "not"}
# Each says something of an object, and beside another one not all.
_SAYING = _BRANCHES | {"$ref", "if", "patternProperties", "properties"}


def closed(schema: Json) -> Json:
    """The schema, in which objects whose properties are listed have no others, unless it says so.

    Left as they are: objects of which several parts of the schema say together what they have, such
    as branches beside `properties`, or a reference and more; those parts; and objects that require
    more than is listed.
    """
    closing, known = _Closing(), -1
    while known < len(closing.parts):  # a part may refer to others
        known = len(closing.parts)
        found: Json = closing.closed(schema, is_part="#" in closing.parts)
    named = {f"#/{name}/{key}" for name in _DEFINITIONS & schema.keys() for key in schema[name]}
    return found if closing.parts <= named | {"#"} else schema


class _Closing:
    """Closes one schema.

    Attributes:
        parts: references to what says of an object only a part of what it has.
    """

    def __init__(self) -> None:
        self.parts: set[str] = set()

    def closed(self, schema: Any, *, is_part: bool = False) -> Any:
        """A schema, or several, closed but for the object of which it is a part."""
        if isinstance(schema, list):
            return [self.closed(one, is_part=is_part) for one in schema]
        if not isinstance(schema, Mapping):
            return schema
        says = _SAYING & schema.keys()
        is_joined = is_part or len(says) > 1 or bool("required" in schema and says - {"properties"})
        if is_joined and isinstance(schema.get("$ref"), str):
            self.parts.add(schema["$ref"])
        for name in _CONDITIONS & schema.keys():
            self.closed(schema[name], is_part=True)  # for the references in it
        found = dict(schema)
        for name in _MAPS & schema.keys():
            if isinstance(schema[name], Mapping):
                found[name] = {
                    key: self.closed(one, is_part=f"#/{name}/{key}" in self.parts)
                    for key, one in schema[name].items()
                }
        for name in _SCHEMAS & schema.keys():
            found[name] = self.closed(schema[name], is_part=is_joined and name in _BRANCHES)
        if not is_joined and _lists_all(schema):
            found.setdefault("additionalProperties", False)
        return found


def _lists_all(schema: Json) -> bool:
    """Whether a schema lists all that its object is to have."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in listed for name in required)
