"""Where modules are kept: what every store promises, memory, and fast stores before slow ones.

And how they come from one place to another in the background. Knows no file format and no model.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch

from cached_rag.errors import CorruptBlobError, StoreError, StoreFullError
from cached_rag.kv.buffer import LayerSource, ModuleKV
from cached_rag.kv.database import IN_MEMORY
from cached_rag.kv.entries import Entry, Listed
from cached_rag.kv.layers import each

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# Says, when KV is about to be kept, whether it still is to be: its text may be deleted by now.
IsWanted = Callable[[], bool]
Work = Callable[[str, ModuleKV, IsWanted], bool]
_THREADS = 2
# How long `Outbox.drop` waits for what is under way already.
_UNDER_WAY_S = 60.0


class Terms(NamedTuple):
    """On what terms KV is kept.

    Attributes:
        wanted: called when no `delete` can come in between; nothing is kept if it says no. So a
            text that is forgotten first, and whose KV is deleted then, leaves none, even if this
            process is killed.
        until: when it goes, in seconds since 1970, infinite for never; None for the end of what it
            replaces, or never.
    """

    wanted: IsWanted = lambda: True
    until: float | None = None


ALWAYS = Terms()


class SigningError(StoreError):
    """KV is not signed as this process does it: with its key, or not at all if it has none."""


class KVStore(Protocol):
    """Modules' KV by key. Every method may be called from several threads.

    Keys come from `fingerprint.module_key`. A store compares the stored token ids with the wanted
    ones, so that even two equal keys could not make it serve the wrong KV.
    """

    @property
    def nbytes(self) -> int:
        """Bytes held now."""

    def __contains__(self, key: str) -> bool: ...

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """The module, or None if it is not held. The caller must not write into its tensors.

        A store by itself counts no use by that: see `touch`.

        Raises:
            CorruptBlobError: held, but damaged or with other token ids; the entry is gone then.
        """

    def open(self, key: str, token_ids: Sequence[int]) -> LayerSource | None:
        """As `get`, but a module on disk is not read: each layer is when it is asked for."""

    def touch(self, key: str) -> None:
        """Count a use of an entry, if it is there: what is used more leaves later."""

    def hold(self, keys: Iterable[str], *, pinned: bool | None, until: float | None) -> int:
        """Say how long entries are kept, those that are there; says how many these are.

        Args:
            pinned: whether they stay, whatever comes; None leaves that as it is.
            until: when they go, in seconds since 1970, infinite for never; None leaves that.

        Raises:
            StoreFullError: pins would take more than `PINNED_SHARE` of the room; nothing is
                changed.
        """

    def ends(self, key: str) -> float:
        """When an entry's time is over, in seconds since 1970; infinite for never."""

    def put(self, key: str, kv: ModuleKV, terms: Terms = ALWAYS) -> None:
        """Keep a module; replaces an entry of the same key; may evict others (`entries.py`).

        Raises:
            StoreFullError: it does not fit; nothing is changed.
        """

    def delete(self, key: str) -> bool:
        """Delete an entry; says whether it was there."""


