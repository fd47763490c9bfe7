"""`auto`: the default, which is AnchorFlow where a model can have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cached_rag.methods.anchorflow import AnchorFlow


@dataclass(frozen=True)
class Auto(AnchorFlow):
    """Recomputes what `anchorflow` does with its defaults: 8 anchors a chunk, and 3 %.

    Where a model's attention cannot be watched it is `cacheblend`, and where keys cannot be moved
    `prefix` or `full`; `report.notes` says so. The figures that chose it are in docs/quality.md.

    Paper: see `AnchorFlow`: https://arxiv.org/abs/2410.15332, https://arxiv.org/abs/2603.05353.

    Cost: the live tokens twice, the anchors and 3 %. Use it unless you have measured another.
    """

    gives_way: ClassVar[bool] = True
    reported_as: ClassVar[str] = "anchorflow"
