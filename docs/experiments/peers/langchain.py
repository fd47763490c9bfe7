"""LangChain's usual model for local weights, for `peers`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from cached_rag import Engine
from docs.experiments.answers import load_again
from docs.experiments.peers.text import TextPeer


def peer(engine: Engine) -> TextPeer:
    """`HuggingFacePipeline` over a copy of the engine's model.

    Raises:
        ImportError: langchain-huggingface is not installed.
        ModelNotFoundError: the engine's model was not loaded from files.
    """
    from langchain_huggingface import HuggingFacePipeline
    from transformers import pipeline

    tokenizer = engine.model.tokenizer
    generator = pipeline("text-generation", model=load_again(engine), tokenizer=tokenizer)
    model = HuggingFacePipeline(pipeline=generator)

    def stream(prompt: str, tokens: int) -> Iterator[str]:
        how = {"max_new_tokens": tokens, "do_sample": False}  # transformers' pipelines would sample
        yield from model.stream(prompt, pipeline_kwargs=how)

    about = f"langchain-huggingface {version('langchain-huggingface')}, HuggingFacePipeline"
    return TextPeer(about, tokenizer, stream)
