"""The trials of an evaluation: a method, how chunks are encoded for it, and a recompute ratio.

A trial is written `method@encoding`, or `method` for the encoding that `auto` uses. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cached_rag.config import GenerationConfig
from cached_rag.errors import ConfigError
from cached_rag.methods import has_own_ratio

# Encoded as by default, in a prompt where the chunks stand the other way round.
_REVERSED = "reversed"
ENCODINGS = (
    *("alone", "alone-primer", "prefix", "primer", "both", "strangers"),
    *("apart", "harvested", "elsewhere", "elsewhere-prefix", "half", "asked"),
    _REVERSED,
)
# Those that take a number: `strangers:2`.
_COUNTED = ("primer", "both", "strangers", "harvested", "asked")
DEFAULT_ENCODING = "primer"
_WITHOUT_RATIO = {"full": 1.0, "prefix": 1.0, "reuse": 0.0}


@dataclass(frozen=True)
class Trial:
    """One method at one ratio.

    Attributes:
        name: as written by the user.
        method: the method's part of the name.
        encoding: one of `ENCODINGS`, some with a number after a colon (`_COUNTED`); empty to
            encode nothing.
        ratio: share of cached tokens to recompute.
    """

    name: str
    method: str
    encoding: str
    ratio: float

    def config(self, max_tokens: int) -> GenerationConfig:
        """The engine's settings: greedy, at `ratio` unless the method has a ratio of its own."""
        ratio = None if has_own_ratio(self.method) else self.ratio
        return GenerationConfig(method=self.method, recompute_ratio=ratio, max_tokens=max_tokens)

    @property
    def is_reversed(self) -> bool:
        """Whether chunks stand in the prompt the other way round."""
        return self.encoding == _REVERSED

    @property
    def encoded(self) -> str:
        """How chunks are encoded; empty for what computes all anew."""
        if self.method == BASELINE.method:
            return ""
        return DEFAULT_ENCODING if self.is_reversed else self.encoding

    @property
    def asks_others(self) -> bool:
        """Whether other questions about the same chunks are asked before."""
        return self.encoded.partition(":")[0] == "asked"


# The trial that all others are compared with.
BASELINE = Trial("full", "full", "", 1.0)


def make_trials(names: Sequence[str], ratios: Sequence[float]) -> list[Trial]:
    """A trial for every method and ratio, `full` first; methods without a ratio have one trial.

    Raises:
        ConfigError: an unknown method, option or encoding, or a ratio out of range.
    """
    trials = {(BASELINE.name, BASELINE.ratio): BASELINE}
    for name in names:
        method, _, encoding = name.partition("@")
        _check_encoding(encoding or DEFAULT_ENCODING)
        for ratio in _ratios(method, ratios):
            trial = Trial(name, method, encoding or DEFAULT_ENCODING, ratio)
            trial.config(1)
            trials.setdefault((name, ratio), trial)
    return list(trials.values())


def _ratios(method: str, ratios: Sequence[float]) -> Sequence[float]:
    fixed = _WITHOUT_RATIO.get(method)
    if fixed is not None:
        return [fixed]
    own = GenerationConfig(method=method).selector()
    whole = GenerationConfig(method=method, recompute_ratio=1.0).selector()
    if not has_own_ratio(method) and whole != own:
        return ratios
    return [getattr(own, "recompute_ratio", None) or 0.0]


def _check_encoding(text: str) -> None:
    kind, colon, count = text.partition(":")
    if kind not in ENCODINGS:
        raise ConfigError(f"encoding {text!r} is not one of {', '.join(ENCODINGS)}")
    if colon and not (kind in _COUNTED and count.isdecimal() and int(count)):
        raise ConfigError(
            f"encoding {text!r}: a number from 1 on may follow {', '.join(_COUNTED)}, and nothing "
            "the others"
        )
