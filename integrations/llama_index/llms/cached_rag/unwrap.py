"""The model of this package in what an application made of it."""

from __future__ import annotations

from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.llms.cached_rag.base import CachedRAGLLM

from cached_rag import ConfigError


def unwrapped(llm: LLM) -> CachedRAGLLM:
    """The model whose engine reads what an LLM is asked.

    Args:
        llm: a `CachedRAGLLM`, or what `as_structured_llm` made of one.

    Raises:
        ConfigError: it is neither.
    """
    inside = llm.llm if isinstance(llm, StructuredLLM) else llm
    if isinstance(inside, CachedRAGLLM):
        return inside
    raise ConfigError(
        f"llm is the model that will read the nodes, and a {type(inside).__name__} keeps no KV; "
        "give the CachedRAGLLM that answers"
    )
