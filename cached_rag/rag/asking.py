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
from cached_rag.rag.retrieval import Retrieved, check_question, find
from cached_rag.rag.settings import Reranking, Retrieval

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine
    from cached_rag.engine.stream import Stream

# What is said instead of an answer from nothing.
NOTHING_FOUND = "Nothing about this was found in the documents."


@dataclass(frozen=True)
class Lookup:
    """What was found for a question.

    Attributes:
        text: what was searched for.
        ms: how long that took, in milliseconds.
        clock: started when the question was asked.
    """

    found: Retrieved
    text: str
    ms: float
    clock: Clock

    def answered(self, stream: Stream, question: str, hits: Sequence[Hit]) -> AnswerStream:
        """The answer, with the chunks that are in its prompt and what is to be told of them."""
        notes = list(self.found.notes)
        return AnswerStream(stream, question, tuple(hits), self.ms, notes, self.text)


@dataclass(frozen=True)
class Asking:
    """What questions are answered with.

    Attributes:
        contexts: chunks are encoded behind each of these.
        forget: given texts that no document has any more, deletes their KV.
        reranking, by: see `retrieval.find`.
    """

    index: DocumentIndex
    engine: Engine
    embedder: Embeddings
    prompts: Prompts
    contexts: Callable[[], Sequence[Context | None]]
    forget: Callable[[Sequence[str]], object]
    reranking: Reranking
    by: str

    def find(self, text: str, wanted: Retrieval) -> Retrieved:
        """The chunks for a text; their KV begins to come from the disk."""
        found = find(self.index, self.embedder, text, wanted, self.reranking, self.by)
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
            return self.decline(question, Lookup(found, text, search_ms, clock))
        hits = list(found.hits)
        if wanted.reorder:
            names = [digest(hit.text.strip()) for hit in hits]
            order = self.engine.sequences.order(self.engine.settings.namespace, names)
            hits = [hits[place] for place in order]
        # 2) A prompt with as many of them as fit.
        hits, rendered = self.prompts.fitting(question, hits, config.max_tokens, said)
        # 3) The answer, token by token, while it is taken.
        lookup = Lookup(found, text, search_ms, clock)
        return self.begin(question, rendered, hits, lookup, config)

    def begin(
        self,
        question: str,
        prompt: Rendered,
        hits: Sequence[Hit],
        lookup: Lookup,
        config: GenerationConfig,
    ) -> AnswerStream:
        """Begin to answer a prompt.

        Args:
            hits: the chunks that are in the prompt.
        """
        config = config.replace(stop=(*config.stop, *self.prompts.stop))
        stream = self.engine.stream(prompt, config, clock=lookup.clock)
        return lookup.answered(stream, question, hits)

    def decline(self, question: str, lookup: Lookup) -> AnswerStream:
        """Say that nothing was found, without asking the model."""
        from cached_rag.engine.stream import ToldStream

        told = ToldStream(NOTHING_FOUND, Report("none", charged_recompute=0.0))
        return lookup.answered(told, question, ())

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
        with library.shelf.spared():
            self.forget(self.index.orphans(texts))  # those deleted since they were found
            self.engine.encode([], self.prompts.head(), context=self.contexts())
