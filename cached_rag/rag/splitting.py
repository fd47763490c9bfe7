"""Documents to chunks of bounded length in tokens. Knows text; the tokenizer is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cached_rag.errors import ConfigError
from cached_rag.rag.readers import Document

_SEPARATORS = ["\n\n", "\n", ". ", " ", ""]


@dataclass(frozen=True)
class Chunk:
    """A piece of a document, headed by the document's title, and its place (from 0)."""

    source: str
    title: str
    ordinal: int
    text: str


class Splitter:
    """Splits at paragraphs, else lines, else sentences, else words.

    Every chunk begins with its document's title: alone, behind other documents' chunks, it would
    often be unclear what it is about.

    Args:
        count_tokens: length of a text in tokens of the model.
        chunk_tokens: most tokens of a chunk, its title aside.
        overlap: tokens that neighbours share; 0 keeps modules distinct.
    """

    def __init__(
        self, count_tokens: Callable[[str], int], chunk_tokens: int = 256, overlap: int = 0
    ) -> None:
        from langchain_text_splitters import RecursiveCharacterTextSplitter

        if not chunk_tokens >= 16 or not 0 <= overlap < chunk_tokens:
            raise ConfigError(
                f"chunk_tokens ({chunk_tokens}) must be at least 16 and overlap ({overlap}) smaller"
            )
        self._splitter = RecursiveCharacterTextSplitter(
            separators=_SEPARATORS,
            keep_separator="end",
            chunk_size=chunk_tokens,
            chunk_overlap=overlap,
            length_function=count_tokens,
        )

    def split(self, document: Document) -> list[Chunk]:
        """The document's chunks, in order."""
        texts = (text.strip() for text in self._splitter.split_text(document.text))
        kept = [text for text in texts if text]
        return [
            Chunk(document.source, document.title, ordinal, _headed(document.title, text))
            for ordinal, text in enumerate(kept)
        ]


def _headed(title: str, text: str) -> str:
    return text if text.startswith(title) else f"{title}\n\n{text}"
