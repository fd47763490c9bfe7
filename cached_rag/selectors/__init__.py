"""Methods by name: how modules' KV is reused and repaired. A new method is one line here."""

from __future__ import annotations

from cached_rag.selectors.a3 import A3
from cached_rag.selectors.anchorflow import AnchorFlow
from cached_rag.selectors.base import LayerCheck, Layout, Selector
from cached_rag.selectors.cacheblend import CacheBlend
from cached_rag.selectors.epic import Epic
from cached_rag.selectors.infoflow import InfoFlow
from cached_rag.selectors.parse import ALONE, parse_method
from cached_rag.selectors.prophetkv import ProphetKV
from cached_rag.selectors.question import QuestionSelector
from cached_rag.selectors.random_rows import Random
from cached_rag.selectors.reuse import Reuse
from cached_rag.selectors.union import Union

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
