"""What a GGUF says of itself, and whether llama.cpp's KV of such a model can be put together."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

from cached_rag.backends.untrusted import BoundedReader
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVShapes

Frequencies = list[tuple[float, ...]]
# YaRN's turns within the original context (`_kept`), unless a file has others.
_FAST, _SLOW = 32.0, 1.0


@dataclass(frozen=True)
class Facts:
    """What a GGUF says of itself."""

    library: ctypes.CDLL
    handle: int

    def text(self, key: str) -> str | None:
        """A value of its metadata; `{arch}` stands for the architecture."""
        name = key.replace("{arch}", self.architecture) if "{arch}" in key else key
        value = ctypes.create_string_buffer(256)
        got = self.library.llama_model_meta_val_str(self.handle, name.encode(), value, len(value))
        return value.value.decode(errors="replace") if got >= 0 else None

    def number(self, key: str, otherwise: float) -> float:
        """A number of its metadata."""
        found = self.text(key)
        return otherwise if found is None else float(found)

    @property
    def architecture(self) -> str:
        """Such as "llama"."""
        return self.text("general.architecture") or ""


class FileOutline(BoundedReader):
    """A GGUF's fields and tensors, without what is in lists.

    Of a vocabulary of 150,000 tokens gguf's own reader makes objects that take 500 MB.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = int(self._get(orig_offs, np.uint32)[0])
        count = self._length(orig_offs)
        end = orig_offs + 12
        for _ in range(count):
            end += super()._get_field_parts(end, kind)[0]
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]


def check_kind(facts: Facts, reader: FileOutline, name: str) -> None:
    """See that a model's KV is one plain cache.

    Raises:
        ModelError: it is not.
    """
    library, tensors = facts.library, {tensor.name for tensor in reader.tensors}

    def has(key: str) -> bool:
        return f"{facts.architecture}.{key}" in reader.fields

    kinds = {
        "it has recurrent layers": library.llama_model_is_recurrent(facts.handle)
        or library.llama_model_is_hybrid(facts.handle),
        "its positions have several axes": has("rope.dimension_sections"),
        "it has sliding windows": facts.number("{arch}.attention.sliding_window", 0),
        "its scores depend on distance (ALiBi)": has("attention.max_alibi_bias"),
        "its rotation changes with the context's length": "rope_factors_long.weight" in tensors,
    }
    if wrong := [why for why, is_so in kinds.items() if is_so]:
        raise ModelError(
            f"the KV of {name} cannot be put together in llama.cpp: {' and '.join(wrong)}; use "
            'backend="transformers"'
        )


def shapes_of(facts: Facts) -> KVShapes:
    """The model's KV as llama.cpp keeps it."""
    c, model = facts.library, facts.handle
    dim = c.llama_model_n_embd(model) // max(1, c.llama_model_n_head(model))
    return KVShapes(
        num_layers=c.llama_model_n_layer(model),
        num_kv_heads=c.llama_model_n_head_kv(model),
        head_dim=int(facts.number("{arch}.attention.key_length", dim)),
        value_dim=int(facts.number("{arch}.attention.value_length", dim)),
        dtype=torch.float16,
        device=torch.device("cpu"),
    )


def frequencies_of(facts: Facts, reader: FileOutline) -> Frequencies:
    """Rotary frequencies that the file may mean: as they are, scaled, or with a factor each."""
    dim = int(facts.number("{arch}.rope.dimension_count", 0)) or shapes_of(facts).head_dim
    base = facts.number("{arch}.rope.freq_base", 10_000.0)
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaled = plain / (facts.number("{arch}.rope.scaling.factor", 1.0) or 1.0)
    found = [plain, scaled]
    fast = facts.number("{arch}.rope.scaling.yarn_beta_fast", _FAST)
    slow = facts.number("{arch}.rope.scaling.yarn_beta_slow", _SLOW)
    # llama.cpp reads these numbers for some architectures only.
    for turns in ((_FAST, _SLOW), (fast, slow)):
        kept = _kept(facts, dim, base, *turns)
        found.append(kept * plain + (1 - kept) * scaled)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            found.append(plain / torch.tensor(tensor.data, dtype=torch.float64).flatten())
    return list(dict.fromkeys(tuple(one.tolist()) for one in found if one.isfinite().all()))


def _kept(facts: Facts, dim: int, base: float, fast: float, slow: float) -> torch.Tensor:
    """YaRN: of each frequency, the share that is not scaled; (dim / 2,).

    It is 1 for those that turn more than `fast` times within the original context, 0 for those that
    turn less than `slow` times, and falls evenly between (arXiv 2309.00071, section 3.2).
    """
    trained = facts.number("{arch}.context_length", 0.0)
    length = facts.number("{arch}.rope.scaling.original_context_length", trained)
    turns = torch.tensor([fast, slow], dtype=torch.float64)
    bounds = dim * (length / (turns * 2 * torch.pi)).log() / (2 * math.log(max(base, 2.0)))
    first, last = bounds[0].floor().clamp(min=0), bounds[1].ceil().clamp(max=dim - 1)
    at = torch.arange(dim // 2, dtype=torch.float64)
    return 1 - ((at - first) / (last - first).clamp(min=0.001)).clamp(0, 1)
