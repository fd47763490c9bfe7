"""The loop of all benchmarks: variants take turns, and their medians are compared.

When a machine is slow for a while, all variants are slow. So the ratios of their times within one
run can be trusted where the times cannot. Knows functions and numbers; knows no model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from cached_rag.errors import ConfigError

Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")


def take_turns(
    variants: Mapping[Name, Callable[[], Sample]],
    rounds: int,
    *,
    warm_up: int = 1,
    on_round: Callable[[], object] = lambda: None,
) -> dict[Name, list[Sample]]:
    """Call every variant once in each round, and collect what it returns.

    Each round begins with the next variant, so that none always runs in the same place.

    Args:
        rounds: how many rounds are kept.
        warm_up: how many rounds come before these and are discarded.
        on_round: called after every round, also of the warm-up; for a progress bar.

    Raises:
        ConfigError: there is no variant, or no round to keep.
    """
    if not variants or rounds < 1:
        raise ConfigError("there is nothing to measure: give at least one variant and one round")
    samples: dict[Name, list[Sample]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            sample = variants[name]()
            if number >= warm_up:
                samples[name].append(sample)
        on_round()
    return samples


def medians(
    variants: Mapping[Name, Callable[[], Mapping[str, float]]],
    rounds: int,
    *,
    warm_up: int = 1,
    on_round: Callable[[], object] = lambda: None,
) -> dict[Name, dict[str, float]]:
    """As `take_turns`, for variants that return figures by name: the median of each figure."""
    samples = take_turns(variants, rounds, warm_up=warm_up, on_round=on_round)
    return {
        name: {figure: statistics.median(one[figure] for one in found) for figure in found[0]}
        for name, found in samples.items()
    }


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, until its device has finished the work."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return (time.perf_counter() - began) * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
