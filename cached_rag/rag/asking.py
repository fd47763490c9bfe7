"""From a question to the stream of its answer. Says what happens in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cached_rag.backends.prompt_text import Rendered
from cached_rag.config import GenerationConfig
from cached_rag.engine.report import Clock, Report
from cached_rag.kv.fingerprint import digest
from cached_rag.library.context import Context
from cached_rag.library.matching import ANCHOR
from cached_rag.rag.answer import AnswerStream
from cached_rag.rag.embedding import Embeddings
from cached_rag.rag.hit import Hit
from cached_rag.rag.index import DocumentIndex
from cached_rag.rag.prompts import Prompts, Turn, searched
from cached_rag.rag.retrieval import Reranker, Retrieval, Retrieved, check_question, find

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine

# What is said instead of an answer from nothing.
NOTHING_FOUND = "Nothing about this was found in the documents."


@dataclass(frozen=True)
class Asking:
    """What questions are answered with.

    Attributes:
        contexts: chunks are encoded behind each of these.
        forget: given texts that no document has any more, deletes their KV.
        reranker, candidates, by: see `retrieval.find`.
    """

    index: DocumentIndex
    engine: Engine
    embedder: Embeddings
    prompts: Prompts
    contexts: Callable[[], Sequence[Context | None]]
    forget: Callable[[Sequence[str]], object]
    reranker: Reranker | None = None
    candidates: int = 0
    by: str = "vectors"

    def find(self, text: str, wanted: Retrieval) -> Retrieved:
        """The chunks for a text; their KV begins to come from the disk."""
        order = (self.reranker, self.candidates, self.by)
        found = find(self.index, self.embedder, text, wanted, *order)
        texts = [hit.text for hit in found.hits]
        self._introduce(texts)
        # Not by the engine's `prefetch`, which expects them in whichever prompt comes next: they
        # will be in this one, as they are, or do not fit.
        self.engine.library.prefetch(texts)
        return found

    def answer(
        self,
        question: str,
        said: Sequence[Turn],
        wanted: Retrieval,
        config: GenerationConfig,
        *,
        reorder: bool,
    ) -> AnswerStream:
        """Begin to answer; see `CachedRAG.ask`.

        Args:
            said: what was said before.
        """
        check_question(question)
        clock = Clock()
        # 1) The nearest chunks.
        text = searched(question, said)
        found = self.find(text, wanted)
        search_ms = clock.total()
        if not (found.hits or wanted.answer_anyway):
            return self.decline(question, found, text, search_ms)
        hits = list(found.hits)
        if reorder:
            names = [digest(hit.text.strip()) for hit in hits]
            order = self.engine.sequences.order(self.engine.settings.namespace, names)
            hits = [hits[place] for place in order]
        # 2) A prompt with as many of them as fit.
        hits, rendered = self.prompts.fitting(question, hits, config.max_tokens, said)
        # 3) The answer, token by token, while it is taken.
        return self.begin(question, rendered, hits, found, text, config, clock, search_ms)

    def begin(
        self,
        question: str,
        prompt: Rendered,
        hits: Sequence[Hit],
        found: Retrieved,
        text: str,
        config: GenerationConfig,
        clock: Clock,
        search_ms: float,
    ) -> AnswerStream:
        """Begin to answer a prompt.

        Args:
            hits: the chunks that are in the prompt.
            text: what was searched for.
            clock: started when the question was asked.
            search_ms: how long finding chunks took.
        """
        config = config.replace(stop=(*config.stop, *self.prompts.stop))
        stream = self.engine.stream(prompt, config, clock=clock)
        return AnswerStream(stream, question, tuple(hits), search_ms, list(found.notes), text)

    def decline(self, question: str, found: Retrieved, text: str, search_ms: float) -> AnswerStream:
        """Say that nothing was found, without asking the model; see `begin`."""
        from cached_rag.engine.stream import ToldStream

        stream = ToldStream(NOTHING_FOUND, Report("none", charged_recompute=0.0))
        return AnswerStream(stream, question, (), search_ms, list(found.notes), text)

    def _introduce(self, texts: Sequence[str]) -> None:
        """Make chunks known to the engine that were encoded in another dtype, or not yet.

        Then they count as missed, and are encoded in the background.
        """
        library = self.engine.library
        library.refresh()
        # Shorter texts are never known.
        long = [text for text in map(str.strip, texts) if len(text) >= ANCHOR]
        is_known = all(library.table.get(text) is not None for text in long)
        if is_known and library.encoded_after():
            return
        self.engine.register(texts)
        with library.spared():
            self.forget(self.index.orphans(texts))  # those deleted since they were found
            self.engine.encode([], self.prompts.head(), context=self.contexts())
