"""Makes question sets of LongBench's texts, with which Prompt Cache was measured (section 5).

    git clone https://github.com/MilkThink-Lab/MiniLongBench && cd MiniLongBench/pred_data/example
    python docs/longbench.py MiniLongBench_2wikimqa.json > 2wikimqa.jsonl
    cached-rag eval --data 2wikimqa.jsonl --methods full,auto,reuse@prefix

MiniLongBench (https://aclanthology.org/2025.acl-long.560) is a choice of LongBench's rows, with its
prompts. LongBench's own files (`data/*.jsonl`) are read as well. Long texts are cut into chunks of
some 500 tokens, as for a retriever. Of few-shot tasks the examples are chunks, and the passage that
is asked about stands in the question.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cached_rag.rag.chunks import Splitter
from cached_rag.rag.document import Document

_CHARACTERS_A_TOKEN = 4


class Task(NamedTuple):
    """How a prompt is made of a context and an input, and what is asked.

    Attributes:
        prompt: matches a whole prompt; its groups are the context and, if any, the input.
        question: with {} in place of the input.
        parts: what a part of the context begins with, if it is made of parts.
    """

    prompt: str
    question: str = "{}"
    parts: str = "Passage \\d+:\n"


_PASSAGES = Task(
    r".*?given passages\.\n(.*)\n\nAnswer the question based on.*?\n\nQuestion: (.*)\nAnswer:"
)
TASKS = {
    "2wikimqa": _PASSAGES,
    "hotpotqa": _PASSAGES,
    "musique": _PASSAGES,
    "qasper": _PASSAGES,
    "multifieldqa_en": Task(r".*?briefly\.\n\n(.*)\n\nNow, answer.*?\n\nQuestion: (.*)\nAnswer:"),
    "narrativeqa": Task(r".*?\n\nStory: (.*)\n\nNow, answer.*?\n\nQuestion: (.*)\n\nAnswer:"),
    "gov_report": Task(
        r".*?\n\nReport:\n(.*)\n\nNow, write a one-page summary.*",
        "Write a one-page summary of the report.",
    ),
    "multi_news": Task(
        r".*?\n\nNews:\n(.*)\n\nNow, write a one-page summary.*",
        "Write a one-page summary of all the news.",
    ),
    "qmsum": Task(r".*?\n\nTranscript:\n(.*)\n\nNow, answer the query.*?\n\nQuery: (.*)\nAnswer:"),
    "samsum": Task(
        r".*?some examples\.\n\n(.*)\n\n(Dialogue: .*?)\nSummary:",
        "Summarize this dialogue as in the examples.\n\n{}",
        "Dialogue: ",
    ),
    "triviaqa": Task(
        r".*?some examples\.\n\n(.*)\n\n(Passage:\n.*?\nQuestion:\n.*?)\nAnswer:",
        parts="Passage:\n",
    ),
    "passage_retrieval_en": Task(
        r".*?abstract is from\.\n\n(.*)\n\nThe following is an abstract\.\n\n(.*)\n\nPlease.*",
        'Which paragraph is this from? Answer in the form "Paragraph 1".\n\n{}',
        r"Paragraph \d+: ",
    ),
}


def questions(path: Path, name: str, most_characters: int) -> Iterator[dict[str, Any]]:
    """The rows of a file of LongBench or MiniLongBench, as `cached-rag eval` reads them.

    Raises:
        ValueError: a prompt is not of the task.
    """
    task, count = TASKS[name], lambda text: len(text) // _CHARACTERS_A_TOKEN + 1
    splitter = Splitter(count, chunk_tokens=512)
    for number, (context, asked, answers) in enumerate(_rows(path, task)):
        if len(context) <= most_characters:
            parts = re.split(f"(?:^|\n+)(?={task.parts})", context)
            documents = (Document("", "", part) for part in parts if part.strip())
            chunks = [chunk for document in documents for chunk in splitter.split(document)]
            yield {
                "id": f"{name}-{number}",
                "question": task.question.format(asked.strip()),
                "answers": answers,
                "chunks": [{"text": chunk.text} for chunk in chunks],
            }


def _rows(path: Path, task: Task) -> Iterator[tuple[str, str, list[str]]]:
    """Each row's context, input and answers."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        # strings may hold other line ends
        for row in map(json.loads, filter(None, text.split("\n"))):
            yield row["context"], row["input"], row["answers"]
        return
    for number, row in json.loads(text).items():
        found = re.fullmatch(task.prompt, row["origin_prompt"].rstrip(), re.DOTALL)
        if found is None:
            raise ValueError(f"{path}, row {number}: not a prompt of this task")
        yield found[1], found[2] if found.re.groups > 1 else "", row["gold"]


def main() -> None:
    """Write a set to standard output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "file", type=Path, help="named after its task, of which there are " + ", ".join(TASKS)
    )
    parser.add_argument("--most-characters", type=int, default=10**9, help="of a row's context")
    options = parser.parse_args()
    name = options.file.stem.removeprefix("MiniLongBench_")
    if name not in TASKS:
        parser.error(f"{name} is no task; there are {', '.join(TASKS)}")
    for row in questions(options.file, name, options.most_characters):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
