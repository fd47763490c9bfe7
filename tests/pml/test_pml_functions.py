"""Prompts as Python: what functions become, which branches calls take, and what is refused."""

from __future__ import annotations

import functools
from typing import Annotated

import pytest
from conftest import NEW_PROMPTS, tiny_model

from cached_rag import Engine, Said, Schema
from cached_rag.errors import PMLError
from cached_rag.pml import MaxTokens, assistant, prompt_function, system, user
from cached_rag.pml.nodes import Module, Param, Text, Union, walk

STYLE = " Be brief."


@prompt_function
def city(name: Annotated[str, MaxTokens(20)], old: bool = False):
    """Docstrings are for readers."""
    yield f"\nThe city of {name} is on the way."
    if old:
        yield "\nIts walls are old."


@prompt_function
def journey(days: Annotated[str, MaxTokens(9)], where: str, frugal: bool = False):
    with system():
        yield f"You plan journeys.{STYLE}"
    with user():
        yield f"A trip of {days}"
        if where == "sea":
            yield " to the sea"
        elif where in ("hills", "mountains"):
            yield " to the hills"
            yield from city("Bern", old=where == "hills")
        else:
            yield " somewhere"
        if frugal:
            yield "\nSpend little."
    with assistant():
        yield "I see."


@prompt_function
def answer(kind: str):
    yield "Answer"
    match kind:
        case "short":
            yield " in a word."
        case "long" | "full":
            yield " in full."
        case _:
            yield " as you like."


def names(schema, kind):
    return [node.name for node in walk(schema.node.children) if isinstance(node, kind)]


def test_branches_become_modules_and_unions_and_calls_nested_modules():
    schema = journey.schema
    assert schema.name == "journey"
    assert names(schema, Module) == [
        "where-sea",
        "where-in-hills-mountains",
        "city",
        "old",
        "otherwise",
        "frugal",
    ]
    unions = [node for node in walk(schema.node.children) if isinstance(node, Union)]
    assert [len(union.children) for union in unions] == [3]
    lengths = {n.name: n.length for n in walk(schema.node.children) if isinstance(n, Param)}
    assert lengths == {"days": 9, "name": 20}
    assert names(answer.schema, Module) == ["short", "long-full", "otherwise"]
    first = next(node for node in walk(schema.node.children) if isinstance(node, Text))
    assert first.text == "You plan journeys. Be brief."


def test_a_call_takes_the_branches_that_python_takes():
    said = journey("31 days", where="hills", frugal=True).plain()
    assert [message["role"] for message in said] == ["system", "user", "assistant"]
    assert said[1]["content"] == (
        "A trip of 31 days to the hills\nThe city of Bern is on the way.\nIts walls are old."
        "\nSpend little."
    )
    assert "old" not in journey("1 day", "mountains").plain()[1]["content"]
    assert journey("1 day", "moon").plain()[1]["content"] == "A trip of 1 day somewhere"
    assert [answer(kind).plain() for kind in ("full", "short", "x")] == [
        "Answer in full.",
        "Answer in a word.",
        "Answer as you like.",
    ]


def test_functions_are_evaluated_in_their_own_scope():
    limit = 3

    @prompt_function
    def counted(*items: str, most: int = 2):
        total = len(items)
        yield "Items."
        if total > limit:
            yield " Many."
        elif total >= most:
            yield " Some."

    assert counted("a", "b").plain() == "Items. Some."
    assert counted(*"abcd").plain() == "Items. Many."
    assert counted("a").plain() == "Items."
    with pytest.raises(TypeError):
        counted(least=1)


