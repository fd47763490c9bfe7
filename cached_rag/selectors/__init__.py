"""Methods by name: how modules' KV is reused and repaired. A new method is one line here."""

from __future__ import annotations

from cached_rag.selectors.base import LayerCheck, Layout, Selector
from cached_rag.selectors.cacheblend import CacheBlend
from cached_rag.selectors.reuse import Reuse

__all__ = ["CacheBlend", "LayerCheck", "Layout", "Reuse", "SELECTORS", "Selector"]

SELECTORS: dict[str, type[Selector]] = {
    "cacheblend": CacheBlend,
    "reuse": Reuse,
}
