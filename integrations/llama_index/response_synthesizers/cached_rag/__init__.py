"""Packs whole chunks into prompts.

LlamaIndex's own helper cuts chunks where a prompt is full, and a chunk that was cut has no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cached_rag.errors import needs_extra

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.core.indices.prompt_helper import PromptHelper
    from llama_index.core.llms.llm import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.response_synthesizers import CompactAndRefine
    from llama_index.llms.cached_rag import unwrapped

__all__ = ["CachedSynthesizer", "WholeChunks"]
_SEPARATOR = "\n\n"


class WholeChunks(PromptHelper):
    """A prompt helper that counts with the model's tokenizer and never cuts a chunk.

    Give it to any response synthesizer, or to `Settings.prompt_helper`. A chunk that does not fit
    by itself gets a prompt of its own, and the model's own limit decides.
    """

    @classmethod
    def of(cls, llm: LLM) -> WholeChunks:
        """One for a model.

        Raises:
            cached_rag.ConfigError: it is none of this package's.
        """
        helper = cls.from_llm_metadata(llm.metadata, tokenizer=unwrapped(llm).token_ids)
        assert isinstance(helper, WholeChunks)
        return helper

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "WholeChunks"

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = 5,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> list[str]:
        """As many chunks a prompt as fit, in order, none of them changed.

        Where all are blank it is one blank chunk: of none, LlamaIndex makes a tree without end.
        """
        room = self._get_available_chunk_size(prompt, padding=padding, llm=llm, tools=tools)
        count = self._token_counter.get_string_tokens
        packs: list[list[str]] = []
        used = 0
        for chunk in filter(None, (chunk.strip() for chunk in text_chunks)):
            # In place: a separator has more tokens between texts than alone, or shares theirs.
            last = packs[-1][-1] if packs else ""
            behind = count(f"{last}{_SEPARATOR}{chunk}") - count(last)
            if packs and used + behind <= room:
                packs[-1].append(chunk)
                used += behind
            else:
                packs.append([chunk])
                used = count(chunk)
        return [_SEPARATOR.join(pack) for pack in packs or [[""]]]

    def truncate(
        self, prompt: BasePromptTemplate, text_chunks: Sequence[str], *_: Any, **__: Any
    ) -> list[str]:
        """Chunks as they are: what is too long is the model's to refuse, by name."""
        return list(text_chunks)


class CachedSynthesizer(CompactAndRefine):
    """LlamaIndex's default synthesis, with chunks left whole.

    Example:
        index.as_query_engine(response_synthesizer=CachedSynthesizer(llm))
    """

    def __init__(self, llm: LLM, **kwargs: Any) -> None:
        """`kwargs` are `CompactAndRefine`'s."""
        super().__init__(**{"llm": llm, "prompt_helper": WholeChunks.of(llm), **kwargs})
