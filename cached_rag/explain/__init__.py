"""What became of a prompt, for people: as a page, in a notebook, on a terminal."""

from __future__ import annotations

from cached_rag.explain.explanation import Explained, Explanation

__all__ = ["Explained", "Explanation"]
