"""Turns of a chat with documents in its system message: time to the first token of each turn.

A turn's prompt is the last turn's, its answer, and a new question. So it may take what the last one
left (`StoreConfig.sequence_bytes`), and cost only what is new.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from cached_rag.backends.base import Backend
from cached_rag.config import GenerationConfig, StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError
from cached_rag.evaluation.timing import NEW_PROMPTS, make_texts, take_turns

# What all are compared with: every turn is prefilled from its first token on.
NOTHING_KEPT = "full, nothing kept"
_OPENING = "Answer from the documents."


@dataclass(frozen=True)
class ChatRow:
    """Medians of one turn by one method.

    Attributes:
        turn: the first one is 1.
        ttft_ms: milliseconds to the first token.
        token_ms: milliseconds for each token after it.
        speedup: the same turn's `ttft_ms` with nothing kept, over this one's.
        cached: share of the prompt's tokens that were taken from cached KV.
        kept: share of them that the turns before had left.
    """

    method: str
    turn: int
    prompt_tokens: int
    ttft_ms: float
    token_ms: float
    speedup: float
    cached: float
    kept: float


class Chat:
    """One conversation that is held again and again, each time as if it were new."""

    def __init__(
        self, model: Backend, documents: int, document_tokens: int, turns: int, question_tokens: int
    ) -> None:
        """Make the texts, and encode the documents in two engines, one of which keeps prompts.

        Raises:
            ConfigError: a count below 1, or a model without chat template.
        """
        # The same chat is held again and again, which is no prompt that comes again.
        self.keeping = Engine(model, StoreConfig(settle=False))
        self.forgetting = Engine(model, NEW_PROMPTS)
        sizes = [document_tokens] * documents, [question_tokens] * turns
        texts = make_texts(self.keeping, *sizes[0], *sizes[1])
        self.questions = texts[documents:]
        content = "\n\n".join([_OPENING, *texts[:documents]])
        self.system = {"role": "system", "content": content}
        asked = [self.system, {"role": "user", "content": self.questions[0]}]
        for engine in (self.keeping, self.forgetting):
            engine.encode(texts[:documents], engine.head(asked, texts[0]))

    def close(self) -> None:
        """Close both engines."""
        self.keeping.close()
        self.forgetting.close()

    def hold(self, engine: Engine, config: GenerationConfig) -> list[Report]:
        """Ask all questions in turn, and report each; nothing of an earlier chat is left."""
        engine.sequences.clear()
        messages, reports = [self.system], []
        for question in self.questions:
            messages.append({"role": "user", "content": question})
            made = engine.generate(messages, config)
            messages.append({"role": "assistant", "content": made.text})
            reports.append(made.report)
        return reports


def bench_chat(
    model: Backend,
    *,
    documents: int = 7,
    document_tokens: int = 512,
    turns: int = 7,
    question_tokens: int = 32,
    new_tokens: int = 32,
    methods: Sequence[str] = ("full", "prefix", "auto"),
    repeats: int = 3,
) -> list[ChatRow]:
    """Hold a chat by every method in turn, and once more with nothing kept.

    Encoding the documents is not timed.

    Raises:
        ConfigError: a count below 1, an unknown method, or a model without chat template.
    """
    if min(documents, turns, new_tokens - 1) < 1:
        raise ConfigError("a chat has a document, a turn, and answers of two tokens at least")
    plain = GenerationConfig(method="full", max_tokens=new_tokens, ignore_eos=True)
    with closing(Chat(model, documents, document_tokens, turns, question_tokens)) as chat:
        variants = {NOTHING_KEPT: partial(chat.hold, chat.forgetting, plain)}
        for method in methods:
            config = plain.replace(method=method)
            variants[method] = partial(chat.hold, chat.keeping, config)
        found = take_turns(variants, repeats)
    base = [_median(reports, "ttft_ms") for reports in zip(*found[NOTHING_KEPT], strict=True)]
    return [
        _row(method, turn, reports, base[turn - 1])
        for method, chats in found.items()
        for turn, reports in enumerate(zip(*chats, strict=True), 1)
    ]


def _row(method: str, turn: int, reports: Sequence[Report], base_ms: float) -> ChatRow:
    names = ("prompt_tokens", "ttft_ms", "total_ms", "cached_tokens", "kept_tokens")
    tokens, ttft, total, cached, kept = (_median(reports, name) for name in names)
    token = (total - ttft) / (reports[0].output_tokens - 1)
    shares = cached / tokens, kept / tokens
    return ChatRow(method, turn, round(tokens), ttft, token, base_ms / ttft, *shares)


def _median(reports: Sequence[Report], name: str) -> float:
    return statistics.median(float(getattr(report, name)) for report in reports)
