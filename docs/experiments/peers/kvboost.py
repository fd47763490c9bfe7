"""KVBoost as a peer: its engine over transformers, which finds pieces of earlier prompts again.

It is not part of the environment: `pip install --no-deps kvboost==0.9.0`, and accelerate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.thread import on_model_thread
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError, ModelError
from docs.experiments.answers import Peer, Question, Sample, Stopwatch, load_again

_CACHE_BYTES = 4 << 30
_CHUNKS = 4096  # its default of 128 pieces of 128 tokens would evict what it was told of


class KVBoost(Peer):
    """Its defaults: pieces of 128 tokens, repair of seams; where it moves a piece, its CacheBlend.

    It takes the same weights in the engine's dtype; its own loader knows float16 only, in which a
    CPU is slow.
    """

    def __init__(self, engine: Engine) -> None:
        """Load the model once more.

        Raises:
            ConfigError: kvboost is not installed, or does not know the architecture.
            ModelNotFoundError: the engine's model was not loaded from files.
        """
        try:
            import kvboost
        except ImportError as error:
            raise ConfigError(
                f"kvboost cannot be imported ({error}): pip install --no-deps kvboost==0.9.0, and "
                "accelerate"
            ) from error
        model, tokenizer = load_again(engine), engine.model.tokenizer
        self._engine: Any = kvboost.KVBoost(
            model,
            tokenizer,
            max_cache_bytes=_CACHE_BYTES,
            max_chunks=_CHUNKS,
            device=str(engine.model.shapes.device),
        )
        self.about = f"kvboost {version('kvboost')}, generate, {engine.model.shapes.dtype}"

    def learn(self, texts: Sequence[str], head: Rendered) -> None:
        """Warm it up with each text, as its documentation says for documents."""
        for text in texts:
            on_model_thread(partial(self._engine.warm, text))

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`; an answer may end sooner, where the model ends it.

        Raises:
            ModelError: it read the prompt as other tokens than the other peers have.
        """
        watch = Stopwatch()
        ask = partial(
            self._engine.generate,
            question.prompt.text,
            max_new_tokens=max_tokens,
            on_token=watch.add,
        )
        found = on_model_thread(ask)
        sample = watch.sample()
        if found.prompt_tokens != len(question.ids):
            raise ModelError(
                f"kvboost read {found.prompt_tokens} tokens where the others are given "
                f"{len(question.ids)}"
            )
        return sample
