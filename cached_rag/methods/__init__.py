"""Methods by name: how modules' KV is reused and repaired. A new method is one line here."""

from __future__ import annotations

from cached_rag.methods.base import LayerCheck, Layout, QuestionSelector, Selector, Takes
from cached_rag.methods.cacheblend import CacheBlend
from cached_rag.methods.parse import UnionSelector, is_compared_at, parse_method, spelled
from cached_rag.methods.question import A3, AnchorFlow, Auto, Fast, InfoFlow, Lexical, ProphetKV
from cached_rag.methods.reuse import Compose, Epic, Full, Prefix, Random, Reuse

__all__ = [
    "A3",
    "AnchorFlow",
    "Auto",
    "CacheBlend",
    "Compose",
    "Epic",
    "Fast",
    "Full",
    "InfoFlow",
    "LayerCheck",
    "Layout",
    "Lexical",
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
    "is_compared_at",
    "parse_method",
    "spelled",
]

_ALL: tuple[type[Selector], ...] = (  # a new method is one line here
    Auto,
    Fast,
    Full,
    Prefix,
    A3,
    AnchorFlow,
    CacheBlend,
    Compose,
    Epic,
    InfoFlow,
    Lexical,
    ProphetKV,
    Random,
    Reuse,
)
SELECTORS = {method.name: method for method in _ALL}
METHODS = tuple(SELECTORS)
