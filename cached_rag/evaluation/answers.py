"""Whole answers over retrieved chunks: this library beside the programs that people run today.

All are given the same token ids. In a round all answer the same prompt, and no prompt comes twice,
so what a peer has kept of earlier ones serves it as it does in RAG: all prompts have a common head,
and chunks come back at other places. This library has encoded the chunks beforehand, which is not
timed. Knows peers as `peers.py` describes them, and no model but the engine's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cached_rag.engine.engine import Engine
from cached_rag.engine.report import Report
from cached_rag.errors import ConfigError
from cached_rag.evaluation.loop import take_turns
from cached_rag.evaluation.peers import Peer, Question, Sample
from cached_rag.rag.answer import Prompts

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
