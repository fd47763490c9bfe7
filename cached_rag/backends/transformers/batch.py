"""One forward pass for several rows at once; each row computes some tokens of its own KV.

A row with one new token is a decoding step, a row with many is a piece of a prefill, and a row with
scattered tokens is a piece of a repair (CacheBlend, figure 15c); one pass may have all of them.
Linear layers read the weights once for all tokens, and attention reads a run of KV that
rows share once for all these rows. Rows may differ in length and lie in different buffers. Knows
nothing of sampling or of requests.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import Cache

from cached_rag.backends.base import StepInput
from cached_rag.backends.transformers.attention import (
    Padded,
    Part,
    Rows,
    attending,
    relay_attention,
)
from cached_rag.backends.transformers.decoder import Decoder
from cached_rag.backends.transformers.kernels import KV, Scoring, attend, first_seen
from cached_rag.backends.transformers.prefill import RowPass
from cached_rag.backends.transformers.recording import naming
from cached_rag.backends.transformers.row_cache import Drift, RowCache, numbered_from
from cached_rag.backends.transformers.states import windows_before
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import KVShapes, by_layer, stacks_of
from cached_rag.kv.rows import Piece, RowKV, Run, Slab, SlabRow, mask_of, pieces


def _part(piece: Piece, tokens: slice | torch.Tensor) -> Part:
    """A run of a buffer, one view per layer, and the batch's tokens that see it."""
    at = (slice(None), slice(None), slice(None), slice(piece.begin, piece.end))
    return Part(by_layer(piece.buffer.keys[at]), by_layer(piece.buffer.values[at]), tokens)


def _padded(slab: Slab, members: Sequence[tuple[SlabRow, Piece, int]]) -> Padded:
    """Rows of one slab with one new token each, as one view per layer.

    Args:
        members: for each row: the row, its piece of KV, and its token's index in the batch.
    """
    spans = {row.row: (piece.begin, piece.end) for row, piece, _ in members}
    first, last = min(spans), max(spans)
    keys, values = slab.whole.keys, slab.whole.values
    mask = mask_of(spans, first, last, stacks_of(keys)[0])
    at = (slice(None), slice(first, last + 1), slice(None), slice(0, mask.shape[3]))
    return Padded(
        by_layer(keys[at]),
        by_layer(values[at]),
        mask,
        torch.tensor([token for *_, token in members], device=keys.device),
        torch.tensor([row.row - first for row, *_ in members], device=keys.device),
        torch.tensor([piece.end - 1 for _, piece, _ in members], device=keys.device),
    )


