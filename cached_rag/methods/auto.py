"""`auto`, the default: AnchorFlow where a model can have it; and `fast`, which is less of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cached_rag.methods.anchorflow import AnchorFlow
from cached_rag.methods.base import Layout

# Asking computes the live tokens once more. It is left out where they are more than this share of
# the prompt, and more than this number of tokens: there it costs more than all the rest, and
# brought nothing at 3 % (docs/quality.md, "Long questions, and prompts that are half known").
_LARGE_SHARE = 0.25
_MANY = 128


@dataclass(frozen=True)
class Auto(AnchorFlow):
    """Recomputes what `anchorflow` does with its defaults: 8 anchors a chunk, and 15 %.

    Of chunks that were encoded behind others of their document it is 8 %. These shares are left out
    where the prompt's live tokens, a long question or chunks without KV, are a quarter of it and
    more than 128. Where a model's attention cannot be watched it is `cacheblend`, and where keys
    cannot be moved `prefix` or `full`; `report.notes` says so. The figures that chose it are in
    docs/quality.md.

    Paper: see `AnchorFlow`: https://arxiv.org/abs/2410.15332, https://arxiv.org/abs/2603.05353.

    Cost: the live tokens twice, the anchors and 8 to 15 %; with many live tokens these once, and
    the anchors. Use it unless you have measured another.
    """

    name: ClassVar[str] = "auto"
    # Chunks that were encoded behind others of their document are as near to full prefill with this
    # share of the ratio as others with all of it (docs/quality.md, "Behind their documents").
    settled_share: ClassVar[float] = 8 / 15
    gives_way: ClassVar[bool] = True

    def budget(self, layout: Layout) -> int:
        """How many reused tokens are recomputed besides the anchors."""
        settled = sum(int(layout.reused[begin:end].sum()) for begin, end in layout.settled)
        apart = int(layout.reused.sum()) - settled
        return int(self.recompute_ratio * (apart + self.settled_share * settled))

    def is_needed(self, layout: Layout) -> bool:
        """Whether the question is asked: not where that is dear."""
        live = int(layout.fresh.sum())
        is_dear = live > max(_MANY, _LARGE_SHARE * len(layout.fresh))
        return not is_dear and super().is_needed(layout)


@dataclass(frozen=True)
class Fast(Auto):
    """Recomputes what `auto` does, but 3 % in place of 15 % and 8 %.

    Paper: see `AnchorFlow`: https://arxiv.org/abs/2410.15332, https://arxiv.org/abs/2603.05353.

    Cost: the live tokens twice, the anchors and 3 %. Use it for prose, of which a question needs no
    more than the gist, and not where entries are alike (docs/quality.md, "Alike entries").
    """

    name: ClassVar[str] = "fast"
    settled_share: ClassVar[float] = 1.0
    recompute_ratio: float = 0.03
