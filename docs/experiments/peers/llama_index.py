"""LlamaIndex's usual model for local weights, for `peers`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from cached_rag import Engine
from docs.experiments.answers import load_again
from docs.experiments.peers.text import TextPeer


def peer(engine: Engine) -> TextPeer:
    """`HuggingFaceLLM` over a copy of the engine's model.

    Raises:
        ImportError: llama-index-llms-huggingface is not installed.
        ModelNotFoundError: the engine's model was not loaded from files.
    """
    from llama_index.llms.huggingface import HuggingFaceLLM

    tokenizer = engine.model.tokenizer
    model = HuggingFaceLLM(
        model=load_again(engine),
        tokenizer=tokenizer,
        context_window=engine.model.context_length,
        generate_kwargs={"do_sample": False},
    )

    def stream(prompt: str, tokens: int) -> Iterator[str]:
        model.max_new_tokens = tokens
        for piece in model.stream_complete(prompt, formatted=True):
            yield piece.delta or ""

    about = f"llama-index-llms-huggingface {version('llama-index-llms-huggingface')}"
    return TextPeer(about, tokenizer, stream)
