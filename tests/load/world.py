"""What is asked, over what. Knows no client and no server."""

from __future__ import annotations

import random

_NOUNS = ["harbour", "lantern", "orchard", "ledger", "copper", "engine", "meadow", "glacier"]
_VERBS = ["guards", "crosses", "repairs", "measures", "follows", "paints", "carries"]
_chance = random.Random(7)


def _text(number: int) -> str:
    said = [
        f"The {_chance.choice(_NOUNS)} of house {number} {_chance.choice(_VERBS)} the "
        f"{_chance.choice(_NOUNS)} on day {_chance.randrange(1, 400)}."
        for _ in range(12)
    ]
    return " ".join(said)


TEXTS = [_text(number) for number in range(60)]
QUESTIONS = [f"What does the {noun} do, and when?" for noun in _NOUNS]
