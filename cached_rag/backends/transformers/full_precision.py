"""Makes a model of any dtype compute in fp32 while it is examined.

In bf16, two correct computations of the same thing may differ by more than a wrong one does; in
fp32 they do not. Only the layer that is running has fp32 copies of its weights, in memory that all
layers share. So no more memory is needed than for the largest layer. Knows torch modules; does not
know what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

_HALF = (torch.bfloat16, torch.float16)


class _Loan:
    """Lends a module fp32 copies of its tensors, and takes them back.

    Args:
        scratch: copies made for earlier modules, by name; one of the right shape is reused.
        exempt: `id`s of tensors that stay in their dtype.
    """

    def __init__(self, scratch: dict[str, torch.Tensor], exempt: frozenset[int]) -> None:
        self._scratch, self._exempt = scratch, exempt
        self._owed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lend(self, module: torch.nn.Module) -> None:
        """Replace the data of a module's half-precision tensors by fp32 copies."""
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if tensor.dtype in _HALF and id(tensor) not in self._exempt:
                self._owed.append((tensor, tensor.data))
                tensor.data = self._copy(name, tensor.data)

    def settle(self) -> None:
        """Give all tensors their own data back."""
        while self._owed:
            tensor, data = self._owed.pop()
            tensor.data = data

    def _copy(self, name: str, data: torch.Tensor) -> torch.Tensor:
        kept = self._scratch.get(name)
        if kept is None or kept.shape != data.shape or kept.device != data.device:
            kept = self._scratch[name] = torch.empty_like(data, dtype=torch.float32)
        return kept.copy_(data)


@contextmanager
def in_float32(model: Any, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside this context, everything between embeddings and head is computed in fp32.

    Args:
        model: a transformers causal LM; afterwards its weights are as before.
        layers: its decoder layers.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = [module for module in (embeddings, head) if module is not None]
    later = chain.from_iterable(chain(m.parameters(), m.buffers()) for m in (*tables, *layers))
    rest, one = _Loan({}, frozenset(map(id, later))), _Loan({}, frozenset())
    handles = [embeddings.register_forward_hook(lambda _, __, output: output.float())]
    if head is not None:
        handles.append(head.register_forward_pre_hook(_narrow))
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda layer, _: one.lend(layer)))
        handles.append(layer.register_forward_hook(lambda *_: one.settle(), always_call=True))
    try:
        rest.lend(model)
        yield
    finally:
        for handle in handles:
            handle.remove()
        one.settle()
        rest.settle()


def _narrow(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    held = chain(head.parameters(), head.buffers())
    dtype = next(tensor.dtype for tensor in held if tensor.is_floating_point())
    return tuple(tensor.to(dtype) for tensor in inputs)
