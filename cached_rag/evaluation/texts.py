"""Prompts to time: of random words, as only the number of tokens matters, and new each time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cached_rag.config import StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError
from cached_rag.library.encode import Context

PREFIX = "Read these texts.\n\n"
_WORDS = (
    "river stone market lamp engine paper winter garden signal harbour copper letter music field "
    "answer window bridge valley number silver forest captain morning island castle village road"
)

# Where every prompt is a new one.
NEW_PROMPTS = StoreConfig(sequence_bytes=0)


def make_texts(engine: Engine, *sizes: int) -> list[str]:
    """Distinct texts of about `sizes` tokens each; the same ones every time.

    Raises:
        ConfigError: a size below 1.
    """
    if min(sizes, default=0) < 1:
        raise ConfigError(f"there must be texts, each of at least one token, not {sizes}")
    rng, known = random.Random(0), _WORDS.split()

    def text(tokens: int) -> str:
        words = " ".join(rng.choice(known) for _ in range(2 * tokens))
        return words[: engine.tokenization.literal(words).ends[tokens - 1]].strip()

    return [text(size) for size in sizes]


def make_prompt(
    engine: Engine,
    texts: int,
    text_tokens: int,
    question_tokens: int,
    contexts: Sequence[Context | None] = (None,),
) -> tuple[str, list[str]]:
    """Encode random texts behind `PREFIX` and each of the contexts, as those of one document.

    Returns:
        A prompt of `PREFIX`, the texts and a question; and the texts.

    Raises:
        ConfigError: a count below 1.
    """
    *given, question = make_texts(engine, *[text_tokens] * texts, question_tokens)
    engine.encode([given], prefix=PREFIX, context=contexts)
    return PREFIX + "\n".join([*given, question]), given


def check_prompts_are_new(engine: Engine) -> None:
    """Refuse an engine that keeps KV of finished prompts.

    Raises:
        ConfigError: it does.
    """
    if engine.sequences.max_bytes:
        raise ConfigError(
            "this engine keeps the KV of finished prompts, so a prompt that is asked again is no "
            "new one, and what it costs says nothing of its method; make the engine with "
            "StoreConfig(sequence_bytes=0)"
        )
