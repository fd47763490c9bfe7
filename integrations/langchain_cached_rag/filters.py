"""Filters on metadata: equality, a few operators, or a function. Knows values; knows no store."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

Metadata = Mapping[str, Any]
Filter = Callable[[Metadata], bool] | Mapping[str, Any]

_MISSING = object()
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda value, wanted: value in wanted,
    "$nin": lambda value, wanted: value not in wanted,
}


def as_predicate(wanted: Filter) -> Callable[[Metadata], bool]:
    """A filter as a function of a document's metadata.

    Args:
        wanted: a function; or what every named value must equal, or fulfil, as in
            {"year": {"$gte": 2020}, "lang": "en"}.

    Raises:
        ValueError: an operator that does not exist.
    """
    if callable(wanted):
        return wanted
    tests = [(name, _test(condition)) for name, condition in wanted.items()]
    return lambda metadata: all(test(metadata.get(name, _MISSING)) for name, test in tests)


def _test(condition: Any) -> Callable[[Any], bool]:
    if not isinstance(condition, Mapping) or not any(str(n).startswith("$") for n in condition):
        return lambda value: bool(value == condition)
    unknown = condition.keys() - _OPERATORS.keys()
    if unknown:
        raise ValueError(f"unknown operators {sorted(unknown)}; there are {sorted(_OPERATORS)}")

    def holds(value: Any) -> bool:
        negative = {"$ne", "$nin"}
        if value is _MISSING:
            return condition.keys() <= negative
        try:
            return all(bool(_OPERATORS[name](value, than)) for name, than in condition.items())
        except TypeError:  # values that do not compare, such as None and a number
            return False

    return holds
