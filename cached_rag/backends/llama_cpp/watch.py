"""What the question attends to in llama.cpp, layer by layer.

llama.cpp tells of each tensor before it computes it, and hands out those that are asked for
(`llama_context_params.cb_eval`). It calls them by what they are and by their layer: "Qcur-3" has
the queries, last of all when they are rotated, and "kqv_out-3" what attention makes of them. So a
layer's weights are computed here, from its queries and the keys in the buffer.

Nothing in llama.cpp's interface promises these names, and a file says only in part how its layers
score. So attention is watched only where queries, keys and values together give what attention gave
(`Attention.of`). Knows tensors; knows no prompt.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cached_rag.backends.transformers.attention import Rows
from cached_rag.backends.transformers.kernels import KV, Scoring
from cached_rag.backends.transformers.row_cache import head_mean
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import each
from cached_rag.methods.base import Layout, QuestionSelector

_QUERIES = ("Qcur-{}", "Qcur_normed-{}", "Qcur_pos-{}")
_OUTPUT = "kqv_out-{}"
# Most that attention may differ from llama.cpp's own, as a share of its size. Up to .001 was seen
# (three real models); another layer's KV, or another scale, gave .2 or more.
_TOLERANCE = 0.02
_KIND = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
Kind = tuple[int, bool]  # a layer, and whether it is attention's output or else its queries
Found = dict[Kind, list[torch.Tensor]]


class Watch:
    """Copies tensors out of the passes of a context.

    Attributes:
        callback: for `llama_context_params.cb_eval`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Watch nothing yet."""
        self._c = library
        self._wanted: dict[bytes, Kind] = {}
        self._copies_outputs = False
        self._query = torch.empty(0)
        self._found: Found = {}
        self._function = _KIND(self._see)  # kept, as llama.cpp has but its address
        self.callback = ctypes.cast(self._function, ctypes.c_void_p)

    @contextmanager
    def over(self, layers: Sequence[int], *, outputs: bool = False) -> Iterator[Found]:
        """Inside this context, queries of some layers are kept.

        Args:
            outputs: keep what attention makes of them, too.

        Returns:
            fp32 parts, for llama.cpp computes long texts in several: of (num_tokens, num_heads,
            head_dim) queries, and of (num_tokens, num_heads, value_dim) outputs. What has another
            name or dtype is missing.
        """
        self._found, self._copies_outputs = defaultdict(list), outputs
        self._wanted = {_OUTPUT.format(layer).encode(): (layer, True) for layer in layers}
        for name in _QUERIES:
            self._wanted |= {name.format(layer).encode(): (layer, False) for layer in layers}
        try:
            yield self._found
        finally:
            self._wanted = {}

    def _see(self, tensor: int, is_asked: bool, _: object) -> bool:
        """Say whether a tensor is wanted; or copy it, and say that the pass may go on."""
        if not self._wanted:
            return not is_asked
        kind = self._wanted.get(self._c.ggml_get_name(tensor))
        if kind is None:
            return not is_asked
        layer, is_output = kind
        if is_asked:
            if is_output and len(self._query):  # then no other query of this layer comes
                self._found[layer, False].append(self._query)
                self._query = torch.empty(0)
            return self._copies_outputs or not is_output
        size, count = self._c.ggml_nbytes(tensor), self._c.ggml_nelements(tensor)
        if size == torch.float32.itemsize * count:
            copied = torch.empty(count)
            self._c.ggml_backend_tensor_get(tensor, copied.data_ptr(), 0, size)
            if is_output:
                self._found[kind].append(copied)
            else:
                self._query = copied
        return True


@dataclass(frozen=True)
class Attention:
    """How a model's layers attend.

    Attributes:
        watch: of the context that computes them.
        layers: for each layer of the model, which of a buffer's has its KV, and how it scores.
    """

    watch: Watch
    layers: tuple[tuple[int, Scoring], ...]

    @classmethod
    def of(
        cls,
        watch: Watch,
        found: Found,
        kv: KVBuffer,
        ways: Sequence[Sequence[Scoring]],
        windows: Sequence[int | None],
    ) -> Attention | None:
        """Learn it from a pass; None if attention is not what queries and KV give.

        Args:
            found: queries and outputs of all layers.
            kv: of the pass's tokens, the first of their prompt.
            ways: how each of the model's layers may score, without windows.
            windows: of the buffer's layers.
        """
        keys, values = (each(side[:, 0], torch.Tensor.float) for side in (kv.keys, kv.values))
        layers = []
        for layer, how in enumerate(ways):
            if not found[layer, False] or not found[layer, True]:
                return None
            query, output = (torch.cat(found[layer, is_output]) for is_output in (False, True))
            tried = [
                (at, way._replace(window=window))
                for at, window in enumerate(windows)
                for way in how
            ]
            errors = [_error(query, output, keys[at], values[at], way) for at, way in tried]
            error, (at, way) = min(zip(errors, tried, strict=True), key=lambda one: one[0])
            if not error <= _TOLERANCE:
                return None
            layers.append((at, way))
        return cls(watch, tuple(layers))

    @contextmanager
    def watched(
        self, method: QuestionSelector, layout: Layout
    ) -> Iterator[Callable[[KVBuffer], torch.Tensor]]:
        """Inside this context the question is computed, and nothing else.

        Returns:
            What gives a method's scores afterwards, (observed_layers, seq_len) fp32, of a buffer
            that has the KV of the question and of what it saw.
        """
        observed = method.observed_layers(layout)
        seen = ~layout.fresh
        seen[layout.question :] = True
        slots = seen.nonzero().squeeze(1)
        count = len(seen) - layout.question
        rows = Rows(torch.arange(len(slots) - count, len(slots)), len(slots))

        def scores(buffer: KVBuffer) -> torch.Tensor:
            every = torch.zeros(len(observed), len(seen))
            for place, layer in zip(every, observed, strict=True):
                at, how = self.layers[layer]
                keys = buffer.keys[at][0][:, slots].float()
                query = torch.cat(found[layer, False]).view(count, -1, keys.shape[2])
                weights = head_mean(query.transpose(0, 1), keys, rows, how)
                place[slots] = method.score(weights)
            return every

        with self.watch.over(observed) as found:
            yield scores


def _error(
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    how: Scoring,
) -> float:
    """How far attention of a prompt's first tokens over these keys and values is from `output`."""
    heads, count, dim = keys.shape
    groups, rest = divmod(query.numel(), heads * count * dim)
    if rest or output.numel() != groups * heads * count * values.shape[2]:
        return math.inf
    query = query.view(1, count, -1, dim).transpose(1, 2)
    rows = Rows(torch.arange(count), count)
    found = rows.attend(query, KV(keys[None], values[None]), how).transpose(1, 2).flatten()
    return float((found - output).norm() / output.norm())
