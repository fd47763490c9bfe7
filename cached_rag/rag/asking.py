"""From a question to the stream of its answer: the nearest chunks, a prompt, the model.

A conversation's prompts only grow: each question's chunks stay in the turn that they were found
for. So a turn's prompt begins with the whole of the turn before, answer included, whose KV is kept
and serves as it is.
"""

from __future__ import annotations

import asyncio
import math
import re
import unicodedata
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cached_rag.backends.prompt_text import Rendered
from cached_rag.config import GenerationConfig
from cached_rag.engine.report import Clock, Report
from cached_rag.errors import ConfigError
from cached_rag.library.ledger import HALF_PAIR
from cached_rag.library.matching import ANCHOR
from cached_rag.rag.answer import Answer, AnswerStream, Dialogue, Lookup, Prompts, Turn, searched
from cached_rag.rag.chunks import Reranker, embedded
from cached_rag.rag.folder import IndexFolder, Reranking, Retrieval, contexts
from cached_rag.rag.search import Hit, worded

if TYPE_CHECKING:
    from cached_rag.engine.tools import Tools

# What is said instead of an answer from nothing.
NOTHING_FOUND = "Nothing about this was found in the documents."
# Below this similarity a chunk hardly concerns the question (sentence-transformers' models).
_FAR = 0.25
# A part number or the like, with letters of another script before and behind it, too.
_NAME = re.compile(r"\w[\w./:-]+\w", re.ASCII)
_REWRITE = (
    "Rewrite this question so that it can be understood without our conversation. Write only the "
    "question.\n\nQuestion: {}"
)
_MOST_REWRITTEN = 64


class Asking:
    """What questions are answered with, after what other processes may have changed."""

    def __init__(self, folder: IndexFolder, reranking: Reranking) -> None:
        """Load the models, if need be; `reranking` has a reranker that is no name."""
        agree(folder)
        self._folder, self._reranking = folder, reranking
        self.index, self.engine = folder.index, folder.engine
        self.prompts = Prompts(self.engine, folder.settings["system"])
        self.embedder = folder.embedder  # before the time of a question is taken

    def look_up(self, text: str, wanted: Retrieval, clock: Clock) -> Lookup:
        """The chunks for a text; their KV begins to come from the disk."""
        hits, notes = find(self._folder, text, wanted, self._reranking)
        texts = [hit.text for hit in hits]
        self._introduce(texts)
        # Not by the engine's `prefetch`, which expects them in whichever prompt comes next: they
        # will be in this one, as they are, or do not fit.
        self.engine.library.prefetch(texts)
        return Lookup(hits, notes, text, clock.total(), clock)

    def answer(
        self,
        question: str,
        said: Sequence[Turn],
        wanted: Retrieval,
        config: GenerationConfig,
    ) -> AnswerStream:
        """Begin to answer; see `CachedRAG.ask`.

        Args:
            said: what was said before.
        """
        check_question(question)
        clock = Clock()
        # 1) The nearest chunks.
        lookup = self.look_up(searched(question, said), wanted, clock)
        if not (lookup.hits or wanted.answer_anyway):
            return self.decline(question, lookup, config)
        # 2) A prompt with as many of them as fit.
        least = config.max_tokens
        hits, rendered = self.prompts.fitting(question, lookup.hits, least, said)
        if wanted.reorder:
            hits = [hits[place] for place in self.engine.order([hit.text for hit in hits])]
            hits, rendered = self.prompts.fitting(question, hits, least, said)
        # 3) The answer, token by token, while it is taken.
        return self.begin(question, rendered, hits, lookup, config)

    def begin(
        self,
        question: str,
        prompt: Rendered,
        hits: Sequence[Hit],
        lookup: Lookup,
        config: GenerationConfig,
    ) -> AnswerStream:
        """Begin to answer a prompt.

        Args:
            hits: the chunks that are in the prompt.
        """
        config = config.replace(stop=(*config.stop, *self.prompts.stop))
        tools = self.form(parts_thoughts=config.grammar is None)
        stream = self.engine.stream(prompt, tools.settings(config), clock=lookup.clock)
        return AnswerStream(stream, question, tuple(hits), lookup, tools.growing())

    def decline(self, question: str, lookup: Lookup, config: GenerationConfig) -> AnswerStream:
        """Say that nothing was found, without asking the model.

        Raises:
            ConfigError: the answer has to have a form, which cannot say so.
        """
        from cached_rag.engine.stream import ToldStream

        if config.grammar is not None:
            raise ConfigError(
                "nothing about this was found in the documents, and an answer of the form that "
                "was asked for cannot say so; lower min_score, or set answer_anyway=True"
            )
        spent = lookup.clock.total()
        report = Report("none", charged_recompute=0.0, ttft_ms=spent, total_ms=spent)
        told = ToldStream(NOTHING_FOUND, report)
        form = self.form(parts_thoughts=False)
        return AnswerStream(told, question, (), lookup, form.growing())

    def form(self, *, parts_thoughts: bool) -> Tools:
        """The form of an answer, without tools; imported late, as that takes long."""
        from cached_rag.engine.tools import Tools

        return Tools(self.engine.tokenization, parts_thoughts=parts_thoughts)

    def _introduce(self, texts: Sequence[str]) -> None:
        """Make chunks known to the engine that were encoded in another dtype, or not yet.

        Then they count as missed, and are encoded in the background.
        """
        library = self.engine.library
        library.refresh()
        # Shorter texts are never known.
        long = [text for text in map(str.strip, texts) if len(text) >= ANCHOR]
        is_known = all(library.table.get(text) is not None for text in long)
        if is_known and library.encoded_after():
            return
        self.engine.register(texts)
        with library.shelf.spared():
            gone = self.index.orphans(texts)  # deleted since they were found
            self._folder.forget_later(gone)
            self.engine.encode([], self.prompts.head(), context=contexts(self._folder.settings))


