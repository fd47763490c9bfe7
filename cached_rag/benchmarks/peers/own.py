"""This library as a peer: one of its methods."""

from __future__ import annotations

from collections.abc import Sequence

from cached_rag.backends.tokenizer import Rendered
from cached_rag.benchmarks.peers.base import Peer, Question, Sample
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ModelError


class Own(Peer):
    """A method of this library."""

    def __init__(self, engine: Engine, method: str, *, owns: bool = False) -> None:
        """Name the method.

        Args:
            owns: nobody else uses the engine, so it is closed with this.

        Raises:
            ConfigError: there is no such method.
        """
        GenerationConfig(method=method)
        self.engine, self.method, self._owns = engine, method, owns
        self.about = f"Cached RAG, method {method}, {engine.model.name}"

    def learn(self, texts: Sequence[str], head: Rendered) -> None:
        """Encode the texts, as the engine's store says; `full` has no use for that."""
        if self.method != "full":
            self.engine.encode(texts, head)

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`.

        Raises:
            ModelError: the engine read the prompt as other tokens than the other peers have.
        """
        config = GenerationConfig(
            method=self.method, max_tokens=max_tokens, ignore_eos=True, repetition_penalty=1.0
        )
        answer = self.engine.generate(question.prompt, config)
        report = answer.report
        if report.prompt_tokens != len(question.ids):
            raise ModelError(
                f"{self.method} read {report.prompt_tokens} tokens where the others are given "
                f"{len(question.ids)}, so their times cannot be compared; a chunk of the texts "
                "spells a control token: take other texts"
            )
        return Sample(report.ttft_ms, report.total_ms, tuple(answer.token_ids))

    def settle(self) -> None:
        """Encode now what the prompt missed."""
        if self.engine.write_back is not None:
            self.engine.write_back.drain()

    def close(self) -> None:
        """Close the engine, unless it is the caller's."""
        if self._owns:
            self.engine.close()
