"""Prompts answered together keep what they have in common once (Prompt Cache, section 3.4).

Each prompt is prefilled in a buffer of its own; then only what it computed stays its own, and
modules that were taken as they are become references. Knows placements; knows no prompt text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cached_rag.assemble import KVBuffer, KVShapes
from cached_rag.kv import ModuleKV
from cached_rag.plan import Placement
from cached_rag.relay import Segment, SharedKV
from cached_rag.stream import Prefill

_Name = tuple[int, int, int]


class Pool:
    """The segments that prompts of one batch share. Used by one thread at a time."""

    def __init__(self, shapes: KVShapes) -> None:
        self._shapes = shapes
        self._segments: dict[_Name, Segment] = {}
        # A segment's name is an address: what has been there must not go while the pool lives.
        self._held: list[ModuleKV] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self._segments.values())

    @torch.inference_mode()
    def share(self, prefill: Prefill, max_tokens: int) -> Prefill:
        """The prefilled prompt with its unrepaired modules as references; its buffer is given back.

        Args:
            max_tokens: of the answer, for which there must be room.
        """
        whole = prefill.buffer
        assert isinstance(whole, KVBuffer)
        segments = [(place.begin, self._segment(place, whole)) for place in prefill.as_they_are]
        shared = [range(place.begin, place.end) for place in prefill.as_they_are]
        slots = _rest(len(prefill.tokens), shared)
        own = KVBuffer.like(self._shapes, len(slots) + max_tokens)
        index = torch.tensor(slots, device=whole.keys.device)
        own.keys[:, :, :, : len(slots)] = whole.keys.index_select(3, index)
        own.values[:, :, :, : len(slots)] = whole.values.index_select(3, index)
        prefill.report.kv_bytes = own.keys.nbytes + own.values.nbytes
        prefill.report.shared_kv_bytes = sum(segment.nbytes for _, segment in segments)
        positions = None if whole.positions is None else whole.positions.clone()
        prefill.release()
        return replace(
            prefill, buffer=SharedKV(segments, own, slots, positions), release=lambda: None
        )

    def _segment(self, place: Placement, whole: KVBuffer) -> Segment:
        """The module as it stands in this prompt; the same for all where it stands there."""
        kv = place.kv
        assert isinstance(kv, ModuleKV)
        delta = whole.position(place.begin) - kv.start
        name = (kv.values.data_ptr(), kv.seq_len, delta)
        if name not in self._segments:
            self._held.append(kv)
            self._segments[name] = self._made(kv, place, whole, delta)
        return self._segments[name]

    def _made(self, kv: ModuleKV, place: Placement, whole: KVBuffer, delta: int) -> Segment:
        there = slice(place.begin, place.end)
        is_here = kv.keys.device == whole.keys.device
        keys = kv.keys if is_here and not delta else whole.keys[:, 0, :, there].clone()
        values = kv.values if is_here else whole.values[:, 0, :, there].clone()
        return Segment(keys, values)


def _rest(count: int, taken: Sequence[range]) -> list[int]:
    """The numbers below `count` that are in no range."""
    found: list[int] = []
    done = 0
    for each in taken:
        found += range(done, each.start)
        done = each.stop
    return [*found, *range(done, count)]
