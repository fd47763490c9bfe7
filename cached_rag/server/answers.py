"""Responses in OpenAI's form. Knows JSON and finished answers; knows no engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cached_rag.engine.decoding import Generation
from cached_rag.engine.report import Report

Json = dict[str, Any]


@dataclass(frozen=True)
class Envelope:
    """Makes the JSON of one response, whole or in chunks; has what all chunks have in common.

    Attributes:
        model: the name by which clients know it.
        fingerprint: tells models apart that have the same name.
        is_chat: whether it is a chat completion, else a completion.
        created: seconds since the epoch.
    """

    model: str
    fingerprint: str
    is_chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, answers: Sequence[Generation]) -> Json:
        """A whole response."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        reports = [answer.report for answer in answers]
        return self._head("") | {"choices": choices, "usage": usage(reports)}

    def opening(self, index: int) -> Json:
        """The first chunk of a streamed choice."""
        start = {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": ""}
        return self._chunk(index, start)

    def piece(self, index: int, text: str) -> Json:
        """A chunk with text."""
        return self._chunk(index, {"delta": {"content": text}} if self.is_chat else {"text": text})

    def closing(self, index: int, reason: str) -> Json:
        """The last chunk of a streamed choice."""
        end: Json = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk(index, end, reason)

    def counted(self, reports: Sequence[Report]) -> Json:
        """The chunk that says how many tokens were used."""
        return self._head(".chunk") | {"choices": [], "usage": usage(reports)}

    def _choice(self, index: int, answer: Generation) -> Json:
        said = {"role": "assistant", "content": answer.text, "refusal": None}
        content: Json = {"message": said} if self.is_chat else {"text": answer.text}
        return {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }

    def _chunk(self, index: int, content: Json, reason: str | None = None) -> Json:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        return self._head(".chunk") | {"choices": [choice]}

    def _head(self, suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(reports: Sequence[Report]) -> Json:
    """OpenAI's `usage`: tokens of the prompts, of these from the cache, and of the answers."""
    read = sum(report.prompt_tokens for report in reports)
    written = sum(report.output_tokens for report in reports)
    cached = sum(report.cached_tokens for report in reports)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def failure(message: str, kind: str, code: str | None = None) -> Json:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
