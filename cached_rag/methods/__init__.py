"""Methods by name: how modules' KV is reused and repaired. A new method is one line here."""

from __future__ import annotations

from cached_rag.methods.a3 import A3
from cached_rag.methods.anchorflow import AnchorFlow
from cached_rag.methods.base import LayerCheck, Layout, Selector
from cached_rag.methods.cacheblend import CacheBlend
from cached_rag.methods.epic import Epic
from cached_rag.methods.infoflow import InfoFlow
from cached_rag.methods.parse import ALONE, parse_method
from cached_rag.methods.prophetkv import ProphetKV
from cached_rag.methods.question import QuestionSelector
from cached_rag.methods.random_rows import Random
from cached_rag.methods.reuse import Reuse
from cached_rag.methods.union import Union

__all__ = [
    "A3",
    "ALONE",
    "AnchorFlow",
    "CacheBlend",
    "Epic",
    "InfoFlow",
    "LayerCheck",
    "Layout",
    "ProphetKV",
    "QuestionSelector",
    "Random",
    "Reuse",
    "SELECTORS",
    "Selector",
    "Union",
    "parse_method",
]

SELECTORS: dict[str, type[Selector]] = {
    "a3": A3,
    "anchorflow": AnchorFlow,
    "cacheblend": CacheBlend,
    "epic": Epic,
    "infoflow": InfoFlow,
    "prophetkv": ProphetKV,
    "random": Random,
    "reuse": Reuse,
}
