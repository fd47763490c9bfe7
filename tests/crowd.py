"""Prompts that begin alike, and ways of asking several at once, for tests."""

from __future__ import annotations

from conftest import NEW_PROMPTS, tiny_model

from cached_rag import BatchConfig, Engine, Import, Said, Schema

WORDS = "the copper roof turned green in the rain and nobody knew why it did".split()  # noqa: SIM905
SYSTEM = " ".join(f"Rule {n}: {WORDS[n % 14]} is never {WORDS[n * 3 % 14]}." for n in range(24))
DOCUMENTS = [
    " ".join(f"Fact {letter}{n}: {WORDS[n * 5 % 14]} met {WORDS[n * 7 % 14]}." for n in range(16))
    for letter in "AB"
]
ASKED = [f"{SYSTEM}\n{d}\nQuestion {n}: why?" for d in DOCUMENTS for n in range(2)]
ASKED += [f"{SYSTEM}\nWhat is rule {n}?" for n in range(2)]
GREEDY = {"max_tokens": 8, "method": "full"}
SCHEMA = Schema.from_string(
    "<schema name='house'><user><module name='rooms'>"
    + " ".join(f"Room {n} is painted in {WORDS[n % 14]}." for n in range(20))
    + "</module><union><module name='cellar'>The cellar is dark.</module>"
    "<module name='attic'>The attic has doves.</module></union></user></schema>"
)
PARTS = [
    SCHEMA.prompt(Import("rooms"), Import(part), Said("user", question))
    for part in ("cellar", "attic")
    for question in ("Is it dark in there?", "Who lives there?")
]


def alone(family, asked, **options):
    """Twin: one after the other, sharing nothing."""
    engine = Engine(tiny_model(family), NEW_PROMPTS, BatchConfig(max_rows=1, shares=False))
    return [engine.generate(prompt, **options).token_ids for prompt in asked]


def begun(engine, asked, **options):
    """Their streams, all of them waiting for their turn."""
    streams = [engine.stream(prompt, **options) for prompt in asked]
    for stream in streams:
        stream.start()
    return streams
