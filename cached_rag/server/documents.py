"""Texts that clients make known, or have forgotten, apart from answers. Knows no socket."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain

from cached_rag.backends.prompt_text import Rendered
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.library.encode import EncodeSummary
from cached_rag.server.answers import Json
from cached_rag.server.protocol import DocumentsRequest
from cached_rag.server.tenants import Tenants

_PLACE = "{documents}"
_THREADS = 4


class Documents:
    """The texts of all tenants."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        # Threads of their own, so that those on which answers begin are never held.
        self._threads = ThreadPoolExecutor(_THREADS, "documents")

    async def encode(self, request: DocumentsRequest, tenant: str) -> Json:
        """Prefill texts, so that prompts with them need not.

        Returns:
            Numbers of texts that were encoded now and that were known, tokens computed, and by
            index the texts that were skipped and why.

        Raises:
            ConfigError: the messages do not say where the texts will stand.
            ContextOverflowError: what stands before the texts fills the model's context.
        """
        skipped: list[Json] = []
        encoded = known = tokens = 0
        with ExitStack() as lease:
            using = self._tenants.using(tenant, request.cache_salt)
            run = asyncio.get_running_loop().run_in_executor
            engine = await run(self._threads, lease.enter_context, using)
            prefix = await run(self._threads, _head, engine, request)
            for index, one in enumerate(request.texts):
                # One by one, so that answers go on in between.
                done = await run(self._threads, _encoded, engine, one, prefix)
                encoded, tokens = encoded + done.encoded, tokens + done.tokens
                known += done.present
                skipped += [{"index": index, "reason": reason} for _, reason in done.skipped]
        return {"encoded": encoded, "known": known, "tokens": tokens, "skipped": skipped}

    async def forget(self, request: DocumentsRequest, tenant: str) -> Json:
        """Delete texts and their KV; returns how many KVs went."""

        def forget() -> Json:
            with self._tenants.using(tenant, request.cache_salt) as engine:
                texts = [[one] if isinstance(one, str) else one for one in request.texts]
                return {"deleted": engine.forget([*chain.from_iterable(texts)])}

        return await asyncio.get_running_loop().run_in_executor(self._threads, forget)


def _encoded(engine: Engine, one: str | list[str], prefix: Rendered | None) -> EncodeSummary:
    """A text, or a document's; of those that cannot be encoded the reason stands in `skipped`."""
    try:
        return engine.encode([one], prefix)
    except (ConfigError, ContextOverflowError) as error:
        if isinstance(one, str):
            return EncodeSummary(skipped=((one, str(error)),))
        return sum((_encoded(engine, text, prefix) for text in one), EncodeSummary())


def _head(engine: Engine, request: DocumentsRequest) -> Rendered | None:
    """What stands before the texts; see `Documents.encode`.

    Its length is checked here, once: with each text it is tokenised again.
    """
    if request.messages is None:
        return None
    head = engine.head([message.plain() for message in request.messages], _PLACE)
    context = engine.model.context_length
    too_long = engine.tokenization.least_tokens(head.text, context) is not None
    if too_long or engine.count_tokens(head) >= context:
        raise ContextOverflowError(
            f"what the messages say before {_PLACE} fills the model's context of {context} "
            "tokens, so no text fits behind it; give shorter messages"
        )
    return head
