"""What this machine computes a model on and in, and whether the model fits in its memory.

All is found out before a model is loaded. Loads nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from cached_rag.backends.transformers.packing import FORMATS, Format
from cached_rag.errors import ConfigError, ModelError

# Bytes that loading and the first prompts take besides the weights (docs/models.md).
OVERHEAD_BYTES = 512 << 20
# Bytes of a weight in few bits, its share of the scales included.
_BYTES = {"int4": 0.75, "int8": 1.0}
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


def parse_format(weights: str, device: str) -> Format:
    """A format of weights from its name.

    Raises:
        ConfigError: there is no such format, or not on this device.
    """
    if weights not in FORMATS:
        raise ConfigError(f"weights {weights!r} is not one of {', '.join(FORMATS)}")
    if device.startswith("cpu"):
        return weights
    if weights in ("int8", "int4"):
        raise ConfigError(
            f"weights={weights!r} needs a CPU, and the model is on {device}; use weights='bf16' or "
            "device='cpu'"
        )
    return "bf16"


@dataclass(frozen=True)
class WeightBytes:
    """Bytes that a model's weights take.

    Attributes:
        dense: in the dtype that the model computes in.
        few_bits: what is kept in few bits besides.
        lean: most while the model is loaded without dense weights of layers stored in 4 bits.
    """

    dense: int
    few_bits: int
    lean: int


def weight_bytes(config: Any, dtype: torch.dtype, weights: Format = "bf16") -> WeightBytes:
    """How much memory a model's weights take, by its configuration.

    Args:
        dtype: of dense weights.
        weights: see `load_model`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    dense = sum(int(part.numel()) for part in model.parameters()) * dtype.itemsize
    stored = getattr(config, "quantization_config", None) or {}
    few = saved = 0.0
    for name, part in model.named_modules():
        if not isinstance(part, torch.nn.Linear):
            continue
        kind = next((kind for kind in _BYTES if name in stored.get(kind, ())), "bf16")
        wanted, count = kind if weights == "as stored" else weights, part.weight.numel()
        few += count * _BYTES.get(wanted, 0)
        if kind == wanted == "int4":
            saved += count * (dtype.itemsize - _BYTES["int4"])
    return WeightBytes(dense, int(few), int(dense + few - saved))


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


def fits_dense(name: str, config: Any, dtype: torch.dtype, device: str, weights: Format) -> bool:
    """Whether there is memory for a model's dense weights besides those in few bits.

    If not, few bits alone must do; they can only where the model's folder stores them.

    Raises:
        ModelError: neither fits: the system would kill this process while it loads the model.
    """
    size, free = weight_bytes(config, dtype, weights), free_bytes(device)
    if size.dense + size.few_bits + OVERHEAD_BYTES <= free:
        return True
    if size.lean + OVERHEAD_BYTES <= free:
        return False
    kind = str(dtype).removeprefix("torch.")
    smaller = '; dtype="bfloat16" takes half of it.' if dtype == torch.float32 else "."
    raise ModelError(
        f"{name} does not fit: its weights take {size.lean / 2**30:.1f} GiB in {kind} and "
        f"loading {OVERHEAD_BYTES / 2**30:.1f} GiB more, and {max(free, 0) / 2**30:.1f} GiB of "
        f"memory are free on {device}. Free some, use a smaller model or its Q4 GGUF on a CPU, or "
        f"a machine with more memory{smaller}"
    )


def _number(path: Path) -> int | None:
    """The number in a file; None without a file, or where it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
