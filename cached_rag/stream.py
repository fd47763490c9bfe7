"""An answer as it is made: from a complete KV to pieces of text. Knows no module and no store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from cached_rag.assemble import KVBuffer
from cached_rag.config import GenerationConfig
from cached_rag.decode import Detokenizer, Sampler, step
from cached_rag.model import LanguageModel
from cached_rag.prompt import Tokens
from cached_rag.report import Report


@dataclass(frozen=True)
class Generation:
    """An answer: its text, its tokens, why it ended ("stop" or "length"), and the report."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: Report


@dataclass
class Prefill:
    """A prompt whose KV is complete. `release` it, so that the next request can use its memory.

    Attributes:
        logits: (1, vocab_size) after the last prompt token.
        buffer: KV of all `tokens`, with room for the answer.
        rows: positions of the tokens that were computed in every layer; the others are cached.
    """

    tokens: Tokens
    logits: torch.Tensor
    buffer: KVBuffer
    report: Report
    release: Callable[[], None]
    rows: torch.Tensor


class Stream(Iterator[str]):
    """Pieces of an answer. `report` and `token_ids` grow with it and are complete at its end."""

    def __init__(
        self,
        model: LanguageModel,
        lock: threading.Lock,
        prefill: Callable[[], Prefill],
        config: GenerationConfig,
    ) -> None:
        self.report = Report(config.method_name)
        self.token_ids: list[int] = []
        self.finish_reason = "length"
        self._pieces: Generator[str, None, None] = self._run(model, lock, prefill, config)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating."""
        self._pieces.close()

    def _run(
        self,
        model: LanguageModel,
        lock: threading.Lock,
        start: Callable[[], Prefill],
        config: GenerationConfig,
    ) -> Generator[str, None, None]:
        clock = Clock()
        prefill = start()
        self.report = report = prefill.report
        try:
            # 4) Token after token; the model is free for others in between.
            sampler = Sampler(model, config)
            text = Detokenizer(model.tokenizer, config.stop)
            ids = list(prefill.tokens.ids)
            token = sampler(ids, prefill.logits)
            report.ttft_ms = clock.total()
            self.finish_reason = "stop"
            while token not in model.eos_ids:
                self.token_ids.append(token)
                ids.append(token)
                if piece := text.push(token):
                    yield piece
                if text.is_stopped:
                    return
                if len(self.token_ids) == config.max_tokens:
                    self.finish_reason = "length"
                    break
                with lock:
                    logits = step(model, prefill.buffer, token, len(ids) - 1)
                token = sampler(ids, logits)
            if piece := text.flush():
                yield piece
        finally:
            report.output_tokens = len(self.token_ids)
            report.total_ms = clock.total()
            prefill.release()


class Clock:
    """Milliseconds since it was made, and since the last lap."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()

    def lap(self) -> float:
        """Since the last lap."""
        now = time.perf_counter()
        passed, self._lap = now - self._lap, now
        return passed * 1000

    def total(self) -> float:
        """Since the start."""
        return (time.perf_counter() - self._start) * 1000
