"""The KV of all machines that share a remote store. Slow, gone or wrong, it is only a miss.

Every wait of a prompt has a bound, and what comes from there is checked before it is used. Names
begin with the tenant's namespace. Knows no model but its sizes.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import quote
from weakref import WeakSet

from cachetools import TLRUCache

from cached_rag.config import CODEC_NAMES, StoreConfig
from cached_rag.errors import CorruptBlobError, StoreError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.codecs import codec_by_name
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.tiers import IsWanted, Outbox
from cached_rag.kv.transports import Calls, Transport, open_transport
from cached_rag.kv.wire import HEADS_BYTES, Head, Sizes, Wire

_log = logging.getLogger(__name__)
# Most bytes of KV that wait to be sent, and how long encoding may be held up by that in all.
BUFFER_BYTES, _HELD_UP_S = 256 << 20, 20.0
# How long names that were not there are not asked for again, and names whose value is of no use,
# which another machine may write anew; and how many of them are remembered.
_MISSING_S, _BAD_S, _MOST_USELESS = 10.0, 300.0, 1 << 16
# Sending goes on after a failure, unless the pause that it asks for is longer than this.
_PATIENCE_S = 4.0
# How long a tenant that is closed waits for what it offered.
_LEAVING_S = 10.0
# What chunks stand behind is read anew after so many seconds.
HEADS_S = 60.0
# The weight of the newest measurement of a link, and how long measurements count.
_NEWEST, _FRESH_S = 0.3, 30.0
# Of a tenant, as folders of most file systems have names of 255 bytes at most.
_LONGEST_NAME = 200


class RemoteTier:
    """Modules in a remote store, for all tenants of an engine. Safe for several threads.

    Attributes:
        link: how fast it is.
        label: its address without passwords.
        codec: how KV is written there.
        refuses: given a number of tokens, says why their KV is not to be brought; empty if it is.
    """

    def __init__(
        self, transport: Transport, config: StoreConfig, sizes: Sizes | None = None
    ) -> None:
        """Connects when it is first used.

        Args:
            config: how KV is written there and signed, and the longest wait for an answer.
            sizes: the model's; what has others is not used. None for a tier that only deletes.
        """
        self.link, self.label = Link(), transport.label
        self.codec = codec_by_name(config.codec)
        self.refuses: Callable[[int], str] = lambda _: ""
        self._transport = transport
        self._wire = Wire(self.codec, (config.signing_key or "").encode(), sizes)
        # What is sent may take longer, and its failures do not keep prompts from asking.
        self._reading = Calls(transport, config.remote_timeout)
        self._sending = Calls(transport, config.remote_timeout)
        self._uploads = Outbox(self._send, BUFFER_BYTES, _HELD_UP_S)
        # Names that lately had no value, or one of no use, and for how long they are not asked for.
        self._useless: TLRUCache[str, float] = TLRUCache(
            _MOST_USELESS, lambda _, seconds, now: now + seconds
        )
        self._noting = threading.Lock()
        _OPEN.add(self)

    @property
    def pause_s(self) -> float:
        """Seconds for which it is left alone after a failure; 0 if it can be asked."""
        return max(self._reading.pause_s, self._sending.pause_s)

    # Reading ---------------------------------------------------------------------------------

    def fetch(
        self, namespace: str, wanted: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, ModuleKV], list[str]]:
        """Bring modules, in one round trip.

        Args:
            wanted: the token ids of each module, by its key.

        Returns:
            The modules that came, by their key, and what was wrong with others, in words.

        Raises:
            StoreError: it did not answer in time, or is not asked because it lately did not.
        """
        names = {self._name(namespace, key): key for key in wanted}
        asked = self._unknown(names)
        found: dict[str, ModuleKV] = {}
        problems: list[str] = []
        if not asked:
            return found, problems
        began = time.perf_counter()
        most = [self._wire.most_bytes(len(wanted[names[name]])) for name in asked]
        values = self._reading.ask(lambda: self._transport.get(asked, most))
        for name, data in zip(asked, values, strict=True):
            key = names[name]
            if data is None:
                self._note([name], _MISSING_S)
                continue
            try:
                found[key] = self._wire.unpack(name, data, key, wanted[key])
            except CorruptBlobError as error:
                self._note([name], _BAD_S)
                _log.warning("%s", error)
                problems.append(str(error))
        self.link.note(sum(kv.seq_len for kv in found.values()), time.perf_counter() - began)
        return found, problems

    def holds(self, namespace: str, keys: Collection[str]) -> set[str]:
        """Those of these keys that it has; damaged values, and another signer's, do not count.

        Raises:
            StoreError: as `fetch`.
        """
        names = {self._name(namespace, key): key for key in keys}
        asked = self._unknown(names)
        begins, mark = list[bytes | None](), self._wire.mark
        for part in self._parts(asked):
            begins += self._reading.ask(partial(self._transport.begin, part, len(mark)))
        found = {name: data == mark for name, data in zip(asked, begins, strict=True)}
        self._note([name for name, is_there in found.items() if not is_there], _MISSING_S)
        return {names[name] for name, is_there in found.items() if is_there}

    def heads(self, namespace: str, model: str) -> list[Head]:
        """What chunks of a model stand behind, as far as its users said so lately; newest last.

        Raises:
            StoreError: as `fetch`.
            CorruptBlobError: the list is damaged or foreign.
        """
        name = self._heads_name(namespace, model)
        began = time.perf_counter()
        (data,) = self._reading.ask(lambda: self._transport.get([name], [HEADS_BYTES]))
        self.link.note(0, time.perf_counter() - began)
        return [] if data is None else self._wire.unpack_heads(name, data)

    # Writing ---------------------------------------------------------------------------------

    def offer(
        self, namespace: str, key: str, kv: ModuleKV, wanted: IsWanted = lambda: True
    ) -> None:
        """Send a module in the background. May wait for room, if much waits already.

        Args:
            wanted: says whether it still is to be kept. It is asked on another thread, before it is
                sent and afterwards: another process may have deleted its text meanwhile.
        """
        self._uploads.add(self._name(namespace, key), kv, wanted)

    def settle(self, namespace: str) -> None:
        """Wait for what a tenant offered, for a bounded time.

        When its catalog is closed, nobody can say what is still wanted, and it is not sent.
        """
        self._uploads.settle(f"{_folder(namespace)}/", _LEAVING_S)

    def drain(self, namespace: str = "", keys: Collection[str] | None = None) -> int:
        """Wait until these modules are sent, if they were offered; says how many could not be.

        Args:
            keys: None for all that were offered, by whichever tenant.
        """
        names = None if keys is None else {self._name(namespace, key) for key in keys}
        return self._uploads.drain(names=names)

    def miss(self, namespace: str, keys: Iterable[str]) -> None:
        """Count modules as not sent: it is not known whether they are there."""
        self._uploads.fail(self._name(namespace, key) for key in keys)

    def add_heads(self, namespace: str, model: str, heads: Iterable[Head]) -> None:
        """Say what chunks of a model stand behind, so that other machines look for them.

        What two processes say at the same moment may get lost; who encodes says it again. Of many
        the latest are kept.

        Raises:
            StoreError: as `fetch`.
        """
        try:
            known = self.heads(namespace, model)
        except CorruptBlobError:
            known = []
        new = [head for head in heads if head not in known]
        if new:
            name = self._heads_name(namespace, model)
            data = self._wire.pack_heads(name, [*known, *new])
            self._sending.ask(lambda: self._transport.put(name, data))

    def delete(self, namespace: str, keys: Collection[str]) -> None:
        """Delete modules of all codecs, also those that wait to be sent.

        Raises:
            StoreError: it did not answer, so that they may still be there.
        """
        folder = _folder(namespace)
        names = [f"{folder}/{key}.{codec}" for codec in CODEC_NAMES for key in keys]
        self._uploads.drop(names)
        for part in self._parts(names):
            self._sending.ask(partial(self._transport.delete, part))

    def close(self, finish_seconds: float) -> None:
        """Send what waits, for a bounded time, and release connections."""
        unsent = self._uploads.close(finish_seconds)
        if unsent:
            _log.warning("KV of %d texts was not sent to %s", unsent, self.label)
        self._reading.close()
        self._sending.close()
        self._transport.close()

    def _forked(self) -> None:
        """Use nothing in a forked child: it has not the threads, and the sockets are its parent's.

        Asking then raises; a new engine has a tier of its own.
        """
        self._noting = threading.Lock()
        self._uploads = Outbox(self._send, 0)
        self._uploads.close(0)
        self._reading = self._sending = Calls(self._transport, self._reading.timeout_s)
        self._reading.close()

    def _send(self, name: str, kv: ModuleKV, wanted: IsWanted) -> bool:
        if not wanted():
            return True
        key = name.rpartition("/")[2].partition(".")[0]
        data = self._wire.pack(name, key, kv)
        is_sent = self._is_done(lambda: self._transport.put(name, data))
        is_wanted = False
        try:
            is_wanted = wanted()
        finally:  # also if that cannot be known
            if not is_wanted:
                is_sent = self._is_taken_back(name)
        if is_sent:
            with self._noting:
                self._useless.pop(name, None)
        return is_sent

    def _is_taken_back(self, name: str) -> bool:
        """Delete what was deleted while it was sent. Who deleted it may have come too early."""
        is_gone = self._is_done(lambda: self._transport.delete([name]))
        if not is_gone:
            _log.warning("KV that was deleted may still be in %s, as %s", self.label, name)
        return is_gone

    def _is_done(self, work: Callable[[], object]) -> bool:
        """Do something with the transport, with some patience; says whether that worked."""
        while True:
            try:
                self._sending.do(work)
            except StoreError as error:
                _log.info("KV is not sent yet: %s", error)
            else:
                return True
            pause = self._sending.pause_s
            if pause > _PATIENCE_S or self._sending.rest(pause):
                return False

    # Names -----------------------------------------------------------------------------------

    def _unknown(self, names: Iterable[str]) -> list[str]:
        """Those names of which it is not known that they have no value, or a bad one."""
        with self._noting:
            return [name for name in names if name not in self._useless]

    def _note(self, names: list[str], seconds: float) -> None:
        with self._noting:
            self._useless.update(dict.fromkeys(names, seconds))

    def _parts(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """Names, as many at a time as the transport takes in one round trip."""
        size = self._transport.batch
        return (names[begin : begin + size] for begin in range(0, len(names), size))

    def _name(self, namespace: str, key: str) -> str:
        return f"{_folder(namespace)}/{key}.{self.codec.name}"

    def _heads_name(self, namespace: str, model: str) -> str:
        return f"{_folder(namespace)}/{model}.heads"


def open_remote(config: StoreConfig, sizes: Sizes | None = None) -> RemoteTier | None:
    """The remote tier that the settings name; None if they name none.

    Args:
        sizes: the model's, see `RemoteTier`.

    Raises:
        ConfigError, MissingPackageError: see `open_transport`.
    """
    if config.remote is None:
        return None
    return RemoteTier(open_transport(config.remote, config.remote_timeout), config, sizes)


class Link:
    """Latency and bandwidth, as moving means.

    Attributes:
        latency_s: seconds of a round trip that carries nothing; None before the first one.
        tokens_per_s: how fast KV comes, in tokens; None before the first that came.
    """

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.tokens_per_s: float | None = None
        self._measured = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take over a measurement: a round trip that brought the KV of so many tokens."""
        if not tokens:
            self.latency_s = _mean(self.latency_s, seconds)
            return
        self._measured = time.monotonic()
        carrying = max(seconds - (self.latency_s or 0.0), seconds / 10)
        self.tokens_per_s = _mean(self.tokens_per_s, tokens / carrying)

    @property
    def is_stale(self) -> bool:
        """Whether it was measured so long ago that it should be tried again."""
        return time.monotonic() - self._measured > _FRESH_S

    def load_s(self, tokens: int) -> float | None:
        """Seconds that a round trip with the KV of so many tokens will take; None if unknown."""
        if self.tokens_per_s is None:
            return None
        return (self.latency_s or 0.0) + tokens / self.tokens_per_s


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)


def _folder(namespace: str) -> str:
    """A tenant's part of the store; a namespace of any characters becomes a safe name."""
    if len(name := quote(namespace, safe="")) > _LONGEST_NAME:
        return f"hashed-{digest(namespace)}"
    return f"tenant-{name}" if namespace else "shared"


_OPEN: WeakSet[RemoteTier] = WeakSet()


def _after_fork() -> None:
    for tier in list(_OPEN):
        tier._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