class MemoryStore(Listed):
    """A `KVStore` of at most `max_bytes` bytes of keys and values.

    Args:
        device: where to keep modules; None leaves them where they are. With "cpu" on a machine
            with CUDA their memory is pinned, so that copies to the device run by themselves.

    Attributes:
        held: the modules by key, also those whose time is over, until others come.
    """

    def __init__(self, max_bytes: int, device: torch.device | None = None) -> None:
        super().__init__(IN_MEMORY, "raw", max_bytes)
        self.device = device
        self.held: dict[str, ModuleKV] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.held and self._entry(key) is not None  # the table tells who is over

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """See `KVStore.get`."""
        found = self.held.get(key) if key in self else None
        if found is not None and found.token_ids != tuple(token_ids):
            self.delete(key)
            raise CorruptBlobError(f"the entry {key} in memory belongs to other tokens.")
        return found

    def open(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """As `get`: all layers are there."""
        return self.get(key, token_ids)

    def put(self, key: str, kv: ModuleKV, terms: Terms = ALWAYS) -> None:
        """See `KVStore.put`. If the tensors are views of larger ones, they are copied."""
        self._check_size(kv.nbytes, "memory_bytes")
        try:
            keys, values = (each(side, self._kept) for side in (kv.keys, kv.values))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise StoreFullError(
                f"no memory for a copy of KV ({error}); lower device_bytes or memory_bytes"
            ) from error
        kept = replace(kv, keys=keys, values=values)
        self._flush()
        with self._database.transaction():
            if terms.wanted():
                entry = Entry(key, self._codec_name, "", kept.nbytes, "")
                self._discard(self._add(entry, terms.until))
                self.held[key] = kept

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor where the store is, that holds no larger one of which it was a view."""
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        if self.device is None:
            return tensor
        tensor = tensor.to(self.device)
        pins = self.device.type == "cpu" and torch.cuda.is_available()
        return tensor.pin_memory() if pins else tensor

    def _discard_all(self, key: str) -> None:
        self.held.pop(key, None)

    def _discard(self, entries: Iterable[Entry]) -> None:
        for entry in entries:  # Ctrl-C may have come between table and modules
            self.held.pop(entry.key, None)


class TieredStore:
    """A `KVStore` over several, fastest first. The last one has all that the others have."""

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        self.tiers = tuple(tiers)

    @property
    def nbytes(self) -> int:
        """Bytes in the last tier."""
        return self.tiers[-1].nbytes

    def __contains__(self, key: str) -> bool:
        return any(key in tier for tier in self.tiers)

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """The module from the fastest tier that has it, which is copied into the faster ones.

        Raises:
            CorruptBlobError: damaged in one tier, and in no other.
        """
        level, kv = self._first(key, lambda tier: tier.get(key, token_ids))
        if kv is None or not level:
            return kv
        self._keep(level, key, kv)
        return self.tiers[0].get(key, token_ids) or kv  # on its device

    def open(self, key: str, token_ids: Sequence[int]) -> LayerSource | None:
        """As `get`, but unread, and left where it is."""
        return self._first(key, lambda tier: tier.open(key, token_ids))[1]

    def touch(self, key: str) -> None:
        """See `KVStore.touch`."""
        for tier in self.tiers:
            tier.touch(key)

    def hold(self, keys: Iterable[str], *, pinned: bool | None, until: float | None) -> int:
        """See `KVStore.hold`. Only the last tier pins: copies in others come again."""
        found = list(keys)
        count = self.tiers[-1].hold(found, pinned=pinned, until=until)
        for tier in self.tiers[:-1]:
            tier.hold(found, pinned=None, until=until)
        return count

    def ends(self, key: str) -> float:
        """See `KVStore.ends`."""
        return self.tiers[-1].ends(key)

    def _first(self, key: str, read: Callable[[KVStore], _T | None]) -> tuple[int, _T | None]:
        """The number of the first tier that has something, and what it has.

        It counts as a use there, and in the slower tiers.
        """
        damage: CorruptBlobError | None = None
        for level, tier in enumerate(self.tiers):
            try:
                found = read(tier)
            except CorruptBlobError as error:
                damage = error
                continue
            if found is not None:
                for used in self.tiers[level:]:
                    used.touch(key)
                return level, found
        if damage is not None:
            raise damage
        return 0, None

    def put(self, key: str, kv: ModuleKV, terms: Terms = ALWAYS) -> None:
        """Keep a module in the last tier, and in the faster ones if it fits.

        In these alone, if the last one has it from others and signed, as this process cannot.
        """
        level = len(self.tiers) - 1
        try:
            self.tiers[-1].put(key, kv, terms)
        except SigningError:
            if not level:
                raise
            self._keep(level, key, kv, terms)
        else:
            self._keep(level, key, kv)

    def delete(self, key: str) -> bool:
        """Delete an entry from all tiers; says whether any had it.

        From the slowest first: a reader could copy it from there back into the others.
        """
        return sum(tier.delete(key) for tier in reversed(self.tiers)) > 0

    def _keep(self, level: int, key: str, kv: ModuleKV, terms: Terms | None = None) -> None:
        """Put what tier `level` has into the faster ones, unless it is deleted meanwhile.

        Args:
            terms: where tier `level` does not have it; None for those on which it does.
        """
        end = None if terms is None else terms.until
        until = self.tiers[level].ends(key) if end is None else end
        for tier in self.tiers[:level]:
            with suppress(StoreFullError):  # too large for a fast tier is no error
                tier.put(key, kv, Terms(until=until))
        is_wanted = key in self.tiers[level] if terms is None else terms.wanted()
        if not is_wanted:
            for tier in self.tiers[:level]:
                tier.delete(key)


class Outbox:
    """Modules that wait for something to be done with them. Safe for several threads."""

    def __init__(self, work: Work, max_bytes: int, patience_s: float = 0.0) -> None:
        """Start with nothing.

        Args:
            work: does it for a key and its module, unless that is not wanted any more, and says
                whether that worked.
            max_bytes: most bytes of KV that wait.
            patience_s: how long `add` waits for room, all of its calls between two of `drain`
                together.
        """
        self._do, self._max_bytes = work, max_bytes
        self._patience_s = self._patience_left = patience_s
        self._waiting: dict[str, tuple[Future[None], int]] = {}  # with their bytes
        self._failed: set[str] = set()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_THREADS, "outbox")
        self._changed = threading.Condition()

    def add(self, name: str, kv: ModuleKV, wanted: IsWanted = lambda: True) -> None:
        """Do it for a module when its turn comes. If there is no room, it counts as failed.

        Args:
            name: the same name is not added twice.
            wanted: says whether it still is to be done; it may have to wait long.
        """
        with self._changed:
            self._wait_for_room(kv.nbytes)
            if name in self._waiting:
                return
            if self._is_closed or not self._has_room(kv.nbytes):
                self._failed.add(name)
                return
            future = self._threads.submit(self._work, name, kv, wanted)
            self._waiting[name] = future, kv.nbytes

    def _wait_for_room(self, nbytes: int) -> None:
        began = time.monotonic()
        self._changed.wait_for(lambda: self._has_room(nbytes), self._patience_left)
        self._patience_left = max(0.0, self._patience_left - (time.monotonic() - began))

    def _has_room(self, nbytes: int) -> bool:
        waiting = sum(size for _, size in self._waiting.values())
        return not waiting or waiting + nbytes <= self._max_bytes

    def _work(self, name: str, kv: ModuleKV, wanted: IsWanted) -> None:
        is_done = False
        try:
            is_done = self._do(name, kv, wanted)
        except Exception as error:  # such as no memory; the others still have their turn
            _log.warning("KV %s stays where it is: %s", name, error)
        finally:
            with self._changed:
                self._waiting.pop(name, None)
                (self._failed.discard if is_done else self._failed.add)(name)
                self._changed.notify_all()

    def fail(self, names: Iterable[str]) -> None:
        """Count these as failed until it is done for them."""
        with self._changed:
            self._failed.update(names)

    def settle(self, begin: str, patience_s: float) -> None:
        """Return when nothing waits whose name begins so, or after so many seconds."""

        def is_over() -> bool:
            return self._is_closed or not any(name.startswith(begin) for name in self._waiting)

        with self._changed:
            self._changed.wait_for(is_over, patience_s)

    def drop(self, names: Collection[str]) -> None:
        """Do it for none of these; returns when it is done for those whose turn it was."""
        with self._changed:
            self._failed.difference_update(names)
            found = {name: self._waiting[name][0] for name in names if name in self._waiting}
            for name, future in found.items():
                if future.cancel():
                    del self._waiting[name]
            self._changed.notify_all()
        wait([future for future in found.values() if not future.cancelled()], _UNDER_WAY_S)

    def drain(self, patience_s: float | None = None, names: Collection[str] | None = None) -> int:
        """Wait until nothing waits.

        Args:
            patience_s: after so many seconds, what still waits counts as failed.
            names: those to wait for; None for all.

        Returns:
            How many of them failed; none is counted twice.
        """

        def among(found: Collection[str]) -> set[str]:
            return {name for name in found if names is None or name in names}

        with self._changed:
            self._changed.wait_for(lambda: not among(self._waiting), patience_s)
            failed = among(self._failed) | among(self._waiting)
            self._failed -= failed
            self._patience_left = self._patience_s
        return len(failed)

    def close(self, patience_s: float) -> int:
        """As `drain`, then take no more and drop what still waits."""
        failed = self.drain(patience_s)
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        return failed


class Prefetcher:
    """Fetches modules on threads of its own. `wait` waits for some modules, never for others."""

    def __init__(self) -> None:
        self._coming: dict[str, Future[object]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "prefetch")

    def start(self, names: Sequence[str], fetch: Callable[[], object]) -> None:
        """Begin to fetch what goes by these names, unless all of that has begun already.

        Args:
            fetch: fetches all of it; must not raise.
        """
        with self._lock:
            new = [name for name in names if name not in self._coming]
            if not new:
                return
            future = self._threads.submit(fetch)
            self._coming |= dict.fromkeys(new, future)
        future.add_done_callback(lambda _: [self._coming.pop(name, None) for name in new])

    def wait(self, names: Iterable[str]) -> None:
        """Return when what goes by these names has been fetched; at once if nobody fetches it."""
        for future in filter(None, [self._coming.get(name) for name in names]):
            with suppress(CancelledError):  # by `close`
                future.result()

    def close(self) -> None:
        """Finish the fetches that have begun, and drop the others."""
        self._threads.shutdown(cancel_futures=True)
