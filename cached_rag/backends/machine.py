"""What this machine computes on and in, what memory it has, and how fast it computes a model.

How fast is measured once for each model and machine, and kept in the user's cache directory as a
profile.
"""

import ctypes
import dataclasses
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from cached_rag.backends.base import Backend
from cached_rag.backends.resolve import cache_dir, keep_json
from cached_rag.errors import ConfigError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.files import open_file
from cached_rag.kv.fingerprint import digest

# Bytes that loading and the first prompts take besides the weights (docs/models.md).
OVERHEAD_BYTES = 512 << 20
# Where Linux tells a container how much memory it may use (cgroup v2).
CGROUP = Path("/sys/fs/cgroup")
# Numbers of tokens: in the longest prompt, and at most in a timed pass.
_LONGEST, _ROWS = 4096, 256
# Seconds that a timed pass should take, seconds after which it is not repeated any more, and how
# often it is repeated at most.
_PASS_S, _LIMIT_S, _REPEATS = 0.5, 1.0, 3
# A model's fingerprint, and its device.
ProfileKey = tuple[str, torch.device]


def best_device() -> str:
    """The best device of this machine: "cuda", else "cpu"; "mps", being untested, if asked for."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def fastest_dtype(device: str) -> torch.dtype:
    """The fastest dtype: bf16 if the hardware supports it, else fp16 on a GPU and fp32 on a CPU."""
    if device.startswith("cuda"):
        with torch.cuda.device(torch.device(device)):  # torch tells of the current one only
            is_native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if is_native else torch.float16
    if device.startswith("mps"):
        return torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from its name.

    Raises:
        ConfigError: there is no such dtype, or models are not computed in it here.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype {dtype!r} is not one of float32, bfloat16, float16")
    return found


def check_device(device: str) -> None:
    """Raise a ConfigError unless tensors can be put there."""
    try:
        if torch.empty(1, device=device).is_meta:
            raise RuntimeError("it keeps no numbers")
    except (RuntimeError, AssertionError, ImportError) as error:  # without CUDA it is the second
        why = re.split(r"\.\s|\n", str(error))[0].rstrip(".")
        there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        if torch.backends.mps.is_available():
            there.append("mps")
        raise ConfigError(
            f"device {device!r} cannot be used: {why}. This machine has {', '.join(there)}; leave "
            "the device out for CUDA or the CPU"
        ) from error


def free_bytes(device: str) -> int:
    """Bytes that are free on a device; for the CPU the least of machine and container."""
    if device.startswith("cuda"):
        where = torch.device(device)  # what torch has taken and does not use is free, too
        unused = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return torch.cuda.mem_get_info(where)[0] + unused
    found = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limit = int((CGROUP / "memory.max").read_text())
        lines = (line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # Cached files count as the container's memory, and are freed when it is needed.
        cached = sum(int(n) for name, n in lines if name in ("active_file", "inactive_file"))
        found = min(found, limit - int((CGROUP / "memory.current").read_text()) + cached)
    return found


def peak_bytes() -> int:
    """Most bytes of memory that this process has held so far, mapped files included."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    status = Path("/proc/self/status")
    if status.is_file():  # `ru_maxrss` would count what the process had that started this one
        found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if found:
            return int(found[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_memory() -> None:
    """Give freed memory back to the system, where the C library would keep it (glibc).

    Prompts come and go in pieces of all sizes, and what lies between those in use is kept: on
    SmolLM2, a third as much again as all that is used. So do weights while a model is loaded.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and needs none
        if trim is not None:
            trim(0)


@dataclass(frozen=True)
class Profile:
    """The rate of one model on one machine.

    Attributes:
        token_s: seconds to compute a token in all layers, without its attention to others.
        pair_s: additional seconds for each token that it attends to.

    Raises:
        ValueError, TypeError: a value is no rate.
    """

    token_s: float
    pair_s: float

    def __post_init__(self) -> None:
        if min(self.token_s, self.pair_s) < 0 or not self.token_s + self.pair_s:
            raise ValueError(f"rates are positive, unlike these: {self}")

    def compute_s(self, tokens: float) -> float:
        """Seconds to compute a prompt of so many tokens."""
        return self.token_s * tokens + self.pair_s * tokens * tokens / 2


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
    profile = measure(model)
    keep_json(_path(key), dataclasses.asdict(profile))
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
    """Measure a profile: medians of a few rounds, on random tokens with others before them."""
    longest = min(_LONGEST, model.context_length)
    ids = torch.randint(0, 100, (1, longest), generator=torch.Generator().manual_seed(0))
    buffer = KVBuffer.like(model.shapes, longest)
    buffer.keys.zero_()
    buffer.values.zero_()
    with model.lock, torch.inference_mode():  # another engine may compute with it
        return Profile(*fit(_passes(model, buffer, ids)))


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
        (count, preceding, _median_s(partial(compute, preceding, count)))
        for count, preceding in places
    ]


def _median_s(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _LIMIT_S:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