class BatchCache(Cache):  # type: ignore[misc]
    """A transformers cache that writes each row's KV to the row's buffer, and attends there.

    In every layer, the model calls `update` first and then, through the attention function,
    `attend`. A row that computes tokens at any slots of its own buffer does both through a
    `RowCache`.

    Attributes:
        tokens: which of the batch's tokens are each row's.
        shared: runs of keys that their tokens see whole.
        private: the rows' own keys.
        is_read_again: some layers keep nothing, and attend to what an earlier one keeps.
    """

    def __init__(self, batch: Sequence[StepInput], windows: tuple[int | None, ...]) -> None:
        super().__init__(layers=[])
        self.windows, self.is_read_again = windows, False
        self._batch = batch
        ends = [*accumulate(len(ahead.token_ids) for ahead in batch)]
        self.tokens = [slice(*run) for run in pairwise([0, *ends])]
        self._by_row = list(zip(batch, self.tokens, strict=True))
        self._longest = max(ahead.end for ahead in batch)
        self.shared: list[Part] = []
        self.private: list[Part | Padded] = []
        self._scattered: list[tuple[RowCache, slice]] = []
        self._fresh: list[Part | Padded] = []
        self._last = 0  # no token behind this one looks at what is divided here
        for ahead, tokens in self._by_row:
            if ahead.slots is None:
                self._last = tokens.stop
            else:
                self._scattered.append((_row_cache(ahead, windows), tokens))
        self._divide()
        # Keys and values that layers gave to be kept: the last one's, or all.
        self._given: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def _divide(self) -> None:
        """Divide the KV into runs that are seen whole, and runs that end with new tokens.

        Rows with scattered tokens have none: each of them attends by itself.
        """
        slabs: dict[Slab, list[tuple[SlabRow, Piece, int]]] = {}
        runs = [a.kv.every_run(a.end) if a.slots is None else () for a in self._batch]
        for piece in pieces(runs):
            row = self._ends_with(piece)
            if row is None:
                self.shared.append(_part(piece, self._seeing(piece)))
                continue
            tokens, own = self.tokens[row], piece.buffer
            if isinstance(own, SlabRow) and tokens.stop - tokens.start == 1:
                slabs.setdefault(own.slab, []).append((own, piece, tokens.start))
            else:
                kv = self._batch[row].kv
                self.private.append(_part(piece, tokens))
                self._fresh.append(_part(replace(piece, begin=kv.at(kv.length)), tokens))
        together = [_padded(slab, members) for slab, members in slabs.items()]
        self.private += together
        self._fresh += together

    def _ends_with(self, piece: Piece) -> int | None:
        """The row whose new tokens end a piece; None if there is none."""
        if len(piece.rows) > 1:
            return None
        ahead = self._batch[piece.rows[0]]
        is_own = piece.buffer is ahead.kv.own and piece.end == ahead.kv.at(ahead.end)
        return piece.rows[0] if is_own else None

    def _seeing(self, piece: Piece) -> slice | torch.Tensor:
        """The batch's tokens that belong to a piece's rows."""
        if len(piece.rows) == len(self._batch):
            return slice(None)  # then none is scattered
        if len(piece.rows) == 1:
            return self.tokens[piece.rows[0]]
        runs = [self.tokens[row] for row in piece.rows]
        numbers = [i for run in runs for i in range(run.start, run.stop)]
        return torch.tensor(numbers, device=piece.buffer.keys.device)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each row's part of (1, num_kv_heads, num_tokens, dim) to the row's buffer."""
        if not self.is_read_again:
            self._given.clear()
        self._given.append((layer_idx, key_states, value_states))
        for fresh in self._fresh:
            fresh.write(layer_idx, key_states, value_states)
        for row, at in self._scattered:
            row.update(key_states[:, :, at], value_states[:, :, at], layer_idx)
        return key_states, value_states

    def attend(self, layer: int, query: torch.Tensor, kv: KV, how: Scoring) -> torch.Tensor:
        """(1, num_heads, num_tokens, value_dim) for a (1, num_heads, num_tokens, dim) query.

        Raises:
            ModelError: keys or values are not those that were given to be kept.
        """
        if self._given:
            held = (at for at, *own in self._given if kv.keys is own[0] and kv.values is own[1])
            found_at = next(held, None)
            if found_at is None:
                raise ModelError("the model attends to other keys and values than it caches")
            layer = found_at
        appended = query[0, :, : self._last].transpose(0, 1).contiguous()
        if not self._scattered:
            return self._behind(layer, appended, how).transpose(0, 1)[None]
        found = query.new_empty(*query.shape[:3], kv.values.shape[-1])
        if self._last:
            found[0, :, : self._last] = self._behind(layer, appended, how).transpose(0, 1)
        for row, at in self._scattered:
            found[:, :, at] = row.attend(layer, query[:, :, at], row.seen(layer), how)
        return found

    def _behind(self, layer: int, query: torch.Tensor, how: Scoring) -> torch.Tensor:
        """The same for tokens that are appended, rows first; of others before them anything."""
        if how.window is not None and how.window < self._longest:
            return self._within(layer, query, how.window, how)
        return relay_attention(query, self.shared, self.private, layer, how)

    def _within(self, layer: int, query: torch.Tensor, window: int, how: Scoring) -> torch.Tensor:
        """Attention of single tokens over their sliding windows, row by row; no run is shared."""
        width = self._batch[0].kv.own.values[layer].shape[-1]
        output = query.new_empty(*query.shape[:2], width)
        for ahead, tokens in self._by_row:
            if ahead.slots is not None:
                continue
            seen = _runs_from(first_seen(window, ahead.end - 1), ahead)
            kv = _joined(seen, layer)
            folded = query[tokens].view(1, kv.keys.shape[1], -1, query.shape[-1])
            found, lse = attend(folded, kv, how)
            output[tokens] = how.with_sinks(found.flatten(1, 2), lse.flatten(1, 2))
        return output

    def preceding(self, layer: int, inputs: torch.Tensor, count: int) -> torch.Tensor:
        """See `RowCache.preceding`."""
        values = inputs[:, None]
        self.update(values[..., :0], values, layer)
        found = inputs.new_empty(1, inputs.shape[1], count + 1, inputs.shape[2])
        for ahead, tokens in self._by_row:
            kept, first = ahead.kv.own.values[layer], 0
            if ahead.slots is None:
                first = max(0, ahead.kv.length - count)
                kept = _joined(_runs_from(first, ahead), layer).values
            slots = torch.tensor(list(ahead.at), device=inputs.device) - first
            found[:, tokens] = windows_before(kept, slots, count)
        return found

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """The number of slots of the longest row; for a layer, see `RowCache.get_seq_length`."""
        if layer_idx is None:
            return self._longest
        slots = [slot for ahead in self._batch for slot in ahead.at]
        return numbered_from(torch.tensor(slots, device=self._batch[0].kv.own.keys.device))

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """The same for masks."""
        return self.get_seq_length()


def _row_cache(ahead: StepInput, windows: tuple[int | None, ...]) -> RowCache:
    """Of a row that computes tokens at any slots of its own buffer."""
    own = ahead.kv.own
    rows = Rows(torch.tensor(ahead.slots, device=own.keys.device), ahead.end)
    found = RowCache(own, rows, len(rows), windows)
    found.drift = Drift(ahead.drifting) if ahead.drifting else None
    return found


def _runs_from(first: int, ahead: StepInput) -> list[Run]:
    """Where a row's slots from `first` on lie, its new tokens' included."""
    runs = (run.cut(first, ahead.end) for run in ahead.kv.every_run(ahead.end))
    return [run for run in runs if run is not None]


def _joined(runs: Sequence[Run], layer: int) -> KV:
    """Runs of one layer, concatenated."""
    parts = [
        KV(run.buffer.keys[layer], run.buffer.values[layer]).at(slice(run.begin, run.end))
        for run in runs
    ]
    return KV(*(torch.cat(sides, dim=2) for sides in zip(*parts, strict=True)))


@torch.inference_mode()
def keeps_what_it_reads(decoder: Decoder, shapes: KVShapes) -> bool:
    """Whether a model's layers attend to the keys and values that they cache, as they are.

    DiffLlama and JetMoE divide or repeat them first. False also if a pass for a batch fails.
    """
    row = StepInput(RowKV(KVBuffer.like(shapes, 2), 0), [1])
    try:
        with naming("a batch cannot be computed"):
            _pass(decoder, [row])
    except ModelError:
        return False
    return True


@torch.inference_mode()
def step_batch(decoder: Decoder, batch: Sequence[StepInput], *, together: bool) -> torch.Tensor:
    """See `Backend.step`.

    Args:
        together: compute all rows in one pass; else one row after another, each with one token.
    """
    # A pass changes states where they are. Of a single row nobody tries the same step again.
    kept = [(row.kv.own, row.kv.own.states) for row in batch] if len(batch) > 1 else []
    for buffer, states in kept:
        buffer.states = states and states.copy()
    try:
        if together:
            logits = _pass(decoder, batch)
        else:
            logits = torch.cat([_step(decoder, row) for row in batch])
    except BaseException:
        for buffer, states in kept:
            buffer.states = states
        raise
    for row in batch:
        if row.slots is None:
            row.kv.length = row.end
    return logits


def _pass(decoder: Decoder, batch: Sequence[StepInput]) -> torch.Tensor:
    device = batch[0].kv.own.keys.device
    cache = BatchCache(batch, decoder.windows)
    cache.is_read_again = decoder.num_keeping < len(decoder.layers)
    ids = [token for row in batch for token in row.token_ids]
    positions = [row.kv.position(slot) for row in batch for slot in row.at]
    wanted = zip(cache.tokens, batch, strict=True)
    last = [n for where, row in wanted for n in range(where.stop - row.num_logits, where.stop)]
    places = torch.tensor([positions], device=device)
    keeps = torch.tensor(last, device=device) if last else None
    inputs = decoder.inputs(torch.tensor([ids], device=device), places, cache, keeps)
    with attending(cache):
        if not last:
            decoder.network.base_model(**inputs)
            return torch.empty(0, 0, device=device)
        output = decoder.network(**inputs)
    logits: torch.Tensor = output.logits[0]
    return logits if "logits_to_keep" in inputs else logits[last]


def _step(decoder: Decoder, row: StepInput) -> torch.Tensor:
    """(1, vocab_size) logits after one more token of a row without shared runs."""
    slot = row.kv.length
    ids = torch.zeros(1, slot + 1, dtype=torch.int64)
    ids[0, slot] = row.token_ids[-1]
    return RowPass(decoder, row.kv.own, ids, torch.tensor([slot]), 1).forward().logits
