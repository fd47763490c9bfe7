"""Who may ask, and whose KV they may share. Knows keys and namespaces; knows no HTTP."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from cached_rag.backends.thread import submit
from cached_rag.engine.engine import Engine
from cached_rag.errors import BusyError, ConfigError

# Most engines that are kept open while nobody uses them, of all tenants and of one tenant's salts.
# Each has a table of texts and two databases, but no memory of its own.
MAX_IDLE = 64
MAX_IDLE_SALTS = 16


class Keys:
    """API keys, "KEY" or "TENANT:KEY" each; without any, everybody may ask."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """Read keys as the command line has them.

        Raises:
            ConfigError: no key or tenant where one should be, a colon or white space in one, or a
                key that two have.
        """
        self._tenants: list[tuple[bytes, str]] = []
        for entry in keys:
            *tenants, key = entry.split(":")
            if len(tenants) > 1 or "" in (*tenants, key) or any(map(str.isspace, entry)):
                raise ConfigError(
                    "an API key is given as KEY or TENANT:KEY, neither of them empty nor with a "
                    "colon or white space; of $TENANT:$KEY, see that both variables are set"
                )
            self._tenants.append((_digest(key), "".join(tenants)))
        if len(dict(self._tenants)) < len(set(self._tenants)):
            raise ConfigError("two tenants have the same API key; give each one of its own")

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant whose key an Authorization header has, None if it is no key of anybody.

        It takes the same time for every key, so that time tells nothing about the keys.
        """
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given, found = _digest(key.strip()), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, given):
                found = tenant
        return found if scheme.lower() == "bearer" else None


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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
