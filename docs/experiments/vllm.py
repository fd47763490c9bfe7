"""vLLM alone beside vLLM behind a prefill node, on chunks in new orders.

Both are asked over HTTP, and take turns at prompts that have their head in common, and most of
their chunks at other places. Of the node's times, its prefill and the hand-over are part; only the
way from a client to the node, which is in this process, is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vllm_cached_rag.node import Handed, PrefillNode

from cached_rag import CachedRAGError, Engine
from docs.experiments.answers import Question, Sample, bench_answers, make_questions
from docs.experiments.peers.vllm import Vllm


@dataclass
class HandedOver:
    """Prepares the request for a question as the node does, and notes the times."""

    node: PrefillNode
    done: list[Handed] = field(default_factory=list)

    def __call__(self, question: Question) -> dict[str, Any]:
        """The fields of the ticket."""
        handed = self.node.hand_over(question.prompt)
        if tuple(handed.token_ids) != question.ids:
            raise CachedRAGError("the node has other tokens than the question")
        self.done.append(handed)
        return handed.ticket.fields(handed.token_ids)


class Paused(Vllm):
    """Rests before each answer: vLLM's worker spins for a second after the one before.

    On cores that node and vLLM share, that slows the node down.
    """

    seconds = 0.0

    def answer(self, question: Question, max_tokens: int, *, may_end: bool = False) -> Sample:
        """See `Vllm`."""
        time.sleep(self.seconds)
        return super().answer(question, max_tokens, may_end=may_end)


def bench(
    engine: Engine,
    handoff: str,
    url: str,
    corpus: str,
    prompt_tokens: Sequence[int],
    methods: Sequence[str] = ("auto",),
    chunk_tokens: int = 512,
    new_tokens: int = 16,
    rounds: int = 3,
    pause: float = 2.0,
) -> list[dict[str, Any]]:
    """A row for each length and peer: medians over rounds, after one to warm up.

    Args:
        engine: of the model that the server at `url` has, with `handoff` in its connector.
        corpus: the text that chunks are cut from.
        methods: how the node uses chunks' KV; a peer each.
        pause: seconds before each answer.

    Raises:
        CachedRAGError: the server does not answer, or the corpus is too short.
    """
    sizes = {"chunk_tokens": chunk_tokens, "new_tokens": new_tokens, "rounds": rounds + 1}
    found = []
    for asked in make_questions(engine, corpus, prompt_tokens, **sizes):
        nodes = {name: HandedOver(PrefillNode(engine, handoff, name)) for name in methods}
        peers = {"vllm": Paused(url)} | {name: Paused(url, node) for name, node in nodes.items()}
        for peer in peers.values():
            peer.seconds = pause
        for row in bench_answers(peers, asked, new_tokens):
            done = nodes[row.peer].done[1:] if row.peer in nodes else []
            times = {
                "prefill_ms": round(median(one.prefill_ms for one in done)) if done else None,
                "handoff_ms": round(median(one.handoff_ms for one in done)) if done else None,
            }
            shown = {"ttft_ms": round(row.ttft_ms), "total_ms": round(row.total_ms)}
            found.append({"tokens": row.prompt_tokens, "peer": row.peer, **shown, **times})
        for node in nodes.values():
            for handed in node.done:
                node.node.forget(handed)
    return found
