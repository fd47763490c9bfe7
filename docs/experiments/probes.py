"""Ways for a question to choose tokens that only `bench mixing` compares; no method has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 (torch's own name)

from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.backends.transformers.row_pass import Decoder
from cached_rag.errors import ConfigError
from cached_rag.methods import Epic, InfoFlow, Layout


@dataclass(frozen=True)
class WholeChunks(InfoFlow):
    """The chunks that the question attends to most, from their first token to their last."""

    count: int = 1

    def choose(self, scores: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The `count` chunks with the highest sums."""
        scores = scores.mean(dim=0)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        runs = sorted(layout.modules, key=lambda run: float(scores[slice(*run)].sum()))
        for run in runs[-self.count :]:
            chosen[slice(*run)] = True
        return chosen


@dataclass(frozen=True)
class Watching(InfoFlow):
    """Keeps what it is shown: (num_late_layers, seq_len), the question's attention to tokens."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def choose(self, scores: torch.Tensor, layout: Layout) -> torch.Tensor:
        """As `InfoFlow`."""
        self.seen.append(scores)
        return super().choose(scores, layout)


@dataclass(frozen=True)
class OneLayer(InfoFlow):
    """By the question's attention in the first of the late layers, where the probe ends."""

    def observed_layers(self, layout: Layout) -> tuple[int, ...]:
        """The one at `depth`."""
        return super().observed_layers(layout)[:1]


def over_anchors(layout: Layout, anchor_tokens: int = 8) -> type[Rows]:
    """Rows that see of each reused chunk its first tokens alone, and all other tokens.

    So the question is computed as in QCFuse (https://arxiv.org/abs/2606.05875): only these tokens'
    values enter it. All keys are still scored by it where it is observed.
    """
    seen = ~layout.reused | Epic(anchor_tokens).first_rows(layout)

    class OverAnchors(Rows):
        def attend(
            self,
            query: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            scale: float | None,
            window: int | None,
            softcap: float | None = None,
        ) -> torch.Tensor:
            """As `Rows.attend`, masked."""
            if window is not None or softcap is not None:
                raise ConfigError("mixtures need full attention in every layer, without a softcap")
            slots = torch.arange(keys.shape[2], device=keys.device)
            mask = (slots <= self.slots[:, None]) & seen[: keys.shape[2]].to(keys.device)
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )

    return OverAnchors


@contextmanager
def deep_norms(decoder: Decoder) -> Iterator[list[torch.Tensor]]:
    """Collects, of each pass, the (num_tokens,) norms of what the last layer but one puts out.

    SpecCache (https://aclanthology.org/2026.acl-long.859) takes those of a small model that reads
    the whole prompt for a sign of which tokens the large one must recompute. Those of the model
    itself are what the small one stands for. (The last layer computes only what logits need.)
    """
    norms: list[torch.Tensor] = []

    def note(_: torch.nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        norms.append(hidden[0].float().norm(dim=-1))

    hook = decoder.layers[-2].register_forward_hook(note)
    try:
        yield norms
    finally:
        hook.remove()
