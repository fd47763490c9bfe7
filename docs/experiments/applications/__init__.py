"""The three applications of Prompt Cache, section 5.6: a schema and some prompts of each.

The source files in the first one are modules of Python's standard library. Knows no engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from cached_rag.pml import Import, Said, Schema, SchemaPrompt

_FOLDER = Path(__file__).parent
_SOURCES = ("bisect", "queue", "sched", "contextvars", "this")


@dataclass(frozen=True)
class Application:
    """A schema, and prompts that import different parts of it."""

    schema: Schema
    prompts: tuple[SchemaPrompt, ...]


def code() -> Application:
    """Several source files, each a module, and a task about some of them."""
    schema = Schema.from_string(_code_source())
    tasks = [
        (("bisect", "sched"), "Write a short program that runs two functions in a minute."),
        (("queue", "bisect", "sched"), "Which class would you use to hand jobs to threads? Why?"),
    ]
    prompts = [
        schema.prompt(*(Import(f"{name}.py") for name in files), Said("user", task))
        for files, task in tasks
    ]
    return Application(schema, tuple(prompts))


def learner() -> Application:
    """A learner's profile: one module of each of six unions."""
    schema = Schema.from_file(_FOLDER / "learner.xml")
    traits = [
        ("middle-school", "newcomer", "last-term", "by-listening", "essay", "curious"),
        ("university", "practitioner", "years-ago", "by-doing", "project", "ambitious"),
    ]
    task = Said("user", "Describe the learner's profile concisely.")
    return Application(
        schema, tuple(schema.prompt(*map(Import, chosen), task) for chosen in traits)
    )


def trip() -> Application:
    """A travel plan with parameters and nested modules."""
    schema = Schema.from_file(_FOLDER / "trip.xml")
    task = Said("user", "Make a travel plan.")
    abroad = Import("abroad", Import("lisbon"))
    prompts = (
        schema.prompt(Import("plan", abroad, days="a week"), task),
        schema.prompt(Import("plan", Import("at-home", city="Turin"), days="three days"), task),
    )
    return Application(schema, prompts)


EXAMPLES: dict[str, Callable[[], Application]] = {"code": code, "learner": learner, "trip": trip}


def _code_source() -> str:
    """The schema's PML, made from source files as one would for a code base."""
    modules = []
    for name in _SOURCES:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        text = Path(found.origin).read_text(encoding="utf-8").replace("]]>", "]]]]><![CDATA[>")
        modules.append(
            f"<module name={quoteattr(name + '.py')}>\nFile {name}.py:\n<![CDATA[{text}]]></module>"
        )
    return (
        '<schema name="code"><system>You read source files and write code that uses them.</system>'
        f"<user>Here are some files of a code base.\n{chr(10).join(modules)}</user>"
        "<assistant>I have read the files.</assistant></schema>"
    )
