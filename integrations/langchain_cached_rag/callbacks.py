"""Reports of requests, collected where LangChain reports: in a callback handler."""

from __future__ import annotations

import sys
import threading
from typing import Any, TextIO

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult

from cached_rag import Report


class CacheReportHandler(BaseCallbackHandler):
    """Collects the report of every request it hears of, and prints it if told to.

    Example:
        reports = CacheReportHandler(prints=True)
        chain.invoke(question, config={"callbacks": [reports]})
        reports.reports[-1].cached_tokens

    Attributes:
        reports: in the order in which the requests ended. Safe for several threads.
    """

    def __init__(self, *, prints: bool = False, file: TextIO | None = None) -> None:
        self.reports: list[Report] = []
        self._prints = prints
        self._file = file
        self._lock = threading.Lock()

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        """Take the reports out of a result; other models have none."""
        for generations in response.generations:
            for generation in generations:
                if isinstance(generation, ChatGeneration):
                    about: dict[str, Any] = generation.message.response_metadata
                else:
                    about = generation.generation_info or {}
                # What a response cache answers was reported when it was computed.
                usage = getattr(getattr(generation, "message", None), "usage_metadata", None) or {}
                if "cached_rag" in about and "total_cost" not in usage:
                    self._take(Report(**about["cached_rag"]))

    def _take(self, report: Report) -> None:
        with self._lock:
            self.reports.append(report)
            if self._prints:
                print(report.to_line(), file=self._file or sys.stderr)
