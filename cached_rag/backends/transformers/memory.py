"""Whether a model fits in memory, found out before it is loaded. Loads nothing."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from cached_rag.errors import ModelError

# Bytes that loading and the first prompts take besides the weights (docs/models.md).
OVERHEAD_BYTES = 512 << 20
# Where Linux tells a container how much memory it may use (cgroup v2).
CGROUP = Path("/sys/fs/cgroup")


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in a dtype, by its configuration."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(int(weights.numel()) for weights in model.parameters()) * dtype.itemsize


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


def check_fits(name: str, config: Any, dtype: torch.dtype, device: str) -> None:
    """Refuse a model for which the system would kill this process while it loads.

    Raises:
        ModelError: the weights and what loading needs besides exceed the free memory.
    """
    weights, free = weight_bytes(config, dtype), free_bytes(device)
    if weights + OVERHEAD_BYTES <= free:
        return
    kind = str(dtype).removeprefix("torch.")
    raise ModelError(
        f"{name} does not fit: its weights take {weights / 2**30:.1f} GiB in {kind} and "
        f"loading {OVERHEAD_BYTES / 2**30:.1f} GiB more, and {max(free, 0) / 2**30:.1f} GiB of "
        f"memory are free on {device}. Free some, use a smaller model, or a machine with more "
        "memory" + ('; dtype="bfloat16" takes half of it.' if dtype == torch.float32 else ".")
    )


def peak_bytes() -> int:
    """Most bytes of memory that this process has held so far, mapped files included."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _number(path: Path) -> int | None:
    """The number in a file; None without a file, or where it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
