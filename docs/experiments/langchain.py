"""A plain chain with the model users have today, and with ours: time and answers side by side.

    python -m docs.experiments.langchain --data hotpotqa.jsonl --questions 40

Today's is `ChatHuggingFace` over `HuggingFacePipeline`, on the very same weights in memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_cached_rag import CachedRetriever, CacheReportHandler, ChatCachedRAG
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.evaluation.data import Example, load_examples
from cached_rag.evaluation.machine import machine
from cached_rag.spi import DEFAULT_MODEL, LanguageModel
from docs.experiments.comparison import compare, summarise_comparison

TODAY = "ChatHuggingFace"
PROMPT = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "Answer the question with the help of the documents. Answer with a few words only.",
        ),
        ("human", "{context}\n\nQuestion: {question}"),
    ]
)
# The pipeline computes in a new thread each time; ours ends when it has been idle for a second.
_PAUSE = 1.2


class RowRetriever(BaseRetriever):
    """Finds the documents that a question of the set comes with."""

    by_question: dict[str, tuple[str, ...]]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(text) for text in self.by_question[query]]


def join(documents: Sequence[Document]) -> str:
    """Documents as one text."""
    return "\n\n".join(document.page_content for document in documents)


def make_chain(retriever: BaseRetriever, llm: BaseChatModel) -> Any:
    """A retrieval chain as anybody would write it."""
    inputs: Any = {"context": retriever | join, "question": RunnablePassthrough()}
    return inputs | PROMPT | llm | StrOutputParser()


def todays_model(engine: Engine, max_tokens: int) -> BaseChatModel:
    """The engine's own weights behind LangChain's Hugging Face integration.

    Raises:
        ImportError: langchain-huggingface is not installed.
        ConfigError: the engine's weights are not in transformers.
    """
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from transformers import pipeline

    loaded = engine.model
    if not isinstance(loaded, LanguageModel):
        raise ConfigError("today's way is compared on transformers models only")
    model, tokenizer = loaded.decoder.model, loaded.tokenizer
    answers = {"max_new_tokens": max_tokens, "do_sample": False, "return_full_text": False}
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, **answers)
    return ChatHuggingFace(llm=HuggingFacePipeline(pipeline=generator), tokenizer=tokenizer)


def run(
    engine: Engine,
    examples: Sequence[Example],
    max_tokens: int,
    on_answer: Any = lambda *_: None,
    pause: float = _PAUSE,
) -> dict[str, Any]:
    """Encode all documents once, then ask today's model, ours with full prefill, and ours.

    Returns:
        As `summarise_comparison`.
    """
    retriever = RowRetriever(by_question={e.question: e.chunks for e in examples})
    ours = ChatCachedRAG(engine=engine, max_tokens=max_tokens)
    full = ChatCachedRAG(engine=engine, max_tokens=max_tokens, method="full")
    texts = [text for example in examples for text in example.chunks]
    with ThreadPoolExecutor(1) as pool:  # the main thread must not compute, see `compare`
        encoded = pool.submit(ours.encode, texts, prompt=PROMPT).result()
    chains = {
        TODAY: make_chain(retriever, todays_model(engine, max_tokens)),
        "ChatCachedRAG, full": make_chain(retriever, full),
        "ChatCachedRAG": make_chain(CachedRetriever(retriever=retriever, llm=ours), ours),
    }
    reports, outside = CacheReportHandler(), []

    def application(name: str) -> Any:
        def ask(example: Example) -> Iterator[str]:
            started = time.perf_counter()
            yield from chains[name].stream(example.question, config={"callbacks": [reports]})
            if name == "ChatCachedRAG":
                total = (time.perf_counter() - started) * 1000
                outside.append(total - reports.reports[-1].total_ms)

        return ask

    rows = compare({n: application(n) for n in chains}, examples, pause=pause, on_answer=on_answer)
    return summarise_comparison(rows, reports.reports, outside, encoded)


def main(
    data: Annotated[Path, typer.Option(help="Questions, as `cached-rag eval` reads them.")],
    model: Annotated[
        str, typer.Option(help="Alias, Hugging Face id, folder or .gguf file.")
    ] = DEFAULT_MODEL,
    questions: Annotated[int, typer.Option(help="How many of them.")] = 20,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    dtype: Annotated[str | None, typer.Option(help="e.g. float32; default: the fastest.")] = None,
    show: Annotated[bool, typer.Option(help="Print every answer.")] = False,
) -> None:
    """Print one JSON object: machine, medians, F1."""
    examples = load_examples(data)[:questions]

    def tell(name: str, example: Example, text: str) -> None:
        if show:
            sys.stderr.write(f"{example.id} {name}: {text!r} {example.answers}\n")

    store = StoreConfig(sequence_bytes=0, learn_prefixes=False)
    with Engine.load(model, store=store, dtype=dtype) as engine:
        found = run(engine, examples, max_tokens, tell)
        sys.stdout.write(json.dumps({"machine": machine(engine.model), **found}) + "\n")


if __name__ == "__main__":
    typer.run(main)
