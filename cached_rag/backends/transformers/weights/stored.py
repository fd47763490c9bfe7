"""Loads models whose folder holds some weights in 4-bit groups; `gguf.py` writes such folders.

transformers loads the weights; this tells it, as its quantizers do, which linear layers are stored
in which form. Afterwards every layer is an ordinary one that remembers its stored form, or one
that holds nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from cached_rag.backends.transformers.weights.groups import GROUP, Groups, joined

METHOD = "cached_rag"


@register_quantization_config(METHOD)
class StoredConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Which weights of a folder are stored in fewer bits than their dtype, by module.

    Attributes:
        int4: linear layers stored as `Groups`.
        int8: layers stored in bf16 whose origin had five to eight bits.
    """

    def __init__(self, int4: Sequence[str] = (), int8: Sequence[str] = (), **_: Any) -> None:
        self.quant_method = METHOD
        self.int4, self.int8 = list(int4), list(int8)


class StoredLinear(nn.Module):
    """A linear layer as a folder holds it. It computes slowly: it makes its weights each time."""

    levels: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, groups: Groups, bias: nn.Parameter | None) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.bias = groups.shape, bias
        for name, part in vars(groups).items():
            self.register_buffer(name, part)

    @classmethod
    def like(cls, linear: nn.Linear) -> StoredLinear:
        """A layer of the same shape, without content."""
        rows, columns = linear.out_features, linear.in_features
        levels = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
        sides = torch.empty(2, rows, columns // GROUP, dtype=torch.float32, device="meta")
        return cls(Groups(levels, *sides), linear.bias)

    @classmethod
    def joined(cls, linears: Sequence[StoredLinear]) -> StoredLinear:
        """A layer with the outputs of several, which become views of it."""
        biases: list[torch.Tensor] = [one.bias for one in linears if one.bias is not None]
        bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        whole, begin = cls(joined([linear.groups for linear in linears]), bias), 0
        for linear in linears:
            some = slice(begin, begin := begin + linear.out_features)
            linear.levels, linear.scales, linear.lows = vars(whole.groups[some]).values()
        return whole

    @property
    def groups(self) -> Groups:
        """Its weights."""
        return Groups(self.levels, self.scales, self.lows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., out_features) for (..., in_features)."""
        return F.linear(hidden, self.groups.dense(hidden.dtype), self.bias)


def form_of(linear: nn.Module) -> Groups | str | None:
    """What a layer is stored as: groups, "int8" for five to eight bits, None for dense weights."""
    if isinstance(linear, StoredLinear):
        return linear.groups
    found: Groups | str | None = vars(linear).get("stored")
    return found


def keep(linear: nn.Module, form: Groups | str | None) -> None:
    """Have an ordinary layer remember what it is stored as, see `form_of`."""
    vars(linear)["stored"] = form


@register_quantizer(METHOD)
class StoredQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts a `StoredLinear` where the folder has groups, before transformers loads the weights."""

    requires_calibration = True  # such weights come from a file, never from a running model

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for name in self.quantization_config.int4:
            model.set_submodule(name, StoredLinear.like(model.get_submodule(name)))

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return False

    def is_serializable(self) -> bool:
        """Whether the model can be saved as it was loaded."""
        return False
