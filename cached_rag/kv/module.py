"""One prompt module's keys and values. Knows shapes; knows no model, store or position rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cached_rag.errors import ConfigError


class LayerSource(Protocol):
    """A module's KV that is taken layer by layer, and may be in memory or on disk."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens."""
        ...

    @property
    def start(self) -> int:
        """Position of the first token when the keys were computed."""
        ...

    @property
    def seq_len(self) -> int:
        """Number of tokens."""
        ...

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each (num_kv_heads, seq_len, dim).

        Raises:
            CorruptBlobError: it had to be read, and is damaged.
        """
        ...

    def slice(self, begin: int, end: int) -> LayerSource:
        """Tokens `begin` to `end` (exclusive)."""
        ...


@dataclass(frozen=True)
class ModuleKV:
    """Keys and values of consecutive tokens, in all layers.

    Attributes:
        token_ids: the tokens, `seq_len` of them.
        start: position of the first token when the keys were computed (>= 0).
        keys: (num_layers, num_kv_heads, seq_len, head_dim), rotated for the positions `start`,
            `start + 1`, ...
        values: (num_layers, num_kv_heads, seq_len, value_dim).

    Raises:
        ConfigError: the shapes do not agree.
    """

    token_ids: tuple[int, ...]
    start: int
    keys: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tensor.ndim != 4 or tensor.shape[2] != len(self.token_ids):
                raise ConfigError(
                    f"{name} have shape {tuple(tensor.shape)}, expected "
                    f"(num_layers, num_kv_heads, {len(self.token_ids)}, head_dim)"
                )
        if self.keys.shape[0] != self.values.shape[0]:
            raise ConfigError("keys and values have different numbers of layers")
        if self.start < 0:
            raise ConfigError(f"start is a position and cannot be {self.start}")

    @property
    def seq_len(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, as views."""
        return self.keys[index], self.values[index]

    def slice(self, begin: int, end: int) -> ModuleKV:
        """Tokens `begin` to `end` (exclusive, within the module) as views, not copies."""
        return ModuleKV(
            self.token_ids[begin:end],
            self.start + begin,
            self.keys[:, :, begin:end],
            self.values[:, :, begin:end],
        )
