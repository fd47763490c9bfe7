"""An answer as it is made: from a complete KV to pieces of text. Knows no module and no store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from cached_rag.assemble import KVBuffer
from cached_rag.batch_step import NextToken
from cached_rag.config import GenerationConfig
from cached_rag.decode import Detokenizer, Sampler
from cached_rag.model import LanguageModel
from cached_rag.model_thread import on_model_thread
from cached_rag.plan import Placement
from cached_rag.prompt import Tokens
from cached_rag.relay import SharedKV
from cached_rag.report import Report
from cached_rag.stepper import Seat, Stepper


@dataclass(frozen=True)
class Generation:
    """An answer: its text, its tokens, why it ended, and the report.

    It ends with "stop" (the model's own end, or a stop string), "length" or "cancelled".
    """

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
        rows: slots of the tokens that were computed in every layer; the others are cached.
        as_they_are: cached KV that nothing was repaired in, in memory.
    """

    tokens: Tokens
    logits: torch.Tensor
    buffer: KVBuffer | SharedKV
    report: Report
    release: Callable[[], None]
    rows: torch.Tensor
    as_they_are: tuple[Placement, ...] = ()


@dataclass
class _State:
    """What a stream shows of its answer while it is made."""

    report: Report
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    cancelled: threading.Event = field(default_factory=threading.Event)


class Stream(Iterator[str]):
    """Pieces of an answer. Its attributes grow with it and are complete at its end.

    A stream that is dropped, or closed, or cancelled, stops generating.
    """

    def __init__(
        self,
        model: LanguageModel,
        stepper: Stepper,
        prefill: Callable[[], Prefill],
        config: GenerationConfig,
    ) -> None:
        self._state = _State(Report(config.method_name))
        self._taking = threading.Lock()
        # The generator must not hold the stream, or dropping it would end nothing.
        self._pieces = _answer(self._state, model, stepper, prefill, config)

    @property
    def report(self) -> Report:
        """What was done and how long it took."""
        return self._state.report

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens."""
        return self._state.token_ids

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, see `Generation`."""
        return self._state.finish_reason

    def __next__(self) -> str:
        with self._taking:
            return next(self._pieces)

    def result(self) -> Generation:
        """The whole answer, if no piece was taken yet."""
        text = "".join(self)
        return Generation(text, tuple(self.token_ids), self.finish_reason, self.report)

    async def atext(self) -> str:
        """All pieces, without blocking the event loop; a cancelled task stops the generation."""
        try:
            return await asyncio.to_thread("".join, self)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def apieces(self) -> AsyncGenerator[str, None]:
        """Piece by piece, each when it is made; whoever stops asking stops the generation."""
        try:
            while (piece := await asyncio.to_thread(next, self, None)) is not None:
                yield piece
        finally:
            self.cancel()
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop generating, and wait until it has stopped; for any thread, at any time."""
        self.cancel()
        with self._taking:
            self._pieces.close()

    def cancel(self) -> None:
        """Let the answer end before its next token, without waiting for it."""
        self._state.cancelled.set()


def _answer(
    state: _State,
    model: LanguageModel,
    stepper: Stepper,
    start: Callable[[], Prefill],
    config: GenerationConfig,
) -> Generator[str, None, None]:
    clock = Clock()
    sampler = Sampler(model, config)
    begun = on_model_thread(lambda: _first_token(state, start, sampler))
    if begun is None:
        state.finish_reason = "cancelled"
        return
    prefill, first = begun
    state.report = report = prefill.report
    report.ttft_ms = clock.total()
    try:
        # 4) Token after token; other answers' steps are made together with this one's.
        with stepper.seat() as seat:
            text = Detokenizer(model.tokenizer, config.stop)
            for token in _tokens(state, first, sampler, seat, prefill, config.max_tokens):
                if token in model.eos_ids:
                    state.finish_reason = "stop"
                    break
                state.token_ids.append(token)
                if piece := text.push(token):
                    yield piece
                if text.is_stopped:
                    state.finish_reason = "stop"
                    return
            if piece := text.flush():
                yield piece
    except GeneratorExit:
        state.finish_reason = "cancelled"
        raise
    finally:
        report.output_tokens = len(state.token_ids)
        report.total_ms = clock.total()
        prefill.release()


def _first_token(
    state: _State, start: Callable[[], Prefill], sampler: Sampler
) -> tuple[Prefill, int] | None:
    """The prefilled prompt and what follows it; None if nobody waits for it any more."""
    if state.cancelled.is_set():
        return None
    prefill = start()
    try:
        return prefill, sampler(list(prefill.tokens.ids), prefill.logits)
    except BaseException:
        prefill.release()
        raise


def _tokens(
    state: _State, token: int, sampler: Sampler, seat: Seat, prefill: Prefill, max_tokens: int
) -> Iterator[int]:
    """At most as many tokens as are wanted, none computed before it is asked for."""
    ids = list(prefill.tokens.ids)
    yield token
    for _ in range(max_tokens - 1):
        if state.cancelled.is_set():
            state.finish_reason = "cancelled"
            return
        ids.append(token)
        last = NextToken(prefill.buffer, token, len(ids) - 1)
        token = seat.step(last, partial(sampler, ids))
        yield token


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
