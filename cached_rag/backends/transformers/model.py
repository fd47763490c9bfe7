"""A causal language model of transformers, as a backend.

Knows transformers; knows no prompt, chunk or store.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from safetensors.torch import load

from cached_rag.backends.base import Chosen, Prefilled, RepairInput, StepInput
from cached_rag.backends.machine import peak_bytes
from cached_rag.backends.transformers.batch import step_batch
from cached_rag.backends.transformers.compose import StateComposer
from cached_rag.backends.transformers.decoder import Decoder, cache_argument
from cached_rag.backends.transformers.few_bits import FewBitLinear, HalfLinear
from cached_rag.backends.transformers.packing import Format, formats
from cached_rag.backends.transformers.prefill import RowPass, choose_rows, repair_rows
from cached_rag.backends.transformers.states import LayerStates
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.layers import KVShapes
from cached_rag.kv.positions import PositionRule


@dataclass(frozen=True)
class LanguageModel:
    """A loaded transformers model and what was found out about it; implements `Backend`.

    Attributes:
        decoder: the transformers model, its layers and windows.
        weights: the format that was asked for.
        examined_s: seconds that the examination took.
        The others: see `Backend`.
    """

    name: str
    decoder: Decoder
    tokenizer: Any
    weights: Format
    shapes: KVShapes
    rule: PositionRule
    fingerprint: str
    context_length: int
    eos_ids: frozenset[int]
    num_weights: int
    composer: StateComposer | None = None
    examined_s: float = field(default=0.0, compare=False)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    # The same for every model, so no fields.
    # Measured for issue 17 with 4-bit weights on two cores: 17 to 21 ms for one token, 26 for four,
    # 41 for eight. The longer the weights are read, the less further tokens cost.
    token_price = 1 / 6

    @property
    def vocab_size(self) -> int:
        """See `Backend`."""
        return int(self.decoder.model.config.get_text_config().vocab_size)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights, in the dtype they are computed in."""
        networks = (self.decoder.model, self.decoder.network)
        few_bits = (m for m in networks[1].modules() if isinstance(m, FewBitLinear))
        held = (network.parameters() for network in networks), (m.buffers() for m in few_bits)
        tensors = chain.from_iterable(chain(*held))
        storages = (tensor.untyped_storage() for tensor in tensors)
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        halves = [m.nbytes for m in networks[1].modules() if isinstance(m, HalfLinear)]
        return sum([*sizes.values(), *halves])

    @property
    def details(self) -> dict[str, object]:
        """See `Backend`."""
        is_lean = self.decoder.network is not self.decoder.model
        layers = formats(self.decoder.network)
        return {
            "layers": "lean" if is_lean else "the model's own modules",
            "weights": f"{self.weights}: {', '.join(f'{n} {kind}' for kind, n in layers.items())}",
            "weights_bytes": self.weights_bytes,
            "peak_bytes": peak_bytes(),
        }

    @property
    def repetition_penalty(self) -> float:
        """See `Backend`."""
        config = self.decoder.model.generation_config
        return float(getattr(config, "repetition_penalty", None) or 1.0)

    @property
    def can_watch(self) -> bool:
        """See `Backend`."""
        return self.decoder.is_fast

    @property
    def can_batch(self) -> bool:
        """See `Backend`.

        False if the model needs its own attention (biases by position), or if its rotary
        frequencies depend on the length of the longest row, or if it changes keys or values after
        caching them.
        """
        keeps = self.decoder.keeps_what_it_reads
        return self.decoder.is_fast and self.rule.limit is None and keeps

    @property
    def can_share(self) -> bool:
        """See `Backend`."""
        return self.can_batch

    @property
    def keeps_states(self) -> bool:
        """See `Backend`."""
        return self.decoder.keeps_states

    def unpacked(self, data: torch.Tensor, length: int) -> LayerStates:
        """See `Backend`."""
        tensors = load(data.numpy().tobytes())
        return LayerStates.of(self.decoder.model.config, tensors, length, self.shapes.device)

    @property
    def can_append(self) -> bool:
        """See `Backend`. False with sliding windows."""
        return self.can_batch and not any(self.decoder.windows)

    @torch.inference_mode()
    def prefill(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        slots: torch.Tensor | None = None,
        *,
        num_logits: int = 1,
    ) -> Prefilled:
        """See `Backend`."""
        slots = torch.arange(token_ids.shape[1]) if slots is None else slots
        return RowPass(self.decoder, buffer, token_ids, slots, num_logits).forward()

    def repair(self, prompt: RepairInput) -> Prefilled:
        """See `Backend`."""
        return repair_rows(self.decoder, prompt)

    def choose(self, prompt: RepairInput) -> Chosen | None:
        """See `Backend`."""
        return choose_rows(self.decoder, prompt)

    def step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """See `Backend`."""
        return step_batch(self.decoder, batch, together=self.can_batch)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, split: int | None = None) -> torch.Tensor:
        """See `Backend`."""
        model, ids = self.decoder.model, token_ids.to(self.shapes.device)
        options: dict[str, Any] = {"use_cache": True}
        if split:
            name = cache_argument(model)
            options[name] = model(input_ids=ids[:, :split], **options)[name]
        if "logits_to_keep" in self.decoder.parameters:
            options["logits_to_keep"] = 1
        done = model(input_ids=ids[:, split or 0 :], **options)
        logits: torch.Tensor = done.logits[:, -1]
        return logits