def test_prompts_of_functions_are_answered_from_cache():
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    prompt = journey("31 days", "sea").then(Said("user", "Where to?"))
    journey.schema.encode(engine)
    full = engine.generate(prompt, method="full", max_tokens=6)
    again = engine.generate(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=6)
    assert again.text == full.text
    assert again.report.modules_missed == 0
    assert again.report.recomputed_tokens > 10
    assert Schema.from_function(journey).digest == journey.schema.digest
    laid_out = prompt_function(plain_text, layout="schema", behind="head")
    assert Schema.from_function(laid_out).layout == "schema"
    assert Schema.from_function(laid_out, layout="compact").layout == "compact"
    assert Schema.from_function(laid_out, layout="compact").behind == "head"


def test_strings_are_taken_as_they_are():
    @prompt_function
    def letter(
        days: Annotated[str, MaxTokens(3)] | None = None,
        self: Annotated[str, MaxTokens(3)] = "me",
    ):
        yield """Line one
        Line two, eight spaces in
at the margin"""
        yield f"\n{days}\n{self}"

    text = "Line one\n        Line two, eight spaces in\nat the margin\n"
    assert letter().plain() == f"{text}\nme"
    assert letter("3").plain() == f"{text}3\nme"
    assert letter.fill(days="3", self="you").plain() == f"{text}3\nyou"


def test_a_parameter_hides_a_constant_of_its_name():
    def hidden(STYLE: str):  # noqa: N803
        yield f"{STYLE}"

    with pytest.raises(PMLError, match="neither a parameter marked"):
        Schema.from_function(hidden)


def test_a_local_variable_hides_a_constant_of_its_name():
    def assigned():
        STYLE = "casual"  # noqa: N806
        yield f"{STYLE}"

    def captured(given: str):
        match given:
            case STYLE:  # noqa: N806
                yield f"{STYLE}"

    for function in (assigned, captured):
        with pytest.raises(PMLError):
            Schema.from_function(function)


def test_names_bound_later_are_seen_by_calls():
    @prompt_function
    def late(count: int):
        yield "Some."
        if count > limit:
            yield " More."

    limit = 3
    assert late(4).plain() == "Some. More."


def test_methods_and_other_decorators_are_refused():
    class Holder:
        @prompt_function
        def method(self, days: str):
            yield "text"

    with pytest.raises(PMLError, match="'method' is a method"):
        Holder().method("3")

    def louder(function):
        return functools.wraps(function)(lambda *args: function(*args))

    with pytest.raises(PMLError, match="decorated by nothing else"):
        prompt_function(louder(plain))
    unreadable = functools.partial(
        lambda: (yield "a line that is no statement by itself"), 1).func  # fmt: skip
    for function in (functools.partial(plain, "3"), unreadable):
        with pytest.raises(PMLError, match="cannot be read"):
            prompt_function(function)


def plain_text():
    yield "Text."


def asking():
    if (yield "a"):
        yield "b"


def plain(days: Annotated[str, MaxTokens(3)], other: str):
    yield f"{days}{other}"


def looping(days: str):
    yield "a"
    for _ in days:
        yield "b"


def calling(days: str):
    yield "a"
    yield from map(str, days)


def returning(days: str):
    yield "a"
    return days


def assigning():
    got = yield "a"
    yield f"{got}"


def formatted(days: Annotated[str, MaxTokens(3)]):
    yield f"{days!r}"


def formatting():
    yield f"{STYLE!r}"


@pytest.mark.parametrize(
    ("function", "line", "what"),
    [
        (formatting, 1, "cannot be formatted"),
        (plain, 1, "{other} is neither a parameter marked with MaxTokens"),
        (looping, 2, "cannot use `for`"),
        (calling, 2, "yield from another prompt function"),
        (returning, 2, "cannot use `return`"),
        (assigning, 1, "`yield` is a statement of its own"),
        (formatted, 1, "cannot be formatted"),
        (asking, 1, "`yield` is a statement of its own"),
    ],
)
def test_what_no_schema_can_say_is_refused_with_its_line(function, line, what):
    with pytest.raises(PMLError, match=what) as failed:
        Schema.from_function(function)
    assert failed.value.line == function.__code__.co_firstlineno + line
    assert failed.value.file == __file__
