"""Whole answers over retrieved chunks: each method of this library beside transformers' own.

All are given the same token ids. In a round all answer the same prompt, and no prompt comes twice,
so what a peer has kept of earlier ones serves it as it does in RAG: all prompts have a common head,
and chunks come back at other places. This library has encoded the chunks beforehand, which is not
timed. Knows no model but the engine's.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.transformers.packing import densify
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError
from cached_rag.evaluation.timing import take_turns
from cached_rag.rag.answer import Prompts


@dataclass(frozen=True)
class Question:
    """A prompt, the same one for all peers.

    Attributes:
        prompt: as text, in which this library finds its chunks.
        ids: its tokens, which all others are given.
    """

    prompt: Rendered
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
        ttft_ms, total_ms: milliseconds from asking to the first token, and to the last.
        token_ids: the answer's tokens.
        gaps_ms: milliseconds between its pieces, as they came; empty if they came as one.
    """

    ttft_ms: float
    total_ms: float
    token_ids: tuple[int, ...]
    gaps_ms: tuple[float, ...] = ()

    @property
    def token_ms(self) -> float:
        """Milliseconds of one token after the first; 0 if there is none."""
        return (self.total_ms - self.ttft_ms) / max(1, len(self.token_ids) - 1)


class Peer(ABC):
    """A program, or a way of this library, that answers prompts one after another.

    Attributes:
        about: what it is: version, weights, settings.
        plain: name of the peer that does the same without what this one learns; empty for none.
    """

    about: str
    plain: str = ""

    @abstractmethod
    def answer(self, question: Question, max_tokens: int) -> Sample:
        """Answer greedily with exactly so many tokens, and go on where the model would end."""

    def learn(self, texts: Sequence[str], head: Rendered) -> None:
        """Read what prompts will have behind their head, if it can before they come."""
        return

    def settle(self) -> None:
        """Finish what an answer left for later, so that it does not disturb the next peer."""
        return

    def close(self) -> None:
        """Free its memory. It is not asked again."""
        return


class Stopwatch:
    """Times one answer; it is started when it is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._came_ms: list[float] = []
        self._token_ids: list[int] = []

    def add(self, *token_ids: int) -> None:
        """Take note of tokens, in the moment when they are there."""
        if token_ids:
            self._came_ms.append(self._passed_ms())
        self._token_ids += token_ids

    def sample(self) -> Sample:
        """The answer, in the moment when it is complete."""
        passed, came = self._passed_ms(), self._came_ms
        gaps = tuple(later - earlier for earlier, later in pairwise(came))
        return Sample(came[0] if came else passed, passed, tuple(self._token_ids), gaps)

    def _passed_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000


class Own(Peer):
    """A method of this library."""

    def __init__(self, engine: Engine, method: str) -> None:
        """Name the method.

        Raises:
            ConfigError: there is no such method.
        """
        GenerationConfig(method=method)
        self.engine, self.method = engine, method
        self.about = f"Cached RAG, method {method}, {engine.model.name}, no drafts"

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`.

        Raises:
            ModelError: the engine read the prompt as other tokens than the other peers have.
        """
        config = GenerationConfig(
            method=self.method,
            max_tokens=max_tokens,
            ignore_eos=True,
            repetition_penalty=1.0,
            drafts=False,
        )
        answer = self.engine.generate(question.prompt, config)
        report = answer.report
        if report.prompt_tokens != len(question.ids):
            raise ModelError(
                f"{self.method} read {report.prompt_tokens} tokens where the others are given "
                f"{len(question.ids)}, so their times cannot be compared; a chunk of the texts "
                "spells a control token: take other texts"
            )
        return Sample(report.ttft_ms, report.total_ms, tuple(answer.token_ids))

    def settle(self) -> None:
        """Encode now what the prompt missed."""
        if self.engine.write_back is not None:
            self.engine.write_back.drain()


