"""Facts about the machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

import torch
import transformers

from cached_rag.backends.base import Backend


def machine(model: Backend | None = None) -> dict[str, object]:
    """Processor, threads, accelerator, versions; and the model's dtype and device."""
    facts: dict[str, object] = {
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if model is not None:
        facts |= {
            "model": model.name,
            "dtype": str(model.shapes.dtype),
            "device": str(model.shapes.device),
        }
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this checkout, with a + if files have changed since; None if it is none."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    with suppress(OSError):
        done = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None