def agree(folder: IndexFolder) -> None:
    """Take over an index's settings before a model is loaded to ask it.

    Raises:
        ConfigError: the index is empty.
    """
    if not folder.agree():
        raise ConfigError("the index is empty; ingest documents first")


def find(
    folder: IndexFolder, text: str, wanted: Retrieval, reranking: Reranking
) -> tuple[list[Hit], list[str]]:
    """The chunks nearest to a text, best first, and what to tell the user about them.

    Args:
        reranking: has a reranker that is no name.

    Raises:
        ConfigError: an empty text, a text of half characters, a filter by what no chunk has, or a
            reranker that does not give a score for each text.
    """
    check_question(text)
    reranker, index = reranking.reranker, folder.index
    reach = max(wanted.k, reranking.candidates) if reranker else wanted.k
    (vector,) = embedded(folder.embedder, [text])
    asked: dict[str, Any] = {"text": text, "by": folder.settings["search"]}
    least = -math.inf if wanted.min_score is None else wanted.min_score
    hits = index.search(vector, reach, wanted.where, least=least, **asked)
    near = hits
    if not hits and index.search(vector, 1, wanted.where, **asked):
        near = index.search(vector, 1, wanted.where)  # by which no score is higher
    if reranker and hits:
        assert not isinstance(reranker, str)
        hits = _reranked(reranker, text, hits)
    return hits[: wanted.k], [*_remarks(near, hits), *_unseen(text, hits[: wanted.k])]


