"""Methods by name: how modules' KV is reused and repaired. A new method is one line here."""

from __future__ import annotations

from cached_rag.methods.a3 import A3
from cached_rag.methods.anchorflow import AnchorFlow
from cached_rag.methods.auto import Auto
from cached_rag.methods.base import LayerCheck, Layout, Selector, Takes
from cached_rag.methods.cacheblend import CacheBlend
from cached_rag.methods.epic import Epic
from cached_rag.methods.infoflow import InfoFlow
from cached_rag.methods.parse import has_own_ratio, parse_method
from cached_rag.methods.prophetkv import ProphetKV
from cached_rag.methods.question import QuestionSelector
from cached_rag.methods.random_rows import Random
from cached_rag.methods.reuse import Full, Prefix, Reuse
from cached_rag.methods.union import Union

__all__ = [
    "A3",
    "AnchorFlow",
    "Auto",
    "CacheBlend",
    "Epic",
    "Full",
    "InfoFlow",
    "LayerCheck",
    "Layout",
    "Prefix",
    "ProphetKV",
    "QuestionSelector",
    "Random",
    "Reuse",
    "SELECTORS",
    "Selector",
    "Takes",
    "Union",
    "has_own_ratio",
    "name_of",
    "parse_method",
]

SELECTORS: dict[str, type[Selector]] = {
    "auto": Auto,
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


def name_of(method: Selector) -> str:
    """What a method is called in reports."""
    return method.reported_as or type(method).__name__.lower()
