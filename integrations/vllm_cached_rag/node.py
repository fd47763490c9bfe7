"""The prefill node: an engine that prefills prompts for vLLM, and hands their KV over."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cached_rag import CachedRAGError, ConfigError, Engine, GenerationConfig, Report
from cached_rag.spi import Handoff, Prompt
from vllm_cached_rag.agreed import Settings, Ticket

_log = logging.getLogger(__name__)
# Settings of a request with which vLLM would read another prompt than the one its messages make,
# and what each is where nobody sets it. An empty list is not nothing: templates tell them apart.
_OTHER_PROMPT = {
    **dict.fromkeys(("tools", "functions", "documents", "chat_template", "chat_template_kwargs")),
    **dict.fromkeys(("suffix", "truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs")),
    **dict.fromkeys(("media_io_kwargs", "reasoning_effort", "prompt_logprobs")),
    **dict.fromkeys(("echo", "continue_final_message", "use_beam_search"), False),
    **{"kv_transfer_params": None, "add_generation_prompt": True},
}
_PLAIN = {"role", "content", "name"}


@dataclass(frozen=True)
class Handed:
    """A prompt whose KV was handed over.

    Attributes:
        token_ids: the prompt's.
        report: of the prefill; the times of an answer are not in it, as vLLM makes that.
        prefill_ms, handoff_ms: milliseconds to the KV, and until vLLM can have it.
    """

    ticket: Ticket
    token_ids: list[int]
    report: Report
    prefill_ms: float
    handoff_ms: float

    def to_line(self) -> str:
        """What was done, for people."""
        report = self.report
        return (
            f"{report.method}: {report.cached_tokens} of {report.prompt_tokens} prompt tokens from "
            f"cache, prefilled in {self.prefill_ms:.0f} ms, handed over in {self.handoff_ms:.0f} ms"
        )


class PrefillNode:
    """Prefills prompts, with chunks' KV from the engine's store. Safe for several threads."""

    def __init__(self, engine: Engine, handoff: str, method: str = "auto") -> None:
        """Open the folder for the KV of whole prompts.

        Args:
            handoff: the folder, which vLLM's connector reads.
            method: how chunks' KV is used and repaired.

        Raises:
            ConfigError: there is no such method.
            StoreError: the folder cannot be used.
        """
        self._engine = engine
        self._config = GenerationConfig(method=method, max_tokens=1)
        shapes = engine.model.shapes
        dtype = str(shapes.dtype).removeprefix("torch.")
        self.settings = Settings(handoff, engine.model.fingerprint, dtype, shapes.num_layers)
        self._handoff = Handoff(handoff, engine.model.fingerprint)

    def prefill(self, body: Mapping[str, Any]) -> Handed | str:
        """Prefill the prompt of a request and hand its KV over.

        Args:
            body: of a request for chat completions or completions.

        Returns:
            What was handed over; or why vLLM has to compute all of it itself, in words.
        """
        prompt = prompt_of(body)
        if prompt is None:
            return "it has settings or contents that only vLLM renders"
        try:
            return self.hand_over(prompt)
        except ConfigError as error:  # such as messages that the template refuses
            return str(error)
        except CachedRAGError as error:
            _log.warning("a prompt is left to vLLM: %s", error)
            return f"its KV could not be made or handed over ({type(error).__name__})"

    def hand_over(self, prompt: Prompt) -> Handed:
        """Prefill a prompt and hand its KV over.

        Raises:
            CachedRAGError: as `Engine.generate`, or the folder cannot be written.
        """
        began = time.perf_counter()
        ids, kv, report = self._engine.prompt_kv(prompt, self._config)
        ready = time.perf_counter()
        ticket = Ticket(self._handoff.put(kv))
        taken = (ready - began) * 1000, (time.perf_counter() - ready) * 1000
        return Handed(ticket, ids, report, *taken)

    def forget(self, handed: Handed) -> None:
        """Delete a prompt's KV, as vLLM has it by now."""
        try:
            self._handoff.delete(handed.ticket.name, handed.token_ids[:-1])
        except CachedRAGError as error:
            _log.warning("the KV of a prompt stays until others need the room: %s", error)

    def close(self) -> None:
        """Close the engine and the folder."""
        self._engine.close()
        self._handoff.close()


def prompt_of(body: Mapping[str, Any]) -> str | list[dict[str, Any]] | None:
    """The prompt of a request, if it is plain text or a plain conversation; else None."""
    prompt, messages = body.get("prompt"), body.get("messages")
    usual = _OTHER_PROMPT | {"add_special_tokens": messages is None}  # templates have their own
    if any(body.get(name) not in (None, default) for name, default in usual.items()):
        return None
    if isinstance(prompt, str) and prompt and messages is None:
        return prompt
    if prompt is not None or not isinstance(messages, list) or not messages:
        return None
    found = [_message(message) for message in messages]
    return [one for one in found if one is not None] if None not in found else None


def _message(message: Any) -> dict[str, Any] | None:
    """A message of plain text; None for any other, such as calls of tools and pictures."""
    if not isinstance(message, Mapping):
        return None
    given = {name: value for name, value in message.items() if value is not None}
    role, content = given.get("role"), given.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text") if content[0].get("type") == "text" else None
    if role not in ("system", "user", "assistant") or given.keys() - _PLAIN:
        return None
    found = given | {"content": content}
    return found if all(isinstance(value, str) for value in found.values()) else None