def check_question(text: str) -> None:
    """Refuse what cannot be searched for.

    Raises:
        ConfigError: there is nothing but white space, or half a character.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("a question needs some text")
    if half := HALF_PAIR.search(text):
        raise ConfigError(
            f"a question has half of a surrogate pair at character {half.start()}, which is no "
            "character; leave it out, or decode the text it comes from as a whole"
        )


def _reranked(reranker: Reranker, text: str, hits: Sequence[Hit]) -> list[Hit]:
    given = reranker(text, [hit.text for hit in hits])
    try:
        scores = [float(score) for score in given]
    except (TypeError, ValueError):
        scores = []
    if len(scores) != len(hits) or any(map(math.isnan, scores)):
        raise ConfigError(
            f"a reranker gives a number for each text, and this one gave {given!r:.100} for "
            f"{len(hits)} texts"
        )
    ranked = sorted(zip(scores, hits, strict=True), key=lambda one: -one[0])
    return [hit for _, hit in ranked]


def _remarks(near: Sequence[Hit], hits: Sequence[Hit]) -> list[str]:
    """What to tell the user about the chunks that are near, and those of them that are taken."""
    if not near:
        return ["no chunk fits the filter, or has a word of the question, so none was used"]
    best = max(hit.score for hit in near)
    if not hits:
        return [f"no chunk reaches min_score (the nearest has {best:.2f}), so none was used"]
    if best < _FAR:
        return [
            f"the nearest chunk is hardly about this (score {best:.2f}); the answer may be made up"
        ]
    return []


def _unseen(text: str, hits: Sequence[Hit]) -> list[str]:
    """What to tell the user about part numbers and the like that no chunk has."""
    words = dict.fromkeys(_NAME.findall(unicodedata.normalize("NFKC", text)))
    named = [word for word in words if any(map(str.isdigit, word))]
    found = " ".join(worded("\n".join(hit.text for hit in hits))) if named else ""
    unseen = [word for word in named if " ".join(worded(word)) not in found]
    if not hits or not unseen:
        return []
    return [
        f"no chunk that was found has {', '.join(map(repr, unseen[:3]))}; if a document has it, "
        'ask for more chunks (k), or search by words (search="words")'
    ]


class Chat:
    """A conversation; `CachedRAG.chat` begins one. Not for several threads at the same time.

    Where it outgrows the model's context, its older half is forgotten, and `report.notes` of the
    next answer says so. Chunks of documents that are deleted leave it, too. A question that fails
    leaves it as it was.

    Example:
        chat = rag.chat()
        print(chat.ask("How is the valve reset?"))
        for piece in chat.stream("And how often?"):
            print(piece, end="")
    """

    def __init__(
        self,
        asking: Callable[[], Asking],
        wanted: Retrieval,
        config: GenerationConfig,
        *,
        condense: bool,
        said: Dialogue,
    ) -> None:
        """See `CachedRAG.chat`; `said` is what was said before."""
        self._asking, self._wanted, self._config = asking, wanted, config
        self._condense = condense
        self._said = said
        self._open: Callable[[], AnswerStream | None] = lambda: None

    @property
    def history(self) -> tuple[Answer, ...]:
        """The answers that are not forgotten, in order; each as far as it was taken.

        An answer belongs to it once it ends, is closed, or the next question is asked.
        """
        return tuple(answer for answer, _ in self._said.exchanges)

    @property
    def messages(self) -> list[Turn]:
        """What is not forgotten as messages, which JSON can keep and `CachedRAG.chat` goes on with.

        Those of the user have the texts of their "chunks", so that prompts begin as they did.
        """
        return self._said.turns

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer the next question.

        Args:
            options: settings of `GenerationConfig`, in place of the conversation's.

        Raises:
            ConfigError: an empty index or question, or a bad setting.
            ContextOverflowError: the question alone does not fit the model's context.
        """
        return self.stream(question, **options).result()

    def stream(self, question: str, **options: Any) -> AnswerStream:
        """As `ask`, piece by piece. If the answer before it is not whole yet, it ends here."""
        check_question(question)
        config = self._config.replace(**options)
        asking = self._asking()
        if (last := self._open()) is not None:
            last.close()
        clock = Clock()
        said = self._said.without(asking.index.orphans(self._said.texts))
        text = self._searched(asking, question, said, config)
        found = asking.look_up(text, self._wanted, clock)
        kept = _fitting(asking.prompts, question, found.hits, said, config.max_tokens)
        new = _new(found.hits, kept)
        new, prompt = asking.prompts.fitting(question, new, config.max_tokens, kept.turns)
        here = {*kept.texts, *(hit.text for hit in new)}
        hits = [hit for hit in found.hits if hit.text in here]
        if gone := len(said.exchanges) - len(kept.exchanges):
            note = f"the conversation's first {gone} turns no longer fit, and were forgotten"
            found = replace(found, notes=[*found.notes, note])
        if here or self._wanted.answer_anyway:
            stream = asking.begin(question, prompt, hits, found, config)
        else:
            stream = asking.decline(question, found, config)
        texts = tuple(hit.text for hit in new)

        def ended(answer: Answer) -> None:
            self._said = kept.and_then(answer, texts)

        stream.when_ended(ended)
        self._open = weakref.ref(stream)
        return stream

    async def astream(self, question: str, **options: Any) -> AnswerStream:
        """As `stream`, for an asynchronous loop; the search runs in a thread of its own."""
        return await asyncio.to_thread(self.stream, question, **options)

    def _searched(
        self, asking: Asking, question: str, said: Dialogue, config: GenerationConfig
    ) -> str:
        """What to search for: the question as it would be asked alone, and the last ones.

        The model is asked to rewrite it behind the conversation, whose KV it has.
        """
        turns = said.turns
        plain = searched(question, turns)
        if not turns or not self._condense:
            return plain
        prompts = asking.prompts
        messages = prompts.messages(question, (), turns)
        messages[-1] = {"role": "user", "content": _REWRITE.format(question.strip())}
        prompt = prompts.rendered(messages)
        if not prompts.has_room(prompt, _MOST_REWRITTEN):
            return plain
        form = asking.form(parts_thoughts=True)
        brief = GenerationConfig(
            method=config.method, max_tokens=_MOST_REWRITTEN, stop=("\n", *prompts.stop)
        )
        answer = asking.engine.generate(prompt, form.settings(brief))
        rewritten = form.read(answer.text)[0].strip()
        # What begins with a tag is a thought in a form that the template does not tell of.
        return plain if not rewritten or rewritten.startswith("<") else f"{rewritten}\n{plain}"


def _new(hits: Sequence[Hit], said: Dialogue) -> list[Hit]:
    """Those chunks that the conversation does not have yet."""
    given = set(said.texts)
    return [hit for hit in hits if hit.text not in given]


def _fitting(
    prompts: Prompts, question: str, hits: Sequence[Hit], said: Dialogue, max_tokens: int
) -> Dialogue:
    """What of the conversation leaves room for the question, and for as many chunks as fit alone.

    The older half goes as a whole: else every further prompt would have another beginning.
    """
    wanted, _ = prompts.fitting(question, hits, max_tokens)
    while said.exchanges:
        texts = [hit.text for hit in _new(wanted, said)]
        prompt = prompts.rendered(prompts.messages(question, texts, said.turns))
        if prompts.has_room(prompt, max_tokens):
            break
        said = Dialogue(said.exchanges[(len(said.exchanges) + 1) // 2 :])
    return said
