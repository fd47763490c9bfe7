"""Attention of many answers over KV that they share: read once for all of them, kept once.

Softmax attention over several runs of keys is the average of the attention over each, weighted by
the runs' sums of exponentials (RelayAttention, section 3.2; the sums travel as their logarithms).
There one prefix is shared; here any module that several prompts have at the same positions is, and
each row's own tokens are one more run. Knows tensors; knows no prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cached_rag.assemble import KVBuffer


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of keys and values that rows share.

    Attributes:
        keys: (num_layers, num_kv_heads, seq_len, head_dim), rotated for where they stand.
        values: (num_layers, num_kv_heads, seq_len, value_dim).
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


class SharedKV:
    """One prompt's KV: segments shared with others, and a buffer of its own for all else.

    Attributes:
        segments: (first slot, segment), ascending.
        own: KV of the other slots, one behind the other.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, Segment]],
        own: KVBuffer,
        slots: Sequence[int],
        positions: torch.Tensor | None,
    ) -> None:
        """Join what is there.

        Args:
            slots: that `own` holds so far, ascending.
            positions: of all slots, where they are not the slots (`KVBuffer.positions`).
        """
        self.segments, self.own = tuple(segments), own
        self._slots, self._positions = list(slots), positions

    def position(self, slot: int) -> int:
        """Where the token in a slot stands."""
        return slot if self._positions is None else int(self._positions[slot])

    def open_slot(self, slot: int) -> None:
        """Make room for the token to come; its slot follows all others."""
        if not self._slots or self._slots[-1] < slot:
            self._slots.append(slot)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the last slot's (1, num_kv_heads, 1, dim) keys and values in."""
        at = len(self._slots) - 1
        self.own.write(layer, slice(at, at + 1), keys, values)

    def runs(
        self, layer: int, window: int | None
    ) -> list[tuple[tuple[int, int], torch.Tensor, torch.Tensor]]:
        """What the last slot sees: (name, keys, values), (num_kv_heads, num_keys, dim) each.

        Runs of one name are the same for all rows.
        """
        oldest = 0 if window is None else max(0, self._slots[-1] - window + 1)
        found = []
        for begin, segment in self.segments:
            skipped = max(0, oldest - begin)
            if skipped < segment.keys.shape[2]:
                keys, values = segment.keys[layer, :, skipped:], segment.values[layer, :, skipped:]
                found.append(((id(segment), skipped), keys, values))
        first, last = bisect_left(self._slots, oldest), len(self._slots)
        keys = self.own.keys[layer, 0, :, first:last]
        values = self.own.values[layer, 0, :, first:last]
        return [*found, ((id(self), first), keys, values)]


def relay_attention(
    query: torch.Tensor,
    rows: Sequence[SharedKV],
    layer: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of each row's last token over all that it sees.

    Args:
        query: (batch, num_heads, 1, head_dim), of `rows` in this order.
        scale: None for 1 / sqrt(head_dim).

    Returns:
        (batch, num_heads, 1, value_dim).
    """
    groups: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, list[int]]] = {}
    for index, row in enumerate(rows):
        for name, keys, values in row.runs(layer, window):
            groups.setdefault(name, (keys, values, []))[2].append(index)
    scaled = query[:, :, 0] * (query.shape[-1] ** -0.5 if scale is None else scale)
    heads, value_dim = query.shape[1], rows[0].own.values.shape[-1]
    total = torch.full((len(rows), heads), -torch.inf, device=query.device)
    output = torch.zeros(len(rows), heads, value_dim, device=query.device)
    for keys, values, members in groups.values():
        part, weight = _attend(scaled[members], keys, values)
        merged = torch.logaddexp(total[members], weight)
        kept = (total[members] - merged).exp()[..., None]
        added = (weight - merged).exp()[..., None]
        output[members] = output[members] * kept + part * added
        total[members] = merged
    return output.to(query.dtype)[:, :, None]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of several rows over one run, and the logarithm of its sum of exponentials.

    Args:
        query: (rows, num_heads, head_dim), scaled.
        keys, values: (num_kv_heads, num_keys, dim).

    Returns:
        (rows, num_heads, value_dim) and (rows, num_heads), both fp32.
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[0]
    # Rows and the heads of a group side by side: each key is read once for all of them.
    folded = query.view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = (folded @ keys.transpose(1, 2)).float()
    weight = scores.logsumexp(-1)
    part = (scores - weight[..., None]).exp().to(values.dtype) @ values
    part = part.float().view(kv_heads, rows, -1, values.shape[-1]).transpose(0, 1)
    weight = weight.view(kv_heads, rows, -1).transpose(0, 1)
    return part.reshape(rows, heads, -1), weight.reshape(rows, heads)
