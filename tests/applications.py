"""Documents as applications put them into their prompts."""

from __future__ import annotations

import random

from conftest import CHUNKS

WORDS = sorted({word.strip(".,").lower() for chunk in CHUNKS for word in chunk.split()})


NAMES = "ABCDEFGH"


def document(name: str, sentences: int = 9) -> str:
    """Some 145 tokens that no other document has."""
    draw = random.Random(name)
    said = (" ".join(draw.sample(WORDS, 8)).capitalize() for _ in range(sentences))
    return "\n".join(f"{one}." for one in said)


DOCUMENTS = {name: document(name) for name in NAMES}


def open_webui(texts: list[str]) -> str:
    sources = (f'<source id="{n}" name="{n}.md">{text}</source>' for n, text in enumerate(texts, 1))
    return "### Task:\nAnswer.\n\n<context>\n{}\n</context>".format("\n".join(sources))


def langchain(texts: list[str]) -> str:
    return "Answer from this context:\n\n" + "\n\n".join(texts)


def anything_llm(texts: list[str]) -> str:
    listed = (f"[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n" for n, text in enumerate(texts))
    return "Answer.\nContext:\n    " + "".join(listed)
