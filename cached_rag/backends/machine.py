"""What this machine computes on and in, and what memory it has and this process takes of it.

Knows no model.
"""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from cached_rag.errors import ConfigError

# Bytes that loading and the first prompts take besides the weights (docs/models.md).
OVERHEAD_BYTES = 512 << 20
# Where Linux tells a container how much memory it may use (cgroup v2).
CGROUP = Path("/sys/fs/cgroup")


def best_device() -> str:
    """The best device of this machine: "cuda", else "mps", else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def fastest_dtype(device: str) -> torch.dtype:
    """The fastest dtype: bf16 if the hardware supports it, else fp16 on a GPU and fp32 on a CPU."""
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
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
            "the device out for the best one"
        ) from error


def free_bytes(device: str) -> int:
    """Bytes that are free on a device; for the CPU the least of machine and container."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    found = int(psutil.virtual_memory().available)
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    return found if limit is None or used is None else min(found, limit - used + _cached())


def _cached() -> int:
    """Bytes of cached files that count as the container's memory and are freed when needed."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return sum(int(n) for name, n in lines if name in ("active_file", "inactive_file"))
    return 0


def _number(path: Path) -> int | None:
    """The number in a file; None without a file, or where it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


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
