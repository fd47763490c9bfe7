"""Responses in OpenAI's form. Knows JSON and finished answers; knows no engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cached_rag.backends.tokenizer import Tokenization
from cached_rag.engine.decoding import Generation, TokenLogprobs, shown_logprob
from cached_rag.engine.report import Report
from cached_rag.engine.tools import CallPart, Tools, new_call_id

Json = dict[str, Any]


@dataclass(frozen=True)
class Envelope:
    """Makes the JSON of one response, whole or in chunks; has what all chunks have in common.

    Attributes:
        model: the name by which clients know it.
        fingerprint: tells models apart that have the same name.
        is_chat: whether it is a chat completion, else a completion.
        tokenization: spells tokens, where log probabilities are asked for.
        num_answers: to each prompt.
        sources: the chunks that an index found for the question; None without an index.
        created: seconds since the epoch.
    """

    model: str
    fingerprint: str
    is_chat: bool
    tokenization: Tokenization
    num_answers: int = 1
    sources: list[Json] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, answers: Sequence[Generation], tools: Tools) -> Json:
        """A whole response."""
        choices = [self._choice(index, answer, tools) for index, answer in enumerate(answers)]
        reports = [answer.report for answer in answers]
        found = {} if self.sources is None else {"sources": self.sources}
        counts = {"usage": usage(reports, self.num_answers)}
        return self._head("") | {"choices": choices} | counts | found

    def opening(self, index: int) -> Json:
        """The first chunk of a streamed choice."""
        start = {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": ""}
        found = {} if self.sources is None else {"sources": self.sources}
        return self._chunk(index, start) | found

    def piece(
        self,
        index: int,
        text: str,
        parts: Sequence[CallPart] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Json:
        """A chunk with text, parts of calls, or the log probabilities of tokens."""
        if not self.is_chat:
            return self._chunk(index, {"text": text}, logprobs=logprobs)
        delta: Json = {"content": text} if text or not parts else {}
        if parts:
            called = [{"index": part.index, **_call(part.name, part.arguments)} for part in parts]
            delta["tool_calls"] = called
        return self._chunk(index, {"delta": delta}, logprobs=logprobs)

    def closing(self, index: int, reason: str) -> Json:
        """The last chunk of a streamed choice."""
        end: Json = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk(index, end, reason)

    def counted(self, reports: Sequence[Report]) -> Json:
        """The chunk that says how many tokens were used."""
        return self._head(".chunk") | {"choices": [], "usage": usage(reports, self.num_answers)}

    def _choice(self, index: int, answer: Generation, tools: Tools) -> Json:
        text, calls = tools.read(answer.text)
        said: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            said["content"] = text or None
            said["tool_calls"] = [_call(call.name, call.arguments) for call in calls]
        content: Json = {"message": said} if self.is_chat else {"text": text}
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": ended(answer.finish_reason, has_calls=bool(calls)),
        }

    def _chunk(
        self,
        index: int,
        content: Json,
        reason: str | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Json:
        shown = self._logprobs(logprobs)
        choice = {"index": index, **content, "logprobs": shown, "finish_reason": reason}
        return self._head(".chunk") | {"choices": [choice]}

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> Json | None:
        """Log probabilities; of completions in the older form that these have."""
        if not found:
            return None
        if self.is_chat:
            return {
                "content": [
                    {
                        **self._token(at.token, at.logprob),
                        "top_logprobs": [self._token(*pair) for pair in at.top],
                    }
                    for at in found
                ],
                "refusal": None,
            }
        spelled = [self._token(at.token, at.logprob)["token"] for at in found]
        tops = [{self._token(*pair)["token"]: pair[1] for pair in at.top} for at in found]
        return {
            "tokens": spelled,
            "token_logprobs": [at.logprob for at in found],
            "top_logprobs": tops,
        }

    def _token(self, token: int, logprob: float) -> Json:
        return shown_logprob(self.tokenization, token, logprob)

    def _head(self, suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def ended(reason: str, *, has_calls: bool) -> str:
    """Why an answer ended, in OpenAI's words."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def _call(name: str | None, arguments: str) -> Json:
    """A call of a tool, or more of its arguments if it has no name."""
    if name is None:
        return {"function": {"arguments": arguments}}
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def usage(reports: Sequence[Report], num_answers: int = 1) -> Json:
    """OpenAI's `usage`: tokens of the prompts, of these from the cache, and of the answers.

    Args:
        num_answers: how many neighbouring reports are of the same prompt, which counts once.
    """
    prompts = reports[::num_answers]
    read = sum(report.prompt_tokens for report in prompts)
    written = sum(report.output_tokens for report in reports)
    cached = sum(report.cached_tokens for report in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def failure(message: str, kind: str, code: str | None = None) -> Json:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
