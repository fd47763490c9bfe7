"""This library as a peer: one of its methods."""

from __future__ import annotations

from dataclasses import dataclass

from cached_rag.benchmarks.peers.base import Question, Sample
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ModelError


@dataclass(frozen=True)
class Own:
    """A method of this library.

    Raises:
        ConfigError: there is no such method.
    """

    engine: Engine
    method: str

    def __post_init__(self) -> None:
        GenerationConfig(method=self.method)

    @property
    def about(self) -> str:
        """See `Peer`."""
        return f"Cached RAG, method {self.method}"

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

    def close(self) -> None:
        """Change nothing: the engine is the caller's."""
