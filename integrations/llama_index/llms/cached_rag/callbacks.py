"""Reports of requests, collected where LlamaIndex reports: in an event handler."""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent

from cached_rag import Report


class CacheReportHandler(BaseEventHandler):
    """Collects the report of every request it hears of, and prints it if told to.

    Example:
        reports = CacheReportHandler(prints=True)
        get_dispatcher().add_event_handler(reports)  # llama_index.core.instrumentation
        reports.reports[-1].cached_tokens
    """

    reports: list[Any] = Field(default_factory=list, description="In the order of their ends.")
    prints: bool = Field(default=False, description="One line a request on standard error.")

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CacheReportHandler"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        """Take the report out of an ended request; other models have none."""
        if not isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            return
        raw = getattr(event.response, "raw", None)
        if isinstance(raw, dict) and "cached_rag" in raw:
            report = Report(**raw["cached_rag"])
            self.reports.append(report)
            if self.prints:
                print(report.to_line(), file=sys.stderr)
