"""What this process takes of the machine. Knows no model."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import psutil


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
