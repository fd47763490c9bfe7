"""Documents in, answers out: a folder's index joined with the engine.

How documents come in stands in `folder.py`. Says what happens in which order; each step is somebody
else's. Imports no framework.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_rag.backends.prompt_text import Message
from cached_rag.config import BatchConfig, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.errors import ConfigError, needs_extra
from cached_rag.options import parted
from cached_rag.rag.answer import Answer, AnswerStream, conversation
from cached_rag.rag.asking import Asking
from cached_rag.rag.chat import Chat, resumed
from cached_rag.rag.embedding import Embeddings
from cached_rag.rag.folder import IndexFolder
from cached_rag.rag.hit import Hit
from cached_rag.rag.limits import DocumentLimits
from cached_rag.rag.prompts import Prompts, searched
from cached_rag.rag.retrieval import find, loadable
from cached_rag.rag.roots import absolute, is_path
from cached_rag.rag.settings import IndexConfig, Reranking, Retrieval, as_kept

if TYPE_CHECKING:
    from cached_rag.engine.engine import Engine

# What `[rag]` brings, for the index, embeddings and readers.
_MODULES = (
    *("faiss", "sentence_transformers", "charset_normalizer", "docutils"),
    *("markdown_it", "pypdf"),
)


# What `CachedRAG.open` takes by name.
SETTINGS = (IndexConfig, Reranking, ModelConfig, StoreConfig, BatchConfig, DocumentLimits)
# What of a model is not the index's to remember, as it is the machine's or the application's.
_THE_MACHINES = ("device", "model_kwargs", "chat_template_kwargs")
_NOT_OF_AN_INDEX = ("path", "namespace", "primers", "first_exact")


class CachedRAG(IndexFolder):
    """A folder of documents that can be asked. Models load when first needed."""

    _reranking = Reranking()

    @classmethod
    @needs_extra("rag", "an index of documents", *_MODULES)
    def open(
        cls,
        path: str | Path,
        model: str | None = None,
        *,
        embedding: str | Embeddings | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> CachedRAG:
        """Open an index folder, or make one.

        An index keeps the settings that its first document was ingested with: its model, those of
        `IndexConfig`, and of `ModelConfig` backend, dtype, weights, revision and adapter; of the
        latter another one is taken and logged, as it has KV of its own. An index without documents
        has none: each `open` may choose anew.

        Args:
            model: alias, hub id, folder or GGUF file; None takes what the index has, or the
                default.
            embedding: a sentence-transformers name, or an object that embeds.
            engine: one that exists already, instead of loading `model`. It has settings of its own
                for model, store and batch, so none of those may be given.
            options: settings by name, of `IndexConfig` (such as `search` and `context`),
                `Reranking`, `ModelConfig`, `StoreConfig`, `BatchConfig` and `DocumentLimits`.

        Raises:
            IndexMismatchError: the index was made with other settings.
            ConfigError: a setting that is unknown, bad, or cannot apply.
            MissingPackageError: the packages of `[rag]` are not installed.
        """
        if embedding is not None:
            options["embedding"] = getattr(embedding, "name", embedding)
        index, ranking, how, store, batch, limits = parted(options, *SETTINGS)
        _check_that_apply(model, engine, [*_given(how | store | batch)], store)
        root = _folder(path)
        how, index = _given(how), _given(index)
        loading = vars(ModelConfig(**how))
        known = {**vars(IndexConfig(**index)), **loading}
        asked = {name: known[name] for name in [*index, *how] if name not in _THE_MACHINES}
        if engine or model:
            asked["model"] = engine.model.name if engine else model
        options = {name: loading[name] for name in _THE_MACHINES}
        options["batch"] = BatchConfig(**batch)
        rag = cls(
            root,
            as_kept(asked),
            StoreConfig(path=str(root / "kv"), **{"codec": "raw", **_given(store)}),
            options,
            None if isinstance(embedding, str) else embedding,
            engine,
            DocumentLimits(**limits),
        )
        rag._reranking = loadable(Reranking(**ranking), loading["device"])
        return rag

    def __enter__(self) -> CachedRAG:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Questions -------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        *,
        history: Sequence[Answer | Message] = (),
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question from the chunks nearest to it.

        Args:
            history: what was said before, in order: answers of this index, or messages of the user
                and the assistant. The model reads all of it; chunks are searched for with the last
                two questions and this one.
            config: how to answer; None for the defaults.
            options: settings by name, of `Retrieval` (`k`, `min_score`, `where`, `answer_anyway`,
                `reorder`) and of `GenerationConfig`, in place of those in `config`.

        Raises:
            ConfigError: an empty index, an empty question, or a bad setting or history.
            ContextOverflowError: question and history alone do not fit the model's context.
        """
        stream = self.stream(question, history=history, config=config, **options)
        for _ in stream:
            pass
        return stream.answer

    def ask_many(self, questions: Sequence[str], **options: Any) -> list[Answer]:
        """Answer several questions together, in one batch; each answer is the one of `ask`.

        Args:
            options: those of `ask`, for all of them.

        Raises:
            ConfigError: `questions` is a single string.
            As `ask`, for the first question that fails. The others are then stopped.
        """
        if isinstance(questions, str):
            raise ConfigError("questions are several; give a single one as a list, [question]")
        streams: list[AnswerStream] = []
        try:
            streams.extend(self.stream(question, **options) for question in questions)
            for stream in streams:
                stream.stream.start()
            for stream in streams:
                for _ in stream:
                    pass
            return [stream.answer for stream in streams]
        finally:
            for stream in streams:
                stream.stream.cancel()

    def stream(
        self,
        question: str,
        *,
        history: Sequence[Answer | Message] = (),
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> AnswerStream:
        """As `ask`, piece by piece."""
        wanted, config = _asked(options, config)
        return self._asking().answer(question, conversation(history), wanted, config)

    def chat(
        self,
        *,
        condense: bool = True,
        history: Sequence[Answer | Message] = (),
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Chat:
        """Begin a conversation. Its turns answer faster than `ask` with a history does.

        Each question's chunks stay where they were found, and those the conversation has already
        are not given again: so each prompt begins with the whole one before it, whose KV is kept.

        Args:
            condense: let the model rewrite a follow-up question for the search; else it is searched
                with the last two questions before it.
            history: a conversation to go on with: its `Chat.messages` or `Chat.history`, or other
                questions and answers in turn.
            config, options: see `ask`. Chunks that the conversation has already are enough to
                answer from; they are not reordered.

        Raises:
            ConfigError: a bad setting or history.
        """
        wanted, config = _asked(options, config)
        if wanted.reorder:
            raise ConfigError("a conversation keeps the order of its chunks; leave reorder out")
        return Chat(self._asking, wanted, config, condense=condense, said=resumed(history))

    @property
    def _prompts(self) -> Prompts:
        return Prompts(self.engine, self.settings["system"])

    def _asking(self) -> Asking:
        """What questions are answered with, after what other processes may have changed."""
        self._agree()
        return Asking(
            self.index,
            self.engine,
            self.embedder,
            self._prompts,
            self._contexts,
            self._forget_later,
            self._reranking,
            self.settings["search"],
        )

    async def aask(self, question: str, **options: Any) -> Answer:
        """As `ask`, without blocking the event loop; a cancelled task stops the generation."""
        stream = await self.astream(question, **options)
        await stream.atext()
        return stream.answer

    async def astream(self, question: str, **options: Any) -> AnswerStream:
        """As `stream`, for an asynchronous loop; the search runs in a thread of its own.

        Example:
            async for piece in await rag.astream("How is the valve reset?"):
                print(piece, end="")
        """
        return await asyncio.to_thread(self.stream, question, **options)

    def search(
        self, question: str, k: int = 6, *, history: Sequence[Answer | Message] = (), **options: Any
    ) -> list[Hit]:
        """The k chunks nearest to a question, best first.

        Args:
            history: see `ask`.
            options: settings of `Retrieval` by name: `min_score`, `where`.

        Raises:
            ConfigError: an empty index or question, or a bad k, min_score, history or filter.
        """
        self._agree()
        text = searched(question, conversation(history))
        wanted = Retrieval(k, **parted(options, Retrieval)[0])
        by = self.settings["search"]
        return list(find(self.index, self.embedder, text, wanted, self._reranking, by).hits)


def _asked(
    options: dict[str, Any], config: GenerationConfig | None
) -> tuple[Retrieval, GenerationConfig]:
    """What is asked for by name: which chunks, and how to answer."""
    chunks, answer = parted(options, Retrieval, GenerationConfig)
    return Retrieval(**chunks), (config or GenerationConfig()).replace(**answer)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options less those that are None, for which an index has what it has."""
    return {name: value for name, value in options.items() if value is not None}


def _folder(path: str | Path) -> Path:
    if not is_path(Path(path).expanduser()):
        raise ConfigError(f"{str(path)!r} cannot be the name of an index; give another one")
    root = absolute(path)  # the process may change its folder, and the index stays
    if os.path.isfile(root):  # unlike `is_file`, also of a name that is too long
        raise ConfigError(f"{root} is a file, and an index is a folder; give another path")
    return root


def _check_that_apply(
    model: str | None, engine: Engine | None, loading: Sequence[str], store: Mapping[str, Any]
) -> None:
    """Refuse settings that would mean nothing.

    Args:
        loading: names of those that an engine is loaded with.
    """
    if own := [name for name in _NOT_OF_AN_INDEX if name in store]:
        raise ConfigError(
            f"{', '.join(own)}: an index keeps its KV in its own folder, for itself, and `context` "
            "says what chunks are encoded behind; leave it out"
        )
    if engine is None:
        return
    other = ["model"] if model not in (None, engine.model.name) else []
    if given := [*other, *loading]:
        raise ConfigError(
            f"{', '.join(given)}: the engine that was given is loaded, and has a store of its own; "
            "give these to Engine.load, or leave engine= out"
        )
