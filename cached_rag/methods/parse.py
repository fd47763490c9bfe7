"""Methods written as text: `name`, `name:option=value,...`, and joined ones: `one+other`.

Of a joined one, what any of its members would recompute is recomputed.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch

from cached_rag.errors import ConfigError
from cached_rag.methods.base import Layout, QuestionSelector, Selector
from cached_rag.options import near, require


@dataclass(frozen=True)
class UnionSelector(QuestionSelector):
    """Union of methods' rows; at most one may ask the question, none may have check layers.

    Attributes:
        members: the methods; each has its own ratio, so there is none here.

    Raises:
        ConfigError: methods that cannot be joined, one that goes on with the answer, or a ratio.
    """

    name: ClassVar[str] = "union"
    recompute_ratio: float = 0.0
    members: tuple[Selector, ...] = ()

    def __post_init__(self) -> None:
        transfers = any(m.transfers_drift for m in self.members)
        object.__setattr__(self, "transfers_drift", transfers)
        require(
            not self.recompute_ratio,
            "methods that are joined have ratios of their own, as in "
            "epic+prophetkv:recompute_ratio=0.05, and none for all of them",
        )
        require(
            len(self._asking) <= 1 and all(type(m).narrow is Selector.narrow for m in self.members),
            "only methods that choose their rows before the first layer can be joined, and at "
            "most one that asks the question (a3, infoflow, prophetkv)",
        )
        composes = any(m.composes for m in self.members)
        require(not composes, "compose chooses nothing that could be joined with another method")
        follows = any(m.follow_tokens for m in self.members)
        require(not follows, "a method that is joined with others has no follow_tokens")

    @property
    def _asking(self) -> list[QuestionSelector]:
        return [m for m in self.members if isinstance(m, QuestionSelector)]

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """All members' rows."""
        return reduce(torch.logical_or, (m.first_rows(layout) for m in self.members), layout.fresh)

    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """Those of the member that asks."""
        return next((m.observed_layers(layout) for m in self._asking), ())

    def score(self, weights: torch.Tensor) -> torch.Tensor:
        """That member's score."""
        return self._asking[0].score(weights)

    def choose(self, scores: torch.Tensor, layout: Layout) -> torch.Tensor:
        """That member's rows, and the others'."""
        others = self.first_rows(layout) & layout.reused
        return self._asking[0].choose(scores, layout) | others.to(scores.device)


# They join no other.
_ALONE = ("auto", "fast", "full", "prefix")


def takes_ratio(text: str, table: Mapping[str, type[Selector]]) -> bool:
    """Whether a method has a `recompute_ratio` that its text leaves open."""
    return _parsed(text, table, 0.0) != _parsed(text, table, 1.0)


def is_compared_at(text: str, table: Mapping[str, type[Selector]]) -> bool:
    """Whether a method is compared at the others' share of recompute; `auto` keeps its own."""
    return text.partition(":")[0] not in _ALONE and takes_ratio(text, table)


def parse_method(
    text: str, table: Mapping[str, type[Selector]], ratio: float | None = None
) -> Selector:
    """The selector that a text names.

    Args:
        table: methods by name.
        ratio: the `recompute_ratio` of every method that has one and does not set it itself.

    Raises:
        ConfigError: an unknown method or option, or a value that it does not take; a ratio that
            no method takes.
    """
    if ratio is not None and not takes_ratio(text, table):
        raise ConfigError(
            f"recompute_ratio={ratio:g} changes nothing: method {text!r} "
            + ("has one already" if "recompute_ratio" in text else "takes none")
        )
    return _parsed(text, table, ratio)


def _parsed(text: str, table: Mapping[str, type[Selector]], ratio: float | None) -> Selector:
    parts = [part.strip() for part in text.split("+")]
    members = [_member(part, table, ratio, is_joined=len(parts) > 1) for part in parts]
    return members[0] if len(members) == 1 else UnionSelector(members=tuple(members))


def spelled(method: Selector) -> str:
    """A method's one spelling, which `parse_method` reads: its name, and what is no default."""
    if isinstance(method, UnionSelector):
        return "+".join(map(spelled, method.members))
    known: Any = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    given = {field.name: getattr(method, field.name) for field in known}
    own = [f"{f.name}={json.dumps(given[f.name])}" for f in known if given[f.name] != f.default]
    return method.name + (f":{','.join(own)}" if own else "")


def _member(
    text: str,
    table: Mapping[str, type[Selector]],
    ratio: float | None,
    *,
    is_joined: bool,
) -> Selector:
    name, _, rest = text.partition(":")
    cls = table.get(name)
    if cls is None:
        meant = "".join(f"; did you mean {one!r}?" for one in near(name, table))
        raise ConfigError(f"method {name!r} is not one of {', '.join(table)}{meant}")
    if name in _ALONE and is_joined:
        raise ConfigError(f"method {name!r} stands alone: it joins no other")
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = dict(_option(part, name) for part in rest.split(",") if part)
    for option in given.keys() - known.keys():
        has = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{name} has no option {option!r}; it has {has}")
    takes_either = "anchor_tokens" in given and known["recompute_ratio"].default is None
    if ratio is not None and "recompute_ratio" in known and not takes_either:
        given.setdefault("recompute_ratio", ratio)
    return cls(**given)


def _option(part: str, name: str) -> tuple[str, Any]:
    option, equals, value = part.partition("=")
    if not equals:
        raise ConfigError(f"an option of {name} is written {option}=value")
    try:
        return option.strip(), json.loads(value)
    except ValueError:
        return option.strip(), value.strip()
