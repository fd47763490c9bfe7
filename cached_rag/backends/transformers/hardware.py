"""What this machine computes a model on and in, and which formats of weights it can."""

from __future__ import annotations

import torch

from cached_rag.backends.transformers.weights.packing import FORMATS, Format
from cached_rag.errors import ConfigError


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
