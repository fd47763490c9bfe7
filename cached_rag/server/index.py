"""An index behind the server: questions are answered from its documents, and texts embedded.

Knows an index and JSON; knows no socket.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cached_rag.backends.tokenizer import Message
from cached_rag.config import GenerationConfig
from cached_rag.errors import ConfigError
from cached_rag.server.protocol import EmbeddingsRequest

if TYPE_CHECKING:  # their packages are another extra's
    from cached_rag.rag.answer import AnswerStream
    from cached_rag.rag.hit import Hit
    from cached_rag.rag.rag import CachedRAG

Json = dict[str, Any]
PREFIX = "index:"
_AT_ONCE = 8


class ServedIndex:
    """One index.

    Attributes:
        name: of the model that answers from it.
        embedding: name of its embedding model.
    """

    def __init__(self, rag: CachedRAG) -> None:
        self._rag = rag
        self.name = f"{PREFIX}{rag.path.resolve().name}"
        self.embedding = str(rag.settings["embedding"])

    def stream(
        self,
        messages: Sequence[Message],
        config: GenerationConfig,
        where: Mapping[str, object] | None = None,
    ) -> AnswerStream:
        """Answer the last message from the documents; those before it are the conversation.

        System messages are left out: the index has its own, which its chunks were encoded behind.

        Raises:
            ConfigError: the last message is no user's; or see `CachedRAG.stream`.
        """
        said = [message for message in messages if message["role"] != "system"]
        if not said or said[-1]["role"] != "user":
            raise ConfigError(f"{self.name} answers the user's last message, and there is none")
        return self._rag.stream(
            str(said[-1]["content"]), history=said[:-1], where=where, config=config
        )

    def embed(self, request: EmbeddingsRequest) -> Json:
        """OpenAI's embeddings."""
        texts = [request.input] if isinstance(request.input, str) else request.input
        embedder = self._rag.embedder
        # A few at a time: answers are made in between, by the same thread.
        parts = [texts[at : at + _AT_ONCE] for at in range(0, len(texts), _AT_ONCE)]
        vectors = [vector for part in parts for vector in embedder.embed(part)]
        as_text = request.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.tobytes()).decode()
                if as_text
                else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        # Its tokens are not counted: the embedding model's are not the language model's.
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return {"object": "list", "data": data, "model": self.embedding, "usage": usage}


def sources(hits: Sequence[Hit]) -> list[Json]:
    """The chunks that an answer was given, best first."""
    return [
        {
            "source": hit.source,
            "title": hit.title,
            "ordinal": hit.ordinal,
            "score": round(float(hit.score), 4),
            "metadata": dict(hit.metadata),
            "text": hit.text,
        }
        for hit in hits
    ]
