"""What an application made a runnable of: the model of this package in it, what it takes.

Knows LangChain's runnables; asks nothing of any of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableEachBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.runnables.passthrough import RunnableAssign

from cached_rag import ConfigError
from langchain_cached_rag.settings import EngineSettings


def unwrapped(llm: Any) -> EngineSettings:
    """The model whose engine reads what a runnable is asked.

    Args:
        llm: a `ChatCachedRAG` or `CachedRAGLLM`; or what `bind`, `bind_tools`, `with_config`,
            `with_retry`, `with_fallbacks`, `with_structured_output`, `configurable_fields` or a
            chain made of one. Of several fallbacks, the first one counts.

    Raises:
        ConfigError: there is no such model in it, or more than one.
    """
    found = {model.engine_key: model for model in _models(llm)}
    if len(found) == 1:
        return next(iter(found.values()))
    names = sorted(model._model for model in found.values())
    inside = f"has {len(found)} models in it ({', '.join(names)})" if found else "has none in it"
    kind = type(llm).__name__
    raise ConfigError(
        f"llm is the model that will read the documents, and a {kind} {inside}; give the "
        "ChatCachedRAG or CachedRAGLLM that answers, before anything was bound to it or piped"
    )


def takes(runnable: Any, argument: str) -> bool:
    """Whether a retriever, or what was made of retrievers, can be called with an argument.

    Of a chain the first step gets it, of alternatives each. Where that is not known, it is not so.
    """
    if isinstance(runnable, BaseRetriever):
        return _accepts(runnable._get_relevant_documents, argument)
    if isinstance(runnable, RunnableLambda):
        return _accepts(getattr(runnable, "func", None) or runnable.afunc, argument)
    if isinstance(runnable, RunnableSequence):
        return takes(runnable.first, argument)
    if isinstance(runnable, RunnableBindingBase):
        return takes(runnable.bound, argument)
    if isinstance(runnable, RunnableWithFallbacks):
        return all(takes(one, argument) for one in runnable.runnables)
    if isinstance(runnable, (RunnableBranch, DynamicRunnable)):
        return all(takes(one, argument) for one in _parts(runnable))
    return False


def _accepts(function: Callable[..., Any], argument: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some of Python's own functions have none
        return False
    rest = inspect.Parameter.VAR_KEYWORD
    return any(one.name == argument or one.kind is rest for one in parameters)


def _models(llm: Any, inside: frozenset[int] = frozenset()) -> Iterator[EngineSettings]:
    """The models in a runnable, in the order of their use.

    Args:
        inside: what it is a part of, as functions may name themselves.
    """
    if id(llm) in inside:
        return
    inside |= {id(llm)}
    if isinstance(llm, EngineSettings):
        yield llm
    elif isinstance(llm, RunnableBindingBase):
        for model in _models(llm.bound, inside):
            yield model.renamed(llm.kwargs.get("model"))
    elif isinstance(llm, RunnableWithFallbacks):
        yield from next(filter(None, (list(_models(one, inside)) for one in llm.runnables)), [])
    else:
        for part in _parts(llm):
            yield from _models(part, inside)


def _parts(runnable: Any) -> Iterable[Runnable[Any, Any]]:
    """What a runnable runs; nothing for one of a kind that is not known."""
    if isinstance(runnable, RunnableSequence):
        return runnable.steps
    if isinstance(runnable, RunnableParallel):
        return runnable.steps__.values()
    if isinstance(runnable, RunnableAssign):
        return [runnable.mapper]
    if isinstance(runnable, RunnableBranch):
        return [*(then for _, then in runnable.branches), runnable.default]
    if isinstance(runnable, RunnableEachBase):
        return [runnable.bound]
    if isinstance(runnable, DynamicRunnable):
        return [runnable.default, *getattr(runnable, "alternatives", {}).values()]
    return runnable.deps if isinstance(runnable, RunnableLambda) else []
