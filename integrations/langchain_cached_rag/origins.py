"""Where the documents of a retrieval come from: out of an index, or from a model's hand.

Retrievers that compress with a language model (`LLMChainExtractor`) return texts that differ with
every question. Their KV would never be used again; that of the documents the model read is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage


class Origins(BaseCallbackHandler):
    """Hears what goes on inside one retrieval, in whatever threads LangChain uses."""

    raise_error = True  # what `learn` raises

    def __init__(self, learn: Callable[[list[str]], object]) -> None:
        """Begin to listen.

        Args:
            learn: called with texts that were retrieved, before a model inside reads them.
        """
        self._learn = learn
        # Also held while texts are learned: a model on another thread, about to read one of them,
        # waits for that. Reentrant, because `sort_out` is asked from inside, too.
        self._lock = threading.RLock()
        self._has_read = False
        self._retrieved: dict[str, None] = {}  # in order, each once
        self._read: dict[str, None] = {}
        self._around: set[UUID | None] = set()  # runs with a retriever inside

    def on_retriever_end(
        self,
        documents: Sequence[Document],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **_: Any,
    ) -> None:
        """Note what a retriever returned, less what a model inside it wrote."""
        texts = [document.page_content for document in documents]
        with self._lock:
            if run_id in self._around:
                texts = self.sort_out(texts)[0]
            self._retrieved |= dict.fromkeys(map(str.strip, texts))
            self._around.add(parent_run_id)

    def on_chain_end(
        self, outputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **_: Any
    ) -> None:
        """Note that what is around a chain is around the retrievers in it, too."""
        with self._lock:
            if run_id in self._around:
                self._around.add(parent_run_id)

    def on_llm_start(self, serialized: Any, prompts: list[str], **_: Any) -> None:
        """Note which of the texts so far a model is about to read."""
        self._shown(prompts)

    def on_chat_model_start(
        self, serialized: Any, messages: list[list[BaseMessage]], **_: Any
    ) -> None:
        """As `on_llm_start`."""
        self._shown(message.text for prompt in messages for message in prompt)

    def _shown(self, prompts: Iterable[str]) -> None:
        shown = list(prompts)
        with self._lock:
            self._has_read |= bool(self._retrieved)
            new = [text for text in self._retrieved if text not in self._read]
            if read := [text for text in new if any(text in prompt for prompt in shown)]:
                self._read |= dict.fromkeys(read)
                self._learn(read)

    def sort_out(self, texts: Sequence[str]) -> tuple[list[str], list[str]]:
        """Tell texts of an index from texts that a model wrote.

        Returns:
            Those of an index; and, if there were others, what the model that wrote them had read.
        """
        with self._lock:
            if not self._has_read:
                return list(texts), []
            kept = [text for text in texts if text.strip() in self._retrieved]
            return kept, list(self._read) if len(kept) < len(texts) else []
