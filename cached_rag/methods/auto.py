"""`auto`: the method that came nearest to full prefill at the least recompute, where it can be had.

docs/quality.md has the figures that chose it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cached_rag.methods.anchorflow import AnchorFlow


@dataclass(frozen=True)
class Auto(AnchorFlow):
    """`anchorflow` with its defaults; on a model that cannot do that, what it can do."""

    gives_way: ClassVar[bool] = True
    reported_as: ClassVar[str] = "anchorflow"
