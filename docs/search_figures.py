"""Prints how often the right chunk is found, by each way to search.

    python docs/search_figures.py ../shared/data/dev/{lookup,nq_pool,xquad_en,hotpotqa}.jsonl

All chunks of a set are pooled. The right ones are the question's own that have an answer in them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from cached_rag.rag.chunks import Chunk, Embedder
from cached_rag.rag.folder import SEARCHES
from cached_rag.rag.index import DocumentIndex

_REACH = 10


def measure(path: Path, embedder: Embedder) -> None:
    """Print recall of the first 1, 5 and 10 chunks, and the mean reciprocal rank."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = list(dict.fromkeys(_text(chunk) for row in rows for chunk in row["chunks"]))
    right = {row["question"]: _right(row) for row in rows}
    asked = [question for question, chunks in right.items() if chunks]
    vectors = embedder.embed([*texts, *asked])
    with tempfile.TemporaryDirectory() as folder:
        index = DocumentIndex(Path(folder) / "documents.sqlite")
        chunks = [Chunk("set", "set", place, text) for place, text in enumerate(texts)]
        index.replace("set", "", chunks, vectors[: len(texts)])
        for by in SEARCHES:
            ranks = []
            for question, vector in zip(asked, vectors[len(texts) :], strict=True):
                hits = index.search(vector, _REACH, text=question, by=by)
                places = [n for n, hit in enumerate(hits, 1) if hit.text in right[question]]
                ranks.append(places[0] if places else 0)
            recall = [sum(0 < rank <= k for rank in ranks) / len(ranks) for k in (1, 5, 10)]
            mean = sum(1 / rank for rank in ranks if rank) / len(ranks)
            cells = " | ".join(f"{value:.2f}" for value in (*recall, mean))
            print(f"| {path.stem} ({len(asked)} in {len(texts)}) | {by} | {cells} |", flush=True)
        index.close()


def _right(row: dict[str, object]) -> set[str]:
    answers = [str(answer).casefold() for answer in row["answers"]]  # type: ignore[attr-defined]
    found = [_text(chunk) for chunk in row["chunks"]]  # type: ignore[attr-defined]
    return {text for text in found if any(answer in text.casefold() for answer in answers)}


def _text(chunk: dict[str, str]) -> str:
    """As ingestion has it: behind the title."""
    return f"{chunk['title']}\n\n{chunk['text']}".strip()


if __name__ == "__main__":
    print("| set | search | recall@1 | @5 | @10 | MRR |\n|---|---|---|---|---|---|")
    for name in sys.argv[1:]:
        measure(Path(name), Embedder())
