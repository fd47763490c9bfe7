"""Reuse without repair: Prompt Cache (section 3.3) with position-corrected keys; or of less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cached_rag.methods.base import Layout, StaticSelector, Takes


@dataclass(frozen=True)
class Reuse(StaticSelector):
    """Computes only what no module covers."""

    def first_rows(self, layout: Layout) -> torch.Tensor:
        """The live rows."""
        return layout.live


@dataclass(frozen=True)
class Prefix(Reuse):
    """Takes only what full prefill would compute: the prompt's head, and what stands right behind.

    Exact, as an engine's prefix caching is.
    """

    takes: ClassVar[Takes] = Takes.EXACT


@dataclass(frozen=True)
class Full(Reuse):
    """Takes nothing: full prefill, with which all others are compared."""

    takes: ClassVar[Takes] = Takes.NOTHING
