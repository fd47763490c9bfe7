"""This library as an application has it, and transformers with its last prompt kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from transformers import DynamicCache

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.transformers.decoder import CACHE
from cached_rag.engine.engine import Engine
from docs.experiments.answers import Own, Question, Sample, Transformers


class OwnEngine(Own):
    """A method of this library that learns texts ahead, maybe in an engine of its own."""

    def __init__(
        self, engine: Engine, method: str, *, owns: bool = False, plain: str = "full"
    ) -> None:
        """Name the method.

        Args:
            owns: nobody else uses the engine, so it is closed with this.
            plain: see `Peer`.

        Raises:
            ConfigError: there is no such method.
        """
        super().__init__(engine, method)
        self._owns, self.plain = owns, plain

    def learn(self, texts: Sequence[str], head: Rendered) -> None:
        """Encode the texts, as the engine's store says; `full` has no use for that."""
        if self.method != "full":
            self.engine.encode(texts, head)

    def close(self) -> None:
        """Close the engine, unless it is the caller's."""
        if self._owns:
            self.engine.close()


class TransformersPrefix(Transformers):
    """`generate`, with the KV of the last prompt and its answer kept.

    The tokens that the next prompt begins with are not computed again (transformers' documentation,
    "KV cache strategies", re-use of a prefix).
    """

    def __init__(self, engine: Engine) -> None:
        """Load the copy; errors as `Transformers`."""
        super().__init__(engine)
        self._held: tuple[tuple[int, ...], DynamicCache] = ((), DynamicCache())
        self.about = self.about.replace("generate", "generate, last prompt kept")

    def _answer(self, question: Question, max_tokens: int, **how: object) -> Sample:
        cache = self._beginning(question.ids)
        sample = super()._answer(question, max_tokens, **{CACHE: cache}, **how)
        self._held = (*question.ids, *sample.token_ids[:-1]), cache
        return sample

    def _beginning(self, ids: tuple[int, ...]) -> DynamicCache:
        """The last prompt's KV, cut to the tokens that these begin with."""
        held, cache = self._held
        pairs = zip(held, ids[:-1], strict=False)  # the last token is computed, for its logits
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not common:
            return DynamicCache()
        if common < len(held):
            cache.crop(common - len(held))  # how many less
        return cache
