"""Holds benchmarks and evaluations to prompts that are new.

An engine keeps the KV of finished prompts for those that begin alike. A prompt that is asked again,
by the next method or in the next round, would find itself there, and every figure would be that of
a prompt that was seen before.
"""

from __future__ import annotations

from cached_rag.config import StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError

# Where every prompt is a new one.
NEW_PROMPTS = StoreConfig(sequence_bytes=0)


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
