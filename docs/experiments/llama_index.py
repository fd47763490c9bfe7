"""A query engine with the model users have today, and with ours: time and answers side by side.

    python -m docs.experiments.llama_index --data hotpotqa.jsonl --questions 20
    python -m docs.experiments.llama_index --corpus peps/ --documents 60

Today's is `HuggingFaceLLM`, on the very same weights in memory. Questions come from a set, asked
of an index over all its documents, or ask what each document of a folder is about.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import llama_index.core.instrumentation as instrumentation
import typer
from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
from llama_index.core.llms import LLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import BaseNode, TextNode
from llama_index.llms.cached_rag import CachedRAGLLM
from llama_index.llms.cached_rag.messages import CacheReportHandler
from llama_index.llms.cached_rag.nodes import SentenceTransformerEmbedding

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.evaluation.data import Example, load_examples
from cached_rag.evaluation.machine import machine
from cached_rag.spi import DEFAULT_MODEL, LanguageModel
from docs.experiments.comparison import compare, summarise_comparison

TODAY = "HuggingFaceLLM"
PROMPT = PromptTemplate(
    "Answer the question with the help of the documents. Answer with a few words only.\n\n"
    "{context_str}\n\nQuestion: {query_str}"
)
# Today's model computes in a new thread each time; ours ends when it has been idle for a second.
_PAUSE = 1.2
_MEMORY = 12 << 30  # sixty PEPs are some 7 GB of KV


class _Retrievals(BaseEventHandler):
    """How long the last retrieval took: its embedding is no model's overhead."""

    started: float = 0.0
    last_ms: float = 0.0

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "Retrievals"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        """Hear of a retrieval."""
        if isinstance(event, RetrievalStartEvent):
            self.started = time.perf_counter()
        elif isinstance(event, RetrievalEndEvent):
            self.last_ms = (time.perf_counter() - self.started) * 1000


def todays_model(engine: Engine, max_tokens: int) -> LLM:
    """The engine's own weights behind LlamaIndex's Hugging Face integration.

    Raises:
        ImportError: llama-index-llms-huggingface is not installed.
        ConfigError: the engine's weights are not in transformers.
    """
    from llama_index.llms.huggingface import HuggingFaceLLM

    model = engine.model
    if not isinstance(model, LanguageModel):
        raise ConfigError("today's way is compared on transformers models only")
    made: LLM = HuggingFaceLLM(
        model=model.decoder.model,
        tokenizer=model.tokenizer,
        context_window=model.context_length,
        max_new_tokens=max_tokens,
        is_chat_model=True,
        generate_kwargs={"do_sample": False},
    )
    return made


def from_set(examples: Sequence[Example]) -> list[BaseNode]:
    """All documents of a set, each a node."""
    texts = dict.fromkeys(text for example in examples for text in example.chunks)
    return [TextNode(text=text) for text in texts]


def from_folder(folder: Path, count: int, model: CachedRAGLLM) -> tuple[list[Example], list[Any]]:
    """A question about each of a folder's first documents, and their nodes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())[:count]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    documents = [Document(text=t, id_=f.name) for t, f in zip(texts, files, strict=True)]
    splitter = SentenceSplitter(chunk_size=256, chunk_overlap=0, tokenizer=model.token_ids)
    titles = [text.partition("Title:")[2].partition("\n")[0].strip() for text in texts]
    named = [(f.name, t or f.stem) for f, t in zip(files, titles, strict=True)]
    examples = [Example(n, f"What does the document on {t!r} propose?", (), ()) for n, t in named]
    return examples, splitter.get_nodes_from_documents(documents)


def run(
    engine: Engine,
    retriever: BaseRetriever,
    nodes: Sequence[BaseNode],
    examples: Sequence[Example],
    max_tokens: int,
    on_answer: Any = lambda *_: None,
    pause: float = _PAUSE,
) -> dict[str, Any]:
    """Encode all nodes once, then ask today's model, ours with full prefill, and ours.

    Returns:
        As `summarise_comparison`; retrieval is not counted as overhead.
    """
    ours = CachedRAGLLM(engine=engine, max_tokens=max_tokens)
    full = CachedRAGLLM(engine=engine, max_tokens=max_tokens, method="full")
    with ThreadPoolExecutor(1) as pool:  # the main thread must not compute, see `compare`
        encoded = pool.submit(ours.encode_nodes, nodes, prompt=PROMPT).result()
    models = {TODAY: todays_model(engine, max_tokens), "CachedRAGLLM, full": full}
    engines = {
        name: RetrieverQueryEngine.from_args(
            retriever, llm=llm, streaming=True, text_qa_template=PROMPT
        )
        for name, llm in {**models, "CachedRAGLLM": ours}.items()
    }
    heard, retrievals = CacheReportHandler(), _Retrievals()
    outside: list[float] = []

    def application(name: str) -> Any:
        def ask(example: Example) -> Iterator[str]:
            started = time.perf_counter()
            response: Any = engines[name].query(example.question)
            yield from response.response_gen
            if name == "CachedRAGLLM":
                total = (time.perf_counter() - started) * 1000
                outside.append(total - heard.reports[-1].total_ms - retrievals.last_ms)

        return ask

    dispatcher = instrumentation.get_dispatcher()  # type: ignore[attr-defined]
    dispatcher.add_event_handler(heard)
    dispatcher.add_event_handler(retrievals)
    try:
        asked = {name: application(name) for name in engines}
        rows = compare(asked, examples, pause=pause, on_answer=on_answer)
    finally:
        dispatcher.event_handlers.remove(heard)
        dispatcher.event_handlers.remove(retrievals)
    return summarise_comparison(rows, heard.reports, outside, encoded)


def main(
    data: Annotated[
        Path | None, typer.Option(help="Questions, as `cached-rag eval` reads.")
    ] = None,
    corpus: Annotated[Path | None, typer.Option(help="Or a folder of text documents.")] = None,
    documents: Annotated[int, typer.Option(help="How many of them.")] = 60,
    model: Annotated[
        str, typer.Option(help="Alias, Hugging Face id, folder or .gguf file.")
    ] = DEFAULT_MODEL,
    questions: Annotated[int, typer.Option(help="How many questions.")] = 20,
    k: Annotated[int, typer.Option(help="Nodes to a question.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    dtype: Annotated[str | None, typer.Option(help="e.g. float32; default: the fastest.")] = None,
) -> None:
    """Print one JSON object: machine, medians, F1."""
    if (data is None) == (corpus is None):
        raise typer.BadParameter("give either --data or --corpus")
    store = StoreConfig(memory_bytes=_MEMORY, sequence_bytes=0, learn_prefixes=False)
    with Engine.load(model, store=store, dtype=dtype) as engine:
        if data is not None:
            examples = load_examples(data)[:questions]
            nodes = from_set(examples)
        else:
            assert corpus is not None
            examples, nodes = from_folder(corpus, documents, CachedRAGLLM(engine=engine))
        with ThreadPoolExecutor(1) as pool:
            make = partial(VectorStoreIndex, nodes, embed_model=SentenceTransformerEmbedding())
            retriever = pool.submit(make).result().as_retriever(similarity_top_k=k)
        found = run(engine, retriever, nodes, examples[:questions], max_tokens)
        sys.stdout.write(json.dumps({"machine": machine(engine.model), **found}) + "\n")


if __name__ == "__main__":
    typer.run(main)
