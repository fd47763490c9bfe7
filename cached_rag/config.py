"""Settings: frozen, checked when made. Knows names and ranges; knows no model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from cached_rag.errors import ConfigError
from cached_rag.methods import SELECTORS, Selector, name_of, parse_method

METHODS = tuple(SELECTORS)
# Small, good enough to see what the library does, and in a wheel that needs no hub (README).
DEFAULT_MODEL = "smollm2-135m"
# Scores divided by less overflow, as do those that are multiplied by more than its inverse.
_COLDEST = 1e-4
_METHOD_OPTIONS = ("recompute_ratio", "check_layer", "gradual")


@dataclass(frozen=True)
class GenerationConfig:
    """How one prompt is prefilled and answered.

    Attributes:
        method: how cached modules are used: one of `METHODS`, with options as in
            "epic:anchor_tokens=32", several as in "epic+prophetkv", or a selector.
        recompute_ratio: share of the reused tokens to recompute; None for the method's default.
        check_layer, gradual: CacheBlend's; None for the method's default.
        adaptive: let the loading controller raise the ratio to what hides behind loading, and
            compute modules that would load more slowly than that.
        max_tokens: most tokens to generate.
        temperature: 0 decodes greedily.
        top_p, top_k: nucleus and top-k sampling; 1 and 0 switch them off.
        stop: strings that end the answer; they are not part of it.
        seed: makes sampling repeatable.
        ignore_eos: go on to `max_tokens`, whatever the model says.
        repetition_penalty: 0.0001 to 10000; None for the model's own generation config.

    Raises:
        ConfigError: a value out of range, or an option its method does not have.
    """

    method: str | Selector = "auto"
    recompute_ratio: float | None = None
    check_layer: int | tuple[int, ...] | None = None
    gradual: bool | None = None
    adaptive: bool = False
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings(self.stop))
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        _require(self.temperature >= 0, f"temperature cannot be negative: {self.temperature}")
        is_plain = self.temperature == 0 or self.temperature >= _COLDEST
        _require(is_plain, f"temperature must be 0 or at least {_COLDEST}: {self.temperature}")
        _require(self.seed is None or abs(self.seed) < 1 << 63, f"no 64-bit seed: {self.seed}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}")
        _require(self.top_k >= 0, f"top_k cannot be negative: {self.top_k}")
        penalty = self.repetition_penalty
        is_sane = penalty is None or _COLDEST <= penalty <= 1 / _COLDEST
        _require(
            is_sane,
            f"repetition_penalty must be {_COLDEST} to {1 / _COLDEST:.0f}, not {penalty}",
        )
        chosen = self.selector()
        if self.adaptive:
            has_ratio = getattr(chosen, "recompute_ratio", None) is not None
            _require(has_ratio, f"{self.method} has no recompute_ratio to be adaptive")

    @property
    def method_name(self) -> str:
        """The method, after `auto` was resolved."""
        if not isinstance(self.method, str):
            return name_of(self.method)
        return self.selector().reported_as or self.method

    def selector(self) -> Selector:
        """The method, with its options."""
        if not isinstance(self.method, str):
            return self.method
        given = {n: getattr(self, n) for n in _METHOD_OPTIONS if getattr(self, n) is not None}
        found = parse_method(self.method, SELECTORS, given)
        for name in given.keys() - {"recompute_ratio"}:  # a ratio is harmless to any method
            _require(hasattr(found, name), f"{self.method} has no option {name!r}")
        return found

    def replace(self, **options: Any) -> GenerationConfig:
        """A copy with some settings changed.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in options:
            _require(name in known, f"unknown setting {name!r}; settings are {', '.join(known)}")
        return dataclasses.replace(self, **options)


@dataclass(frozen=True)
class BatchConfig:
    """How many prompts are answered at the same time.

    Attributes:
        max_rows: most answers that are made together; the other requests wait.
        max_bytes: most bytes of the KV of these answers; None for no bound. The store's own
            memory is bounded by `StoreConfig`.
        max_waiting: most requests that wait; None for no bound. One more is refused.
        prefill_tokens: how many prompt tokens are computed between two tokens of running answers.
        shares: prompts that have KV in common keep it once and read it once.
    """

    max_rows: int = 16
    max_bytes: int | None = None
    max_waiting: int | None = None
    prefill_tokens: int = 512
    shares: bool = True

    def __post_init__(self) -> None:
        _require(self.max_rows >= 1, f"max_rows must be at least 1, not {self.max_rows}")
        _require(self.prefill_tokens >= 1, f"prefill_tokens must be at least 1: {self}")
        for name in ("max_bytes", "max_waiting"):
            bound = getattr(self, name)
            _require(bound is None or bound > 0, f"{name} must be positive: {bound}")


@dataclass(frozen=True)
class StoreConfig:
    """Where KV is kept and how much of it.

    Attributes:
        path: folder on disk; None keeps KV in memory only.
        codec: "raw" keeps the model's dtype, "int8" halves it (see docs/store.md for the error).
        memory_bytes: most bytes of KV in the host's memory.
        device_bytes: most bytes of KV in a CUDA device's memory; 0 keeps none there, None takes a
            quarter of what is free. Without meaning elsewhere.
        disk_bytes: most bytes of KV on disk; None for no bound.
        namespace: tenants with different namespaces never share KV.
        sequence_bytes: most bytes of KV that finished prompts and answers left, for prompts that
            begin alike; 0 keeps none.
        keeps_repaired: keep there also what a method repaired, for prompts of the same method;
            else only what full prefill would compute, so that no answer depends on earlier ones.
        write_back: encode in the background what a request missed.
        finish_seconds: how long `Engine.close`, or the interpreter's end, may go on encoding what
            still waits, so that a short script's work is on disk for the next one; 0 drops it.
            Without a disk nothing is worth it, and nothing is done.
        learn_prefixes: what recurs before the first module of prompts is encoded in the background
            and reused without loss; modules that lack KV are encoded behind it from then on.
        pipelined: read KV from disk layer by layer while the first layers are computed already;
            else all of it first. None: only on an accelerator, for on a CPU the two compete for
            the same cores (measured: docs/store.md).
    """

    path: str | None = None
    codec: str = "raw"
    memory_bytes: int = 2 << 30
    device_bytes: int | None = None
    disk_bytes: int | None = None
    namespace: str = ""
    sequence_bytes: int = 0
    keeps_repaired: bool = True
    write_back: bool = True
    finish_seconds: float = 30.0
    learn_prefixes: bool = True
    pipelined: bool | None = None

    def __post_init__(self) -> None:
        _require(self.sequence_bytes >= 0, f"sequence_bytes is negative: {self.sequence_bytes}")
        finish = self.finish_seconds
        _require(finish >= 0, f"finish_seconds cannot be negative: {finish}")
        _require(self.memory_bytes > 0, f"memory_bytes must be positive: {self.memory_bytes}")
        room = self.device_bytes
        _require(room is None or room >= 0, f"device_bytes is negative: {room}")
        bound = self.disk_bytes
        _require(bound is None or bound > 0, f"disk_bytes must be positive: {bound}")


def _strings(stop: Any) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    _require(all(isinstance(s, str) and s for s in found), "stop strings must not be empty")
    return found


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
