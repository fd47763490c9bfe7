"""Reuse without repair: Prompt Cache (section 3.3) with position-corrected keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cached_rag.methods.base import Layout, StaticSelector


@dataclass(frozen=True)
class Reuse(StaticSelector):
    """Computes only what no module covers."""

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows."""
        return layout.live
