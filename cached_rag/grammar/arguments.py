"""The arguments of a tool call as models write them: one JSON object, or each value by its name.

Qwen 3.5 writes each value between tags; Gemma 4 and LFM2 write them as a programming language does.
To users all of them are JSON. Knows schemas; knows no template.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from cached_rag.grammar.grammar import Json, json_rule, quoted

# The grammar's notation for a text, in which control tokens are meant as such.
Mark = Callable[[str], str]
_DECODER = json.JSONDecoder()
_WORD = re.compile(r"[^\s,:=(){}\[\]<>\"']+")
_MARK = re.compile(r"[\[\]{}]|[,:] ?")
_OPEN, _CLOSE = ("[", "{"), ("]", "}")
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_ALL_KINDS = frozenset({*_KINDS.values(), "object", "null"})
_MOST_REFERENCES = 64  # that are followed for one value
_PYTHON_STRING = re.compile(r"(['\"])(?:\\.|(?!\1)[^\\])*\1", re.DOTALL)
_PYTHON_TEXT = r"'([^'\\\n]|\\.)*'"
_NAME_RULE = r"NAME: /[^\W\d][\w.-]*/"
TEXT_RULE = r"SAID: /(.|\n)*/"


def until(name: str, notation: str) -> tuple[str, list[str]]:
    """Any text and what ends it: the place for it in a rule, and the rules that it needs."""
    if "<[" in notation:  # a control token: no text can be mistaken for it
        return f"SAID {notation}", []
    return name, [f"{name}[lazy]: SAID {notation}"]  # the first place that reads so


@dataclass(frozen=True)
class JsonArguments:
    """Arguments as a JSON object."""

    def leads(self, end: str) -> tuple[str, ...]:
        """What may come first of the arguments, or, if there are none, of what ends them."""
        return ("",)

    def rules(self, name: str, schema: Json, end: str, mark: Mark) -> list[str]:
        """Rules of a grammar; the first, of this name, is the arguments and what ends them."""
        return [f"{name}: {json_rule(schema)} {mark(end)}"]

    def read(self, text: str, schema: Json, end: str) -> tuple[str, int | None]:
        """The arguments that a text begins with, as JSON, and where they end.

        If they may go on, there is no end, and only as much JSON as is certain.
        """
        try:
            stop = _DECODER.raw_decode(text)[1]
        except (ValueError, RecursionError):
            return text, None
        return text[:stop], stop

    def written(self, arguments: Mapping[str, Any]) -> str:
        """The arguments in this notation."""
        return as_json(arguments)


@dataclass(frozen=True)
class NamedArguments:
    """Arguments one after another, each with its name.

    Attributes:
        before: what stands before a name.
        middle: between a name and a text, and between a name and another value.
        after: behind a text, and behind another value; the latter is empty where texts are quoted,
            so that each value tells where it ends.
        separator: between two arguments.
    """

    before: str
    middle: tuple[str, str]
    after: tuple[str, str]
    separator: str

    @property
    def _is_quoted(self) -> bool:
        return not self.after[1]

    @property
    def _is_python(self) -> bool:
        return self._is_quoted and self.after[0] in ("'", '"')

    def leads(self, end: str) -> tuple[str, ...]:
        """As `JsonArguments.leads`."""
        return (self.before, end)

    def rules(self, name: str, schema: Json, end: str, mark: Mark) -> Iterator[str]:
        """As `JsonArguments.rules`, one by one: each argument's may have all definitions in it."""
        json_rule(schema)  # for its errors: names and values are bounded here, too
        listed = schema.get("properties")
        if not isinstance(listed, Mapping):
            body = f"({name}_0 ({mark(self.separator)} {name}_0)*)?"
            yield f"{name}: {body} {mark(end)}"
            yield from (*self._argument(f"{name}_0", "NAME", {}, mark), _NAME_RULE)
        else:
            yield f"{name}: {name}_first0 {mark(end)}"
            yield from self._listed(name, listed, schema, mark)
        if self._is_quoted:
            yield from self._literals(mark)

    def _listed(
        self, name: str, listed: Mapping[str, Any], schema: Json, mark: Mark
    ) -> Iterator[str]:
        """The rules of arguments that a schema lists, in this order."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = schema.get("required")
        needed = required if isinstance(required, list | tuple) else ()
        for at, (key, part) in enumerate(listed.items()):
            own = {**shared, **part} if isinstance(part, Mapping) else shared
            optional = "" if key in needed else "?"
            rest, skipped = f"{name}_more{at + 1}", f" | {name}_first{at + 1}" if optional else ""
            yield f"{name}_first{at}: {name}_{at} {rest}{skipped}"
            yield f"{name}_more{at}: ({mark(self.separator)} {name}_{at}){optional} {rest}"
            yield from self._argument(f"{name}_{at}", quoted(str(key)), own, mark)
        yield from (f'{name}_{kind}{len(listed)}: ""' for kind in ("first", "more"))

    def _argument(self, name: str, key: str, schema: Json, mark: Mark) -> list[str]:
        """The rule of an argument, and those that it needs."""
        kinds, values = _allowed(schema, schema)
        lead = f"{mark(self.before)} {key}"
        if self._is_quoted:
            places = sorted(f"v_{kind}" for kind in kinds)
            quote = self.after[0]
            spelled = (map(quoted, self._literal(value).split(quote)) for value in values)
            places += [f" {mark(quote)} ".join(parts) for parts in spelled]
            return [f"{name}: {lead} {mark(self.middle[1])} ({' | '.join(places)})"]
        text, other = map(mark, self.middle)
        behind, behind_other = map(mark, self.after)
        said = [quoted(value) for value in values if isinstance(value, str)]
        branches: list[str] = []
        more: list[str] = []
        if "string" in kinds:
            place, more = until(f"{name}_text", behind)
            branches.append(f"{text} {place}")
        elif said:
            branches.append(f"{text} ({' | '.join(said)}) {behind}")
        has_others = bool(kinds - {"string"}) or len(said) < len(values)
        if has_others and (text != other or "string" not in kinds):
            branches.append(f"{other} {json_rule(schema)} {behind_other}")
        return [f"{name}: {lead} ({' | '.join(branches)})", *more]

    def _literals(self, mark: Mark) -> list[str]:
        """Rules of values that are written as in a programming language."""
        quote, comma = mark(self.after[0]), mark(self.separator)
        more: list[str] = []
        if self._is_python:
            string, key, words = f"/{_PYTHON_TEXT}/", 'v_string ": "', ("True", "False", "None")
        else:
            place, more = until("v_text", quote)
            string, key, words = f"{quote} {place}", 'NAME ":"', ("true", "false", "null")
        yes, no, null = map(quoted, words)
        return [
            f"v_any: {' | '.join(sorted(f'v_{kind}' for kind in _ALL_KINDS))}",
            f"v_string: {string}",
            r"v_integer: /-?(0|[1-9]\d*)/",
            r"v_number: /-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?/",
            f"v_boolean: {yes} | {no}",
            f"v_null: {null}",
            f'v_array: "[" (v_any ({comma} v_any)*)? "]"',
            f'v_object: "{{" (v_member ({comma} v_member)*)? "}}"',
            f"v_member: {key} v_any",
            *([] if self._is_python else [_NAME_RULE]),
            *more,
        ]

    def read(self, text: str, schema: Json, end: str) -> tuple[str, int | None]:
        """As `JsonArguments.read`."""
        parts: list[str] = []
        at = 0
        while not text.startswith(end, at):
            lead = self.separator + self.before if parts else self.before
            found = self._value(text, at + len(lead), schema) if text.startswith(lead, at) else None
            if found is None:
                return "{" + ", ".join(parts), None
            name, value, at = found
            parts.append(f"{as_json(name)}: {as_json(value)}")
        return "{" + ", ".join(parts) + "}", at

    def _value(self, text: str, at: int, schema: Json) -> tuple[str, Any, int] | None:
        """A name and its value, and where they end; None if they are not whole."""
        places = [
            (found, -len(middle), kind)
            for kind, middle in enumerate(self.middle)
            if (found := text.find(middle, at)) >= 0
        ]
        if not places:
            return None
        begin, _, kind = min(places)
        name = text[at:begin]
        if self._is_quoted:
            try:
                read = _literal(text, begin + len(self.middle[1]), self.after[0])
            except (ValueError, RecursionError):
                return None
            return None if read is None else (name, *read)
        begin += len(self.middle[kind])
        end = text.find(self.after[kind], begin)
        if end < 0:
            return None
        said, stop = text[begin:end], end + len(self.after[kind])
        if self.middle[0] != self.middle[1]:
            return name, said if kind == 0 else _parsed(said), stop
        listed = schema.get("properties")
        of_name = listed.get(name, {}) if isinstance(listed, Mapping) else {}
        return name, _typed(said, _kinds(of_name, schema)), stop

    def written(self, arguments: Mapping[str, Any]) -> str:
        """The arguments in this notation."""
        return self.separator.join(
            f"{self.before}{name}{self.middle[1]}{self._literal(value)}"
            if self._is_quoted or not isinstance(value, str)
            else f"{self.before}{name}{self.middle[0]}{value}{self.after[0]}"
            for name, value in arguments.items()
        )

    def _literal(self, value: Any) -> str:
        """A value other than a text between tags."""
        if self._is_python:
            return repr(value)
        if self._is_quoted and isinstance(value, str):
            return f"{self.after[0]}{value}{self.after[0]}"
        if self._is_quoted and isinstance(value, list):
            return f"[{self.separator.join(map(self._literal, value))}]"
        if self._is_quoted and isinstance(value, Mapping):
            members = (f"{key}:{self._literal(part)}" for key, part in value.items())
            return "{" + self.separator.join(members) + "}"
        return as_json(value) + self.after[1]


def _literal(text: str, at: int, quote: str) -> tuple[Any, int] | None:
    """A value as programming languages write it, and where it ends; None if it is not whole.

    It is read as the JSON that it becomes with its texts, words and names written so.

    Raises:
        ValueError: it is malformed.
    """
    ends = re.escape(quote)
    string = _PYTHON_STRING if len(quote) == 1 else re.compile(f"{ends}.*?{ends}", re.DOTALL)
    parts: list[str] = []
    depth = 0
    while found := string.match(text, at) or _WORD.match(text, at) or _MARK.match(text, at):
        said, at = found[0], found.end()
        if found.re is string:
            said = as_json(_said(said) if len(quote) == 1 else said[len(quote) : -len(quote)])
        elif found.re is _WORD and at == len(text):  # more of it may come
            return None
        elif found.re is _WORD:
            said = as_json(said if text.startswith(":", at) else _parsed(said))
        depth += (said in _OPEN) - (said in _CLOSE)
        parts.append(said)
        if not depth:
            return json.loads("".join(parts)), at
    return None


def _said(string: str) -> str:
    """What a text in Python's quotes says."""
    try:
        return str(ast.literal_eval(string.replace("\n", "\\n")))
    except (ValueError, SyntaxError):  # such as an escape that Python does not know
        return string[1:-1]


