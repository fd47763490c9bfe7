"""Methods by name: how KV is reused and repaired. A new method is imported and listed here."""

from cached_rag.methods.base import Layout, Selector, Takes
from cached_rag.methods.cacheblend import CacheBlend
from cached_rag.methods.parse import is_compared_at, parse_method, spelled
from cached_rag.methods.question import A3, AnchorFlow, Auto, Fast, InfoFlow, Lexical, ProphetKV
from cached_rag.methods.reuse import Compose, Epic, Full, Prefix, Random, Reuse

__all__ = [
    "AnchorFlow",
    "Auto",
    "CacheBlend",
    "Full",
    "InfoFlow",
    "Layout",
    "METHODS",
    "Prefix",
    "SELECTORS",
    "Selector",
    "Takes",
    "is_compared_at",
    "parse_method",
    "spelled",
]

_ALL: tuple[type[Selector], ...] = (
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
