"""Whose KV requests use and share, and the texts that tenants make known or have forgotten.

Knows engines and namespaces; knows no HTTP.
"""

import asyncio
import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.thread import submit
from cached_rag.engine.engine import Engine
from cached_rag.errors import BusyError, ConfigError, ContextOverflowError
from cached_rag.library.encode import EncodeSummary
from cached_rag.server.forms import Json
from cached_rag.server.protocol import DocumentsRequest

# Most engines that are kept open while nobody uses them, of all tenants and of one tenant's salts.
# Each has a table of texts and two databases, but no memory of its own.
MAX_IDLE = 64
MAX_IDLE_SALTS = 16
_PLACE = "{documents}"
_THREADS = 4


class Tenants:
    """An engine for each tenant and salt, all on one model, memory and scheduler.

    Some stay open between requests, fewer of one tenant's salts; of more, the one that was unused
    for longest is closed, and its KV on disk stays. Requests may use more of them at once, up to
    what the machine's descriptors allow.
    """

    def __init__(self, engine: Engine, most: int = 320) -> None:
        """Open none yet.

        Args:
            engine: that of requests without tenant and salt, on which the others are made.
            most: most engines that may be open, used or not.
        """
        self._first = engine
        self._kept = min(MAX_IDLE, most // 2)
        self._most = max(2, most - self._kept)
        self._num_closing = 0
        self._engines: OrderedDict[str, Engine] = OrderedDict()
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closer = ThreadPoolExecutor(1, "closing")

    @contextmanager
    def using(self, tenant: str, salt: str | None) -> Iterator[Engine]:
        """The engine that has the KV of this tenant and salt, and no other's.

        Raises:
            BusyError: as many engines as may be are in use, or half of them by this tenant's salts.
        """
        name = namespace(tenant, salt)
        if not name:
            yield self._first
            return
        with self._lock:
            engine = self._engines.get(name) or self._opened(name, tenant)
            self._engines[name] = engine
            self._engines.move_to_end(name)
            self._uses[name] += 1
        try:
            yield engine
        finally:
            with self._lock:
                self._uses[name] -= 1
                if not self._uses[name]:
                    del self._uses[name]
                idle = self._surplus(tenant)
                self._num_closing += len(idle)
            for engine in idle:  # on another thread, for it may have to wait for an encoding
                self._closer.submit(self._close, engine)

    def _opened(self, name: str, tenant: str) -> Engine:
        own = sum(used.startswith(f"{tenant}:") for used in self._uses)
        is_greedy = ":" in name and own >= self._most // 2
        if is_greedy or len(self._uses) + self._num_closing >= self._most:
            raise BusyError("too many tenants or salts are in use at once; ask again later")
        return self._first.tenant(name)

    def _close(self, engine: Engine) -> None:
        try:
            _close(engine)
        finally:
            with self._lock:
                self._num_closing -= 1

    def close(self) -> None:
        """Close all engines that no request uses, within `finish_seconds` for all together."""
        with self._lock:
            idle = [name for name in self._engines if name not in self._uses]
            engines = [self._engines.pop(name) for name in idle]
        deadline = time.monotonic() + self._first.settings.finish_seconds
        for engine in engines:
            _close(engine, max(0.0, deadline - time.monotonic()))
        self._closer.shutdown()

    def _surplus(self, tenant: str) -> list[Engine]:
        """Take out the unused engines that are too many: of this tenant's salts, then of all."""
        own = [name for name in self._engines if name.startswith(f"{tenant}:")]
        found = []
        for names, most in ((own, MAX_IDLE_SALTS), (list(self._engines), self._kept)):
            held = [name for name in names if name in self._engines]
            idle = [name for name in held if name not in self._uses]
            found += [self._engines.pop(name) for name in idle[: max(0, len(held) - most)]]
        return found


def _close(engine: Engine, finish_seconds: float | None = None) -> None:
    """Close an engine, once the model's thread has dealt with the requests that were cancelled."""
    submit(lambda: None).result()
    engine.close(finish_seconds)


def namespace(tenant: str, salt: str | None) -> str:
    """The namespace of a tenant's and salt's KV; "" without either, as on the command line."""
    if not salt:
        return tenant
    return f"{tenant}:{hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()}"


class Documents:
    """The texts of all tenants."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        # Threads of their own, so that those on which answers begin are never held.
        self._threads = ThreadPoolExecutor(_THREADS, "documents")

    async def encode(self, request: DocumentsRequest, tenant: str) -> Json:
        """Prefill texts, so that prompts with them need not.

        Returns:
            Numbers of texts that were encoded now and that were known, of tokens computed, and of
            KVs that are held; and by index the texts that were skipped and why.

        Raises:
            ConfigError: the messages do not say where the texts will stand.
            ContextOverflowError: what stands before the texts fills the model's context.
        """
        skipped: list[Json] = []
        total, held = EncodeSummary(), 0
        with ExitStack() as lease:
            using = self._tenants.using(tenant, request.cache_salt)
            run = asyncio.get_running_loop().run_in_executor
            engine = await run(self._threads, lease.enter_context, using)
            prefix = await run(self._threads, _head, engine, request)
            for index, one in enumerate(request.texts):
                # One by one, so that answers go on in between.
                done = await run(self._threads, _encoded, engine, one, prefix)
                if request.pinned is not None or request.ttl_seconds is not None:
                    held += await run(self._threads, _hold, engine, one, request)
                total += done
                skipped += [{"index": index, "reason": reason} for _, reason in done.skipped]
        counts = {"encoded": total.encoded, "known": total.present, "tokens": total.tokens}
        return {**counts, "held": held, "skipped": skipped}

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


def _hold(engine: Engine, one: str | list[str], request: DocumentsRequest) -> int:
    """Hold those of these texts that were not skipped; says how many KVs these are."""
    texts = [one] if isinstance(one, str) else one
    known = [text for text in texts if engine.library.table.get(text.strip()) is not None]
    return engine.hold(known, pinned=request.pinned, ttl_seconds=request.ttl_seconds)


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
