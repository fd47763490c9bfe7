"""An index behind the server: questions are answered from its documents, and texts embedded.

Knows an index and JSON; knows no socket.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_rag.backends.prompt_text import Message, Rendered
from cached_rag.config import GenerationConfig
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.server.forms import Json
from cached_rag.server.protocol import EmbeddingsRequest

if TYPE_CHECKING:  # their packages are another extra's
    import numpy as np
    from numpy.typing import NDArray

    from cached_rag.rag.answer import AnswerStream
    from cached_rag.rag.rag import CachedRAG
    from cached_rag.rag.search import Hit

PREFIX = "index:"
# Texts that are embedded at once: answers are made in between, by the same thread.
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
        # A thread of their own, or texts that wait to be embedded would hold those that begin
        # answers; and only one, as they are embedded one part after the other.
        self._thread = ThreadPoolExecutor(1, "embed")

    def streams(
        self,
        messages: Sequence[Message],
        configs: Sequence[GenerationConfig],
        wanted: Mapping[str, Any],
        *,
        may_be_shorter: bool,
    ) -> list[AnswerStream]:
        """Answer the last message from the documents; those before it are the conversation.

        System messages are left out: the index has its own, which its chunks were encoded behind.

        Args:
            configs: settings of each answer.
            wanted: which chunks, as settings of `Retrieval` by name.
            may_be_shorter: where the conversation leaves too little room, answers have as much as
                the context leaves behind a prompt with one chunk, the least that is asked with.

        Raises:
            ConfigError: the last message is no user's; or see `CachedRAG.stream`.
            ContextOverflowError: the conversation alone does not fit the model's context.
        """
        question, history = self._asked(messages)
        ask = partial(self._rag.stream, question, history=history)
        try:
            return [ask(config=config, **wanted) for config in configs]
        except ContextOverflowError:
            if not may_be_shorter:
                raise
        least = ask(config=configs[0].replace(max_tokens=1), **{**wanted, "k": 1})
        prompt = self._prompt(question, [hit.text for hit in least.sources], history)
        engine = self._rag.engine
        room = engine.model.context_length - engine.count_tokens(prompt)
        shorter = [one.replace(max_tokens=min(one.max_tokens, room)) for one in configs]
        return [ask(config=config, **wanted) for config in shorter]

    def _asked(self, messages: Sequence[Message]) -> tuple[str, list[Message]]:
        """The question, and what was said before it.

        Raises:
            ConfigError: the last message is no user's.
            ContextOverflowError: they are much too long. So they are neither embedded nor
                tokenised as a whole, which takes time for each character.
        """
        said = [message for message in messages if message["role"] != "system"]
        if not said or said[-1]["role"] != "user":
            raise ConfigError(f"{self.name} answers the user's last message, and there is none")
        question, history = str(said[-1]["content"]), said[:-1]
        engine, prompt = self._rag.engine, self._prompt(question, [], history)
        context = engine.model.context_length
        if (least := engine.tokenization.least_tokens(prompt.text, context)) is not None:
            raise ContextOverflowError(
                f"the question and what was said before it have {least} tokens at least and "
                f"exceed the model's context of {context}; ask a shorter question, or give less "
                "history"
            )
        return question, history

    def _prompt(self, question: str, texts: Sequence[str], history: Sequence[Message]) -> Rendered:
        """What the model is asked, with these chunks."""
        # An index is open, so its packages are here.
        from cached_rag.rag.answer import Prompts, conversation

        prompts = Prompts(self._rag.engine, self._rag.settings["system"])
        return prompts.rendered(prompts.messages(question, texts, conversation(history)))

    async def embed(self, request: EmbeddingsRequest) -> Json:
        """OpenAI's embeddings. A task that is cancelled embeds no more than the part under way.

        Ours is `truncated`: the numbers of the texts of which only the beginning was read.

        Raises:
            ConfigError: other `dimensions` than the model's.
            ContextOverflowError: such a text, where the request will not have it truncated.
        """
        texts = [request.input] if isinstance(request.input, str) else request.input
        as_text = request.encoding_format == "base64"
        run = asyncio.get_running_loop().run_in_executor
        vectors: list[str | list[float]] = []
        truncated: list[int] = []
        total = 0
        for at in range(0, len(texts), _AT_ONCE):
            part = texts[at : at + _AT_ONCE]
            counts, window = await run(self._thread, self._measured, part)
            total += sum(min(count, window) for count in counts)
            truncated += [at + n for n, count in enumerate(counts) if count > window]
            if truncated and request.truncate is False:
                raise ContextOverflowError(
                    f"input {truncated[0]}, counted from 0, is longer than the {window} tokens "
                    f"that {self.embedding} reads of a text; send shorter texts, or leave truncate "
                    "out to have its beginning embedded"
                )
            found = await run(self._thread, self._rag.embedder.embed, part)
            if request.dimensions not in (None, found.shape[1]):
                raise ConfigError(
                    f"{self.embedding} makes vectors of {found.shape[1]} dimensions, and no others "
                    f"(dimensions={request.dimensions}); leave dimensions out"
                )
            vectors += map(_spelled, found) if as_text else found.tolist()
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": total, "total_tokens": total}
        head = {"object": "list", "model": self.embedding, "truncated": truncated}
        return head | {"data": data, "usage": usage}

    def _measured(self, texts: Sequence[str]) -> tuple[list[int], int]:
        """Each text's tokens, and how many of a text are read; none by models that do not tell."""
        embedder = self._rag.embedder
        count = getattr(embedder, "count_tokens", None)
        window = getattr(embedder, "window", None)
        return count(texts) if count else [], sys.maxsize if window is None else window


def _spelled(vector: NDArray[np.float32]) -> str:
    """As base64."""
    return base64.b64encode(vector.tobytes()).decode()


def sources(hits: Sequence[Hit]) -> list[Json]:
    """The chunks that an answer was given, best first."""
    return [asdict(hit) | {"score": round(float(hit.score), 4)} for hit in hits]


def public_name(name: str) -> str:
    """A model's name without the folders above it, if it is a path."""
    path = Path(os.path.expanduser(name))
    return path.resolve().name if path.exists() else name
