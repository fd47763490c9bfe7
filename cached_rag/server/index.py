"""An index behind the server: questions are answered from its documents, and texts embedded.

Knows an index and JSON; knows no socket.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
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
        self.embedding = public_name(str(rag.settings["embedding"]))

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
        question, history = self._asked(messages)
        return self._rag.stream(question, history=history, where=where, config=config)

    def shortened(
        self,
        messages: Sequence[Message],
        config: GenerationConfig,
        where: Mapping[str, object] | None = None,
    ) -> GenerationConfig:
        """The settings of a shorter answer, where the conversation leaves too little room.

        It is what the context leaves behind a prompt with one chunk, the least that is asked with.

        Raises:
            ContextOverflowError: not even one token fits.
        """
        from cached_rag.rag.answer import conversation  # an index is open, so its packages are here
        from cached_rag.rag.prompts import Prompts

        question, history = self._asked(messages)
        least = config.replace(max_tokens=1)
        found = self._rag.stream(question, k=1, history=history, where=where, config=least)
        engine = self._rag.engine
        prompts = Prompts(engine, self._rag.settings["system"])
        texts = [hit.text for hit in found.sources]
        prompt = prompts.rendered(prompts.messages(question, texts, conversation(history)))
        room = engine.model.context_length - engine.count_tokens(prompt)
        return config.replace(max_tokens=min(config.max_tokens, room))

    def _asked(self, messages: Sequence[Message]) -> tuple[str, list[Message]]:
        """The question, and what was said before it."""
        said = [message for message in messages if message["role"] != "system"]
        if not said or said[-1]["role"] != "user":
            raise ConfigError(f"{self.name} answers the user's last message, and there is none")
        return str(said[-1]["content"]), said[:-1]

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


def public_name(name: str) -> str:
    """A model's name without the folders above it, if it is a path."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name
