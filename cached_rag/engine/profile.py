"""Measures how fast this machine computes tokens of a model, and how fast it loads their KV.

The result is kept in the user's cache directory, for each model and machine. The loading controller
(CacheBlend, section 5.2) decides by it how much to recompute, and what to load. Tokens are
recomputed while KV is loaded. As long as recomputing takes no longer than loading, it delays
nothing. So the controller raises the recompute ratio until both take equally long; it never goes
below the floor that quality needs. A chunk that is computed faster than it is loaded is not loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cached_rag.backends.base import Backend
from cached_rag.backends.resolve import cache_dir
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.files import make_folder, open_file
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.remote import Link

# Numbers of tokens: in the KV that is placed and read, in the longest prompt, and at most in a
# timed pass.
_KV_TOKENS, _LONGEST, _ROWS = 512, 4096, 256
# Seconds that a timed pass should take, seconds after which it is not repeated any more, and how
# often it is repeated at most.
_PASS_S, _LIMIT_S, _REPEATS = 0.5, 1.0, 3
# A model's fingerprint, and its device.
ProfileKey = tuple[str, torch.device]


@dataclass(frozen=True)
class Profile:
    """Rates of one model on one machine.

    Attributes:
        token_s: seconds to compute a token in all layers, without its attention to others.
        pair_s: additional seconds for each token that it attends to.
        memory_bytes_per_s, disk_bytes_per_s: how fast KV gets from there into a prompt's buffer.
            For the disk the files are read again, not taken from the system's page cache, and
            their checksums are verified.
        kv_bytes_per_token: bytes of KV that the model computes for a token; 0 if its states are
            kept as a whole, and then nothing is loaded.

    Raises:
        ValueError, TypeError: a value is no rate.
    """

    token_s: float
    pair_s: float
    memory_bytes_per_s: float
    disk_bytes_per_s: float
    kv_bytes_per_token: int

    def __post_init__(self) -> None:
        rates = [self.token_s + self.pair_s]
        if self.kv_bytes_per_token:
            rates += (self.memory_bytes_per_s, self.disk_bytes_per_s, self.kv_bytes_per_token)
        if min(rates) <= 0 or min(self.token_s, self.pair_s) < 0:
            raise ValueError(f"rates are positive, unlike these: {self}")

    def compute_s(self, tokens: float, preceding: float = 0) -> float:
        """Seconds to compute `tokens` tokens that have `preceding` tokens before them."""
        return self.token_s * tokens + self.pair_s * tokens * (preceding + tokens / 2)

    def load_s(self, tokens: float, tier: str) -> float:
        """Seconds to load the KV of `tokens` tokens; `tier` is "memory" or "disk"."""
        rates = {"memory": self.memory_bytes_per_s, "disk": self.disk_bytes_per_s}
        nbytes = tokens * self.kv_bytes_per_token
        return nbytes / rates[tier] if nbytes else 0.0


def fit(passes: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """`token_s` and `pair_s` of a `Profile`, by least squares over the time for one token.

    Args:
        passes: (number of tokens, tokens before them, seconds) of each pass. There must be two or
            more, with different numbers of tokens to attend to.
    """
    seen = [preceding + tokens / 2 for tokens, preceding, _ in passes]
    each = [seconds / tokens for tokens, _, seconds in passes]
    pair_s = max(0.0, statistics.linear_regression(seen, each).slope)  # noise may tilt it down
    return max(0.0, statistics.mean(each) - pair_s * statistics.mean(seen)), pair_s


def profile_of(model: Backend, *, fresh: bool = False) -> Profile:
    """The profile that was kept earlier; else one is measured, which takes seconds, and kept.

    Args:
        fresh: measure even if a profile was kept.
    """
    key = profile_key(model)
    kept = None if fresh else kept_profile(key)
    if kept is not None:
        return kept
    profile, path = measure(model), _path(key)
    make_folder(path.parent)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(profile)), encoding="utf-8")
    temporary.replace(path)
    return profile


def profile_key(model: Backend) -> ProfileKey:
    """What a model's profile is kept under."""
    return model.fingerprint, model.shapes.device


def kept_profile(key: ProfileKey) -> Profile | None:
    """The profile that was measured earlier on this machine; None if there is none to be read."""
    try:
        with open_file(_path(key)) as file:
            return Profile(**json.load(file))
    except (OSError, ValueError, TypeError):  # a ValueError: by an earlier version, or incomplete
        return None


def _path(key: ProfileKey) -> Path:
    fingerprint, device = key
    machine = (platform.node(), platform.machine(), str(os.cpu_count()), str(device))
    return cache_dir() / "profiles" / f"{digest(fingerprint, *machine)}.json"


