"""JSON schemas as the grammar library can hold answers to them. Knows JSON; knows no grammar.

Schemas say more than a grammar can hold in reasonable time. What it cannot is left out here or by
the library, so that an ordinary schema gives an answer; docs/tools.md lists it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from cached_rag.errors import ConfigError
from cached_rag.grammar.closing import closed

Json = Mapping[str, Any]
# As most templates write JSON. White space of any length would be a loop that small models do not
# find out of. The library leaves out keywords and formats that it does not know, if it may.
_LAYOUT = {
    **{"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    **{"lenient": True, "coerce_one_of": True},
}
# Where a schema has others by name.
_MAPS = {"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"}
# Where it has values that answers may have, and no schemas.
_VALUES = {"enum", "const"}
# The least common multiple, counted in last digits, of what a schema's numbers are multiples of. A
# grammar has a state for each remainder: 5000 take hundredths of a second, a million take minutes.
_MOST_REMAINDERS = 5000
# Characters of a value that answers are held to. The step before it takes some milliseconds for
# each thousand, and nobody is answered meanwhile.
_LONGEST = 1 << 15
# What expressions without memory lack: look-around, word boundaries, back references. An escaped
# character is read as a whole, so that r"\\b" is a backslash and a letter.
_ESCAPE_OR_LOOK = re.compile(r"\\(.)|\(\?<?[=!]", re.DOTALL)
_LOOKING_ESCAPES = frozenset("bBk123456789")


def prepared(schema: Json) -> Json:
    """The schema, closed, with its layout, and without what would fail or take long.

    Raises:
        ConfigError: its `enum` or `const` has what would take long, if it were read as a schema, or
            a value or a name in it is too long.
    """
    has_all_of = '"allOf"' in json.dumps(schema)
    own = schema.get("x-guidance")
    layout = _LAYOUT | (dict(own) if isinstance(own, Mapping) else {})
    found = _Simplifier().simplified(schema)
    return {**(found if has_all_of else closed(found)), "x-guidance": layout}


class _Simplifier:
    """Takes out of one schema, wherever a reference may point, what would fail or take long."""

    def __init__(self) -> None:
        self._multiple = 1

    def simplified(self, schema: Any, *, is_map: bool = False) -> Any:
        """The schema, or the map of schemas by name, without what is left out."""
        if isinstance(schema, list):
            return [self.simplified(part) for part in schema]
        if not isinstance(schema, Mapping):
            return schema
        found = {}
        for key, part in schema.items():
            _check_length(key)
            if key in _VALUES and not is_map:
                _check_value(part)
                found[key] = part
            elif not self._is_left_out(key, part):
                found[key] = self.simplified(part, is_map=key in _MAPS and not is_map)
        return found

    def _is_left_out(self, key: str, part: Any) -> bool:
        if key == "pattern" and isinstance(part, str):
            return _looks_around(part)
        return key == "multipleOf" and _is_number(part) and not self._is_quick(part)

    def _is_quick(self, multiple: float) -> bool:
        """Whether it is held: parts of a schema may apply to one number, so they count together."""
        if not multiple or not math.isfinite(multiple):
            return True  # no multiple at all, which the library says
        together = math.lcm(self._multiple, _in_last_digits(multiple))
        if together > _MOST_REMAINDERS:
            return False
        self._multiple = together
        return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_last_digits(number: float) -> int:
    """The number, counted in its last decimal place: 25 for 0.25, 60 for 60."""
    if isinstance(number, int):
        return number
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    zeros = "0" * max(0, int(exponent))
    return int("".join(map(str, digits)) + zeros)


def _looks_around(pattern: str) -> bool:
    found = _ESCAPE_OR_LOOK.finditer(pattern)
    return any(one[1] is None or one[1] in _LOOKING_ESCAPES for one in found)


def _check_value(value: Any) -> None:
    """See that a value has no `multipleOf`: a reference could have it read as a schema."""
    if isinstance(value, str):
        _check_length(value)
    elif isinstance(value, list):
        for part in value:
            _check_value(part)
    elif isinstance(value, Mapping):
        if _is_number(value.get("multipleOf")):
            raise ConfigError("a value in a JSON schema's enum or const has a multipleOf")
        for part in value.values():
            _check_value(part)


def _check_length(text: str) -> None:
    if len(text) > _LONGEST:
        raise ConfigError(
            f"a value or a name in a JSON schema has {len(text)} characters, and may have "
            f"{_LONGEST}"
        )