def load_again(engine: Engine) -> Any:
    """The engine's weights once more, in the same dtype and on the same device.

    Raises:
        ModelNotFoundError: the engine's model was not loaded from files.
    """
    shapes, folder = engine.model.shapes, engine.model.tokenizer.name_or_path
    if not folder:
        raise ModelNotFoundError(
            f"{engine.model.name} is in memory only, so transformers cannot load it again; "
            "save it to a folder and load it from there"
        )

    def load() -> Any:
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=shapes.dtype)
        except (OSError, ValueError) as error:  # such as a GGUF that llama.cpp runs
            raise ModelNotFoundError(
                f"transformers finds no weights in {folder}: {error}"
            ) from error
        densify(model, shapes.dtype)  # a GGUF's few bits are this library's affair
        model.generation_config = transformers.GenerationConfig()  # greedy, no penalty, no end
        return model.eval().to(shapes.device)

    # In the thread where the engine computes: a second one slows both down.
    return on_model_thread(load)


class Transformers(Peer):
    """`generate` on a copy of the engine's model."""

    def __init__(self, engine: Engine) -> None:
        """Load the copy.

        Raises:
            ModelNotFoundError: the engine's model was not loaded from files.
        """
        self._model = load_again(engine)
        self._device = engine.model.shapes.device
        kernel, dtype = self._model.config._attn_implementation, engine.model.shapes.dtype
        self.about = f"transformers {transformers.__version__}, generate, {dtype}, {kernel}"

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`."""
        return on_model_thread(partial(self._answer, question, max_tokens))

    def _answer(self, question: Question, max_tokens: int, **how: Any) -> Sample:
        streamer = _Streamer()
        ids = torch.tensor([question.ids], device=self._device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            streamer=streamer,
            **how,
        )
        return streamer.watch.sample()

    def close(self) -> None:
        """See `Peer`."""
        self._model = None


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Is given the prompt first, then each token as soon as it is there."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.watch.add(*value.tolist())
        self._has_prompt = True

    def end(self) -> None:
        pass


_SYSTEM = "Answer the question in detail, with the help of the documents."
_QUESTION = "What does document number {} say?"
_JOIN = 4  # tokens between two chunks, and what a word at their ends has more where it is cut
_YARDSTICK = "transformers"


@dataclass(frozen=True)
class AnswerRow:
    """One peer on prompts of one length; medians over rounds.

    Attributes:
        prompt_tokens: of the longest prompt.
        ttft_ms: milliseconds to the first token.
        token_ms: milliseconds of each later token.
        total_ms: milliseconds to the last token.
        speedup: transformers' `total_ms` over this one, or the first peer's without transformers.
        spread: the slowest round's total less the fastest one's, over `total_ms`.
        agreement: how many of an answer's first tokens are the same as the yardstick's, up to the
            first that is not, as a share of the answer; mean over rounds.
    """

    prompt_tokens: int
    peer: str
    ttft_ms: float
    token_ms: float
    total_ms: float
    speedup: float
    spread: float
    agreement: float


def make_questions(
    engine: Engine,
    corpus: str,
    prompt_tokens: Sequence[int] = (1024, 4096, 8000),
    *,
    chunk_tokens: int = 512,
    new_tokens: int = 64,
    rounds: int = 4,
) -> list[list[Question]]:
    """Cut chunks from a text, encode them, and ask about them.

    Each round leaves out the chunk that stood first, and has a new one at the end. So no two
    prompts have more in common than their head, and most chunks come again at another position.

    Args:
        prompt_tokens: the lengths; prompts are a few tokens shorter.
        chunk_tokens: about how long chunks are. They are made to fill the prompt.
        new_tokens: of an answer, which must fit the model's context with the prompt.
        rounds: prompts of each length.

    Returns:
        For each length its prompts.

    Raises:
        ConfigError: a count below 1, prompts that do not fit, or a corpus that is too short.
    """
    if not prompt_tokens or min(*prompt_tokens, chunk_tokens, new_tokens, rounds) < 1:
        raise ConfigError(
            "there must be a prompt length and a round at least, and a token in each prompt, chunk "
            "and answer"
        )
    context = engine.model.context_length
    if max(prompt_tokens) + new_tokens > context:
        raise ConfigError(
            f"prompts of {max(prompt_tokens)} tokens and answers of {new_tokens} do not fit the "
            f"model's context of {context}"
        )
    asked = Prompts(engine, _SYSTEM)
    pieces = _Pieces(engine, corpus)
    found = []
    for length in prompt_tokens:
        count = max(1, round(length / chunk_tokens))
        room = length - len(_question(engine, asked, [], count).ids)
        texts = [pieces.take(room // count - _JOIN) for _ in range(count + rounds - 1)]
        engine.encode(texts, asked.head())
        found.append(
            [
                _question(engine, asked, texts[number : number + count], number % count + 1)
                for number in range(rounds)
            ]
        )
    return found


def joined(folder: Path) -> str:
    """All texts of a folder as one, in the order of their names.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder of texts at {folder}")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return "\n\n".join(path.read_text(errors="replace") for path in paths)


class _Pieces:
    """A text that is used up from its beginning."""

    def __init__(self, engine: Engine, corpus: str) -> None:
        self._corpus, self._at = corpus, 0
        self._tokens = engine.tokenization.literal(corpus)

    def take(self, tokens: int) -> str:
        """The next tokens, as text."""
        begin, self._at = self._at, self._at + tokens
        if tokens < 1 or self._at > len(self._tokens):
            raise ConfigError(
                f"a chunk of {tokens} tokens cannot be cut from the {len(self._tokens)} tokens of "
                f"these texts, of which {begin} are used already; give longer texts, fewer rounds, "
                "or longer prompts of fewer chunks"
            )
        starts, ends = self._tokens.starts, self._tokens.ends
        return self._corpus[starts[begin] : ends[self._at - 1]].strip()


def _question(engine: Engine, asked: Prompts, texts: Sequence[str], number: int) -> Question:
    prompt = asked.rendered(asked.messages(_QUESTION.format(number), texts))
    tokens, _ = engine.plan(prompt, "auto", Report("auto"))
    return Question(prompt, tuple(tokens.ids))


def bench_answers(
    peers: Mapping[str, Peer], questions: Sequence[Question], new_tokens: int = 64
) -> list[AnswerRow]:
    """Let peers take turns at answering; the first question is to warm up.

    Raises:
        ConfigError: there is no peer, or not one question after the first.
    """
    variants = {
        name: partial(_next_answer, peer, iter(questions), new_tokens)
        for name, peer in peers.items()
    }
    found = take_turns(variants, len(questions) - 1)
    yardstick = found.get(_YARDSTICK) or next(iter(found.values()))
    longest = max(len(question.ids) for question in questions)
    return [_row(longest, name, samples, yardstick) for name, samples in found.items()]


def _next_answer(peer: Peer, questions: Iterator[Question], new_tokens: int) -> Sample:
    sample = peer.answer(next(questions), new_tokens)
    peer.settle()
    return sample


def _row(
    prompt_tokens: int, name: str, samples: Sequence[Sample], yardstick: Sequence[Sample]
) -> AnswerRow:
    totals = [sample.total_ms for sample in samples]
    total = statistics.median(totals)
    shares = [agreement(*pair) for pair in zip(samples, yardstick, strict=True)]
    return AnswerRow(
        prompt_tokens=prompt_tokens,
        peer=name,
        ttft_ms=statistics.median(sample.ttft_ms for sample in samples),
        token_ms=statistics.median(sample.token_ms for sample in samples),
        total_ms=total,
        speedup=statistics.median(sample.total_ms for sample in yardstick) / total,
        spread=(max(totals) - min(totals)) / total,
        agreement=statistics.fmean(shares),
    )


def agreement(sample: Sample, yardstick: Sample) -> float:
    """The share of an answer that is the yardstick's, up to the first other token."""
    pairs = zip(sample.token_ids, yardstick.token_ids, strict=False)  # some end sooner
    same = [mine == its for mine, its in pairs]
    return (same.index(False) if False in same else len(same)) / len(yardstick.token_ids)
