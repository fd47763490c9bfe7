"""This library as a peer: one of its methods.

Without drafts. All peers must go on where an answer would end, and behind that a model repeats
itself, which drafts guess more easily than what anybody asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

from cached_rag.backends.prompt_text import Rendered
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ModelError
from cached_rag.evaluation.peers.base import Peer, Question, Sample


class Own(Peer):
    """A method of this library."""

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
        GenerationConfig(method=method)
        self.engine, self.method, self._owns, self.plain = engine, method, owns, plain
        self.about = f"Cached RAG, method {method}, {engine.model.name}, no drafts"

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
            method=self.method,
            max_tokens=max_tokens,
            ignore_eos=True,
            repetition_penalty=1.0,
            drafts=False,
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