def measure(model: Backend) -> Profile:
    """Measure a profile: medians of a few rounds, on random tokens.

    Tokens are timed with other tokens before them, because a method recomputes such tokens.
    """
    longest = min(_LONGEST, model.context_length)
    ids = torch.randint(0, 100, (1, longest), generator=torch.Generator().manual_seed(0))
    buffer = KVBuffer.like(model.shapes, longest)
    buffer.keys.zero_()
    buffer.values.zero_()
    token_s, pair_s = fit(_passes(model, buffer, ids))
    count = min(_KV_TOKENS, longest)
    kv = buffer.read(0, count, tuple(ids[0, :count].tolist()))
    host = ModuleKV(kv.token_ids, 0, kv.keys.cpu(), kv.values.cpu())
    placing = _median_s(lambda: buffer.place(host, 0, model.rule))
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        reading = _reading_s(Path(folder), host, buffer, model)
    return Profile(
        token_s=token_s,
        pair_s=pair_s,
        memory_bytes_per_s=round(host.nbytes / placing, 1),
        disk_bytes_per_s=round(host.nbytes / reading, 1),
        kv_bytes_per_token=model.shapes.bytes_per_token,
    )


def _passes(model: Backend, buffer: KVBuffer, ids: torch.Tensor) -> list[tuple[int, int, float]]:
    """Timed passes with no tokens before them, half a prompt and nearly all of it, for `fit`."""
    longest, device = ids.shape[1], model.shapes.device

    def compute(preceding: int, count: int) -> None:
        slots = torch.arange(preceding, preceding + count)
        model.prefill(buffer, ids[:, : preceding + count], slots)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    few = min(_ROWS, longest // 4)
    least = max(1, few // 8)
    compute(0, least)  # the first pass is slower: it allocates and compiles
    began = time.perf_counter()
    compute(0, least)
    affordable = int(least * _PASS_S / (time.perf_counter() - began))
    rows = max(least, min(few, affordable))
    places = [(rows, preceding) for preceding in (0, longest // 2, longest - rows)]
    if model.keeps_states:  # what precedes would have to be computed each time
        places = [(share * rows, 0) for share in (1, 2, 4)]
    return [
        (count, preceding, _median_s(functools.partial(compute, preceding, count)))
        for count, preceding in places
    ]


def _reading_s(folder: Path, kv: ModuleKV, buffer: KVBuffer, model: Backend) -> float:
    store = DiskStore(folder)
    store.put("profile", kv)
    store.close()

    def read() -> float:
        forget_pages(folder)
        fresh = DiskStore(folder)  # which checks what it reads
        began = time.perf_counter()
        source = fresh.open("profile", kv.token_ids)
        assert source is not None
        buffer.place(source, 0, model.rule)
        taken = time.perf_counter() - began
        fresh.close()
        return taken

    return statistics.median(read() for _ in range(_REPEATS))


def forget_pages(folder: Path) -> None:
    """Ask the system to drop a folder's KV files from its page cache, so that the disk is read."""
    if not hasattr(os, "posix_fadvise"):
        return  # on such a system the page cache is measured instead
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _median_s(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _LIMIT_S:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@dataclass(frozen=True)
class Decision:
    """What to do with one prompt's chunks.

    Attributes:
        recompute_ratio: share of the loaded tokens to recompute.
        loaded: for each chunk, whether to load it; the others are computed.
        reason: the decision in words, with the times that led to it.
    """

    recompute_ratio: float
    loaded: tuple[bool, ...]
    reason: str


def refusal(profile: Profile, link: Link, tokens: int) -> str:
    """Why KV of `tokens` tokens is not to be brought from a remote store; empty if it is.

    It is as long as nothing is known of the way there, and now and then to learn of it again.
    """
    loading, computing = link.load_s(tokens), profile.compute_s(tokens)
    if loading is None or loading < computing:
        return ""
    return (
        f"KV of {tokens} tokens would take {loading * 1000:.0f} ms from the remote store, and "
        f"{computing * 1000:.0f} ms to compute, so it is computed"
    )


@dataclass(frozen=True)
class Controller:
    """Decides by the rates of a profile.

    Attributes:
        floor: the smallest recompute ratio that is allowed (r* in the paper).
    """

    profile: Profile
    floor: float

    def decide(self, chunks: Sequence[tuple[int, int, str]]) -> Decision:
        """Decide for the chunks of a prompt.

        Args:
            chunks: (number of tokens before it, number of its tokens, "memory" or "disk") each.
        """
        loaded = tuple(self.is_worth_loading(n, tier, preceding) for preceding, n, tier in chunks)
        kept = [chunk for chunk, is_kept in zip(chunks, loaded, strict=True) if is_kept]
        loading = sum(self.profile.load_s(count, tier) for _, count, tier in kept)
        computing = sum(self.profile.compute_s(count, preceding) for preceding, count, _ in kept)
        hidden = loading / computing if kept else 0.0
        ratio = min(1.0, max(self.floor, hidden))
        why = "the floor" if ratio == self.floor else "what hides behind loading"
        reason = (
            f"{len(kept)} of {len(chunks)} chunks loaded, {sum(n for _, n, _ in kept)} tokens "
            f"in {loading * 1000:.1f} ms; ratio {ratio:.3f} is {why} and takes "
            f"{ratio * computing * 1000:.1f} ms"
        )
        return Decision(ratio, loaded, reason)

    def is_worth_loading(self, tokens: int, tier: str, preceding: int = 0) -> bool:
        """Whether a chunk behind `preceding` other tokens is loaded faster than computed."""
        return self.profile.load_s(tokens, tier) < self.profile.compute_s(tokens, preceding)
