"""Gets documents ready for an index: splits them, embeds their chunks, and has these encoded.

Knows no index. So other processes can do it, too: see `workers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cached_rag.backends.prompt_text import Rendered
from cached_rag.errors import ConfigError
from cached_rag.kv.fingerprint import digest
from cached_rag.library.context import Context
from cached_rag.library.encode import EncodeSummary
from cached_rag.rag.document import Document
from cached_rag.rag.embedding import EMBED_CHUNKS, Embeddings
from cached_rag.rag.progress import Say
from cached_rag.rag.prompts import Prompts
from cached_rag.rag.splitting import Splitter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cached_rag.engine.engine import Engine

# Documents are encoded together until their chunks fill a few batches.
_GROUP_CHUNKS = 32
# A title has 200 characters at most.
_TITLE_TOKENS = 64


@dataclass(frozen=True)
class Preparation:
    """What documents are prepared with.

    Attributes:
        head, contexts: chunks are encoded behind the head and each of the contexts.
    """

    engine: Engine
    embedder: Embeddings
    splitter: Splitter
    head: Rendered
    contexts: tuple[Context | None, ...]

    @classmethod
    def of(
        cls,
        engine: Engine,
        embedder: Embeddings,
        settings: Mapping[str, str],
        contexts: tuple[Context | None, ...],
    ) -> Preparation:
        """By the settings of an index.

        Raises:
            ConfigError: chunks as long as these settings have them exceed the model's context.
        """

        def count_tokens(text: str) -> int:
            return len(engine.tokenization.literal(text))

        splitter = Splitter(count_tokens, int(settings["chunk_tokens"]))
        head = Prompts(engine, settings["system"]).head()
        _check_fits(engine, head, int(settings["chunk_tokens"]))
        return cls(engine, embedder, splitter, head, contexts)

    def embedded(self, texts: Sequence[str], say: Say = lambda *_: None) -> NDArray[np.float32]:
        """(len(texts), dim) float32; part by part, so that a bar moves in long documents."""
        parts = []
        for begin in range(0, max(1, len(texts)), EMBED_CHUNKS):
            say(f"embedding {len(texts)} chunks", begin / max(1, len(texts)))
            parts.append(self.embedder.embed(texts[begin : begin + EMBED_CHUNKS]))
        return np.concatenate(parts)

    def encode(
        self,
        documents: Sequence[Sequence[str]],
        tokens_done: Callable[[int], object] = lambda _: None,
    ) -> EncodeSummary:
        """See that chunks have KV behind each of the contexts.

        Args:
            documents: the chunks of each, in their order.
            tokens_done: called after each batch with the number of tokens in it.
        """
        return self.engine.encode(
            documents, self.head, context=self.contexts, token_progress=tokens_done
        )


def _check_fits(engine: Engine, head: Rendered, chunk_tokens: int) -> None:
    """Refuse what the model cannot read, before an index has it as its setting."""
    room, before = engine.model.context_length, engine.count_tokens(head)
    if before + _TITLE_TOKENS + chunk_tokens > room:
        raise ConfigError(
            f"chunks of {chunk_tokens} tokens, a title ({_TITLE_TOKENS}) and the prompt's head "
            f"({before}) exceed the model's context of {room}; choose smaller chunk_tokens in a "
            "new index, or a shorter system prompt"
        )


def content(document: Document) -> str:
    """Digest of all of a document that an index keeps."""
    known = [json.dumps(document.parts)] if document.parts else []
    return digest(document.title, document.text, *known)


def groups(texts: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Sources in groups, each with chunks enough for a few batches."""
    group: list[str] = []
    size = 0
    for source, chunks in texts.items():
        group.append(source)
        size += len(chunks)
        if size >= _GROUP_CHUNKS:
            yield group
            group, size = [], 0
    if group:
        yield group
