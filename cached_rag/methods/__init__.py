"""Methods by name: how modules' KV is reused and repaired. A new method is one line here."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from cached_rag.methods.a3 import A3
from cached_rag.methods.anchorflow import AnchorFlow
from cached_rag.methods.auto import Auto
from cached_rag.methods.base import LayerCheck, Layout, Selector, Takes
from cached_rag.methods.cacheblend import CacheBlend
from cached_rag.methods.epic import Epic
from cached_rag.methods.fast import Fast
from cached_rag.methods.infoflow import InfoFlow
from cached_rag.methods.parse import has_own_ratio, parse_method
from cached_rag.methods.prophetkv import ProphetKV
from cached_rag.methods.question import QuestionSelector
from cached_rag.methods.random_rows import Random
from cached_rag.methods.reuse import Full, Prefix, Reuse
from cached_rag.methods.union import UnionSelector

__all__ = [
    "A3",
    "AnchorFlow",
    "Auto",
    "CacheBlend",
    "Epic",
    "Fast",
    "Full",
    "InfoFlow",
    "LayerCheck",
    "Layout",
    "METHODS",
    "Prefix",
    "ProphetKV",
    "QuestionSelector",
    "Random",
    "Reuse",
    "SELECTORS",
    "Selector",
    "Takes",
    "UnionSelector",
    "has_own_ratio",
    "name_of",
    "parse_method",
    "spelled",
]

SELECTORS: dict[str, type[Selector]] = {
    "auto": Auto,
    "fast": Fast,
    "full": Full,
    "prefix": Prefix,
    "a3": A3,
    "anchorflow": AnchorFlow,
    "cacheblend": CacheBlend,
    "epic": Epic,
    "infoflow": InfoFlow,
    "prophetkv": ProphetKV,
    "random": Random,
    "reuse": Reuse,
}
METHODS = tuple(SELECTORS)


def name_of(method: Selector) -> str:
    """What a method is called in reports."""
    return method.reported_as or type(method).__name__.lower()


def spelled(method: Selector) -> str:
    """A method's name with the options that are not its defaults, as `parse_method` reads them."""
    if isinstance(method, UnionSelector):
        return "+".join(map(spelled, method.members))
    known: Any = fields(method) if is_dataclass(method) else ()
    given = {field.name: getattr(method, field.name) for field in known}
    own = [f"{f.name}={json.dumps(given[f.name])}" for f in known if given[f.name] != f.default]
    return name_of(method) + (f":{','.join(own)}" if own else "")
