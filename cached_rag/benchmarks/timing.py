"""Medians of calls that take turns, none of which finds in the cache what the last one read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

_WARM_UP = 2


def interleaved_ms(
    ways: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median milliseconds of each of several calls, made in turn, after two rounds to warm up."""
    other = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + _WARM_UP):
        for name, way in ways.items():
            other.add_(1)
            taken[name].append(_milliseconds(way, device))
    return {name: statistics.median(found[_WARM_UP:]) for name, found in taken.items()}


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    with torch.inference_mode():
        work()
    _wait(device)
    return (time.perf_counter() - began) * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
