"""Errors that are the engine's and LangChain's, so that LangChain's agents know what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from langchain_core import exceptions

from cached_rag import CachedRAGError
from cached_rag.errors import BusyError, ContextOverflowError

if TYPE_CHECKING:
    from langchain_core.exceptions import ContextOverflowError as TheirOverflow
    from langchain_core.exceptions import ModelRateLimitError as TheirLimit
else:  # langchain-core 1.0 has neither
    TheirOverflow = getattr(exceptions, "ContextOverflowError", Exception)
    TheirLimit = getattr(exceptions, "ModelRateLimitError", Exception)


class ChatOverflowError(ContextOverflowError, TheirOverflow):
    """The messages do not fit, and would not the next time; an agent may shorten them."""


class ChatBusyError(BusyError, TheirLimit):
    """Too many requests wait, and an agent may ask again."""


_BOTH: dict[type[Exception], type[CachedRAGError]] = {
    ContextOverflowError: ChatOverflowError,
    BusyError: ChatBusyError,
}


@contextmanager
def known_to_agents() -> Iterator[None]:
    """A context in which the engine's errors are raised as LangChain's, too."""
    try:
        yield
    except tuple(_BOTH) as error:
        if type(error) not in _BOTH:
            raise
        both = _BOTH[type(error)](*error.args)
        vars(both).update(vars(error))
        raise both from error
