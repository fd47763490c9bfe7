"""What KV is kept under, pinned: what an earlier version kept, a later one finds."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
from conftest import NEW_PROMPTS, tiny_model
from test_pml_exactness import NESTED, SOURCE
from test_pml_messages import WHOLE

from cached_rag import Engine, Import, Said, Schema
from cached_rag.engine.report import Report
from cached_rag.kv.fingerprint import digest
from cached_rag.pml import MaxTokens, prompt_function, system, user

FILES = Path(__file__).parent / "files"
BARE = """<schema name="bare">
  All see this and <param name="what" len="4" scaffold="more than this"/> as well.
  <module name="a">The first. <module name="in">Inside.</module> <param name="p" len="3"/> End.
  </module>
  <module name="b" cache="false">The second is not kept.</module>
  <module name="c">The third.</module>
  All see the end.
  <scaffold name="two"><a><in/></a><c/></scaffold>
</schema>"""


@prompt_function
def town(name: Annotated[str, MaxTokens(6)], old: bool = False):
    yield f"\nThe town of {name}."
    if old:
        yield "\nIts walls are old."


@prompt_function
def journey(days: Annotated[str, MaxTokens(5)], where: str):
    with system():
        yield "You plan journeys."
    with user():
        yield f"A trip of {days}"
        if where == "sea":
            yield " to the sea."
        else:
            yield " to a town."
            yield from town("Bern", old=where == "old")


def prompts():
    """Prompts that together import all that the schemas have."""
    trip = Schema.from_string(SOURCE)
    hills, budget = Import("plan", Import("hills"), " (near)", days="31"), Import("budget")
    yield trip.prompt(hills, budget, Said("user", "Where to?"))
    yield trip.prompt(Import("plan", Import("sea")), "Why?")
    nested = Schema.from_string(NESTED)
    yield nested.prompt(Import("a", Import("x"), Import("c")), Import("opt", Import("y")), "Why?")
    yield nested.prompt(Import("b"), Import("opt"), Import("z"))
    whole = Schema.from_string(WHOLE)
    yield whole.prompt(Import("kind", to="all."), Import("lamp"), Import("copper"), "Why?")
    yield whole.prompt(Import("curt"), Said("assistant", "Well?"), Said("user", "Why?"))
    roles = Schema.from_file(FILES / "roles.xml")
    opening = Import("opening", Import("aside"), Import("told", order="row"), Import("owner"))
    yield roles.prompt(opening, Import("errand", Import("errand-fetch")))
    bare = Schema.from_string(BARE)
    yield bare.prompt(Import("a", Import("in"), p="x"), Import("c"), "Why?", what="it")
    yield bare.prompt(Import("a"), Import("b"), Import("c"))
    yield journey("a week", "sea")
    yield journey("a week", "old").then("How?")


KEYS = {
    ("llama", "schema", "nothing"): "b0b6de12182090e70dc64cee27b32a9f262ad5e5",
    ("llama", "schema", "head"): "ede41352955724c44c1f914fbae927b7e79bf4a7",
    ("llama", "schema", "schema"): "8e0ae11495c49254f3693699649803a6eb24bdfe",
    ("llama", "compact", "nothing"): "3a866e75bd05471a0ba70428f0f9ccb0e42f2cbe",
    ("llama", "compact", "head"): "262dfb9a0a0d61e50268d07a9c97d33bbd33964d",
    ("llama", "compact", "schema"): "39babdad42f18e1bf7c50451d4579f856221e2f8",
    ("gpt2", "schema", "nothing"): "a2fa334fe2c3120c6650856b3c905d6a41cace5b",
    ("gpt2", "schema", "head"): "bf46dbe97c51da788c9565d51aad7574d4488238",
    ("gpt2", "schema", "schema"): "350f380b103230611d827a0bb1320bf03dcc95e0",
}


def kept(engine, prompt):
    """What a schema's modules are, and where a prompt's tokens come from."""
    names = prompt.schema.missing(engine)
    tokens, plan = engine.plan(prompt, "reuse", Report("reuse"))
    places = [(place.begin, place.is_exact, place.is_chunk) for place in plan.placements]
    sources = [(place.source[0].context, place.source[1]) for place in plan.placements]
    return names, [tokens.ids, plan.positions, places, sources]


@pytest.mark.parametrize(("family", "layout", "behind"), KEYS)
def test_kv_is_kept_under_the_same_names_as_ever(family, layout, behind):
    engine, found = Engine(tiny_model(family), NEW_PROMPTS), []
    for prompt in prompts():
        schema = replace(prompt.schema, layout=layout, behind=behind)
        found += kept(engine, replace(prompt, schema=schema))
    assert digest(repr(found)) == KEYS[family, layout, behind]


def test_kv_of_modules_beyond_the_context_is_kept_under_the_same_names_as_ever():
    lines = (" ".join(str(i * 1000 + n) for n in range(60)) for i in range(5))
    modules = "".join(f'<module name="m{i}">{line}</module>' for i, line in enumerate(lines))
    schema = Schema.from_string(f'<schema name="long">All.{modules}</schema>', layout="compact")
    found = kept(Engine(tiny_model("llama"), NEW_PROMPTS), schema.prompt(Import("m4"), "Why?"))
    assert digest(repr(found)) == "622db2843bc33d75877348fb4822790fa3f322a3"


def test_an_engine_that_nobody_has_any_more_goes_with_its_planners():
    engine = Engine(tiny_model("llama"))
    Schema.from_string(SOURCE).planner(engine)
    held = weakref.ref(engine)
    engine.close()
    del engine
    gc.collect()
    assert held() is None