def _parsed(said: str) -> Any:
    """What a word, number or object says, in JSON or in Python; the text if it is neither."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = read(said.strip())
            json.dumps(value, allow_nan=False)
            return value
    return said


def _typed(said: str, kinds: frozenset[str]) -> Any:
    """A value of the given kinds, written between tags without quotes."""
    if kinds == {"string"}:
        return said
    value = _parsed(said)
    kind = _kind(value)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return said if "string" in kinds and not fits else value


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "object")


def _kinds(schema: Any, root: Json) -> frozenset[str]:
    """The types of values that a schema allows."""
    kinds, values = _allowed(schema, root)
    return kinds.union(map(_kind, values))


def _allowed(schema: Any, root: Json) -> tuple[frozenset[str], list[Any]]:
    """The types of which a schema allows any value, and the values that it lists."""
    kinds, values = _found(schema, root, set())
    return (kinds, values) if kinds or values else (_ALL_KINDS, [])


def _found(schema: Any, root: Json, seen: set[str]) -> tuple[frozenset[str], list[Any]]:
    """As `_allowed`, without what is behind references that were `seen`: so each is read once."""
    if not isinstance(schema, Mapping) or len(seen) > _MOST_REFERENCES:
        return _ALL_KINDS, []
    if "const" in schema:
        return frozenset(), [schema["const"]]
    if isinstance(values := schema.get("enum"), list) and values:
        return frozenset(), values
    if isinstance(named := schema.get("type"), str | list):
        names = [named] if isinstance(named, str) else named
        return frozenset(kind for kind in _ALL_KINDS if kind in names) or _ALL_KINDS, []
    if isinstance(reference := schema.get("$ref"), str):
        if reference in seen:
            return frozenset(), []
        seen.add(reference)
        place: Any = root
        for part in reference.removeprefix("#/").split("/"):
            place = place.get(part) if isinstance(place, Mapping) else None
        return _found(place, root, seen)
    for name in ("anyOf", "oneOf", "allOf"):  # of the last, more than it allows
        if isinstance(branches := schema.get(name), list) and branches:
            kinds, values = zip(*(_found(one, root, seen) for one in branches), strict=True)
            return frozenset().union(*kinds), list(chain.from_iterable(values))
    return _ALL_KINDS, []


def as_json(value: Any) -> str:
    """A value as JSON, as it is told to models: with the letters of all scripts."""
    return json.dumps(value, ensure_ascii=False)
