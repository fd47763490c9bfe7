"""The KV connector: stock vLLM loads it by `kv_connector_module_path`.

vLLM makes one in its scheduler, which says how many of a prompt's first tokens have KV, and one in
its worker, which copies this KV into the request's blocks before the model runs. Whatever goes
wrong is a miss with a line in the log: vLLM then computes the tokens itself. Loads no model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from cached_rag import CachedRAGError
from cached_rag.spi import Handoff
from vllm_cached_rag.agreed import Load, Settings, Ticket, layers_in_order, ticket_of, whole_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger(f"vllm.{__name__}")  # below vLLM's own logger, whose handlers show it


@dataclass
class Loads(base.KVConnectorMetadata):
    """What the worker has to load before one step."""

    loads: tuple[Load, ...] = ()


class CachedRAGConnector(base.KVConnectorBase_V1):
    """Hands requests the KV that a prefill node has made of their prompts."""

    def __init__(
        self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Read the settings and open the folder.

        Raises:
            ConfigError: the settings are wrong, or vLLM splits the model over several devices.
            StoreError: the folder cannot be used.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.of(transfer.kv_connector_extra_config)
        self._settings.check_vllm(
            devices=vllm_config.parallel_config.world_size,
            policy=transfer.kv_load_failure_policy,
            dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        )
        self._block_size: int = vllm_config.cache_config.block_size
        self._layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._handoff = Handoff(self._settings.handoff, self._settings.fingerprint)
        self._planned: list[Load] = []
        self._failed: set[int] = set()
        self._refused: set[str] = set()

    # In the scheduler ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens, behind those that vLLM has, come from us; they come at once."""
        if self._ticket(request) is None:
            return 0, False
        return max(0, self._end(request) - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note what to load, now that the request has its blocks."""
        ticket = self._ticket(request) if num_external_tokens else None
        if ticket is None:
            return
        (block_ids,) = blocks.get_block_ids()
        end = self._end(request)
        begin = end - num_external_tokens
        ids = _handed(request)
        self._planned.append(Load(ticket.name, ids, begin, end, tuple(block_ids)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> base.KVConnectorMetadata:
        """What was noted since the last step."""
        planned, self._planned = self._planned, []
        return Loads(tuple(planned))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is sent, so the blocks are free."""
        self._refused.discard(request.request_id)
        return False, None

    def _end(self, request: Request) -> int:
        """The token up to which KV comes from us."""
        return whole_blocks(len(request.prompt_token_ids or ()), self._block_size)

    def _ticket(self, request: Request) -> Ticket | None:
        """The request's ticket, if there is one and its KV is there."""
        ticket = ticket_of(request.kv_transfer_params, request.cache_salt)
        if ticket is not None and request.lora_request is not None:
            ticket = "it is for a LoRA adapter, and the KV is that of the model without one"
        if isinstance(ticket, str):
            self._refuse(request, ticket)
            return None
        if ticket is None or not self._end(request):
            return None
        try:
            if self._handoff.has(ticket.name, _handed(request)):
                return ticket
            self._refuse(request, "no KV of this prompt and model is there under its name")
        except (CachedRAGError, OSError) as error:
            self._refuse(request, str(error))
        return None

    def _refuse(self, request: Request, reason: str) -> None:
        if request.request_id not in self._refused:  # vLLM may ask several times
            self._refused.add(request.request_id)
            _log.warning("request %s is computed by vLLM: %s", request.request_id, reason)

    # In the worker ---------------------------------------------------------------------------

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load all that the scheduler has noted, before the model runs."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            try:
                self._load(load)
            except (CachedRAGError, OSError, ValueError) as error:
                self._failed |= load.blocks(self._block_size)
                _log.warning("%d tokens are computed by vLLM: %s", load.end - load.begin, error)

    def _load(self, load: Load) -> None:
        source = self._handoff.open(load.name, load.token_ids)
        if source is None:
            raise ValueError("their KV is gone")
        part = source.slice(load.begin, load.end)
        names = layers_in_order([n for n, layer in self._layers.items() if _has_kv(layer)])
        if len(names) != self._settings.num_layers:
            raise ValueError(f"vLLM has {len(names)} layers, the KV {self._settings.num_layers}")
        slots = torch.tensor(load.slots(self._block_size), dtype=torch.int64)
        for index, name in enumerate(names):
            layer = self._layers[name]
            keys, values = part.layer(index)  # each (num_kv_heads, tokens, head_dim)
            _check(keys, values, layer)
            device = layer.kv_cache.device
            layer.impl.do_kv_cache_update(
                layer,
                keys.transpose(0, 1).contiguous().to(device),
                values.transpose(0, 1).contiguous().to(device),
                layer.kv_cache,
                slots.to(device),
            )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute itself."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded while the model runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing of vLLM's KV is kept here."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""

    def shutdown(self) -> None:
        """Release files."""
        self._handoff.close()


def _handed(request: Request) -> tuple[int, ...]:
    """The tokens that a prefill node hands KV over for."""
    return tuple(request.prompt_token_ids or ())[:-1]


def _has_kv(layer: Any) -> bool:
    return getattr(layer, "kv_cache", None) is not None


def _check(keys: torch.Tensor, values: torch.Tensor, layer: Any) -> None:
    """Check that KV is of the shape and dtype of a layer.

    Raises:
        ValueError: it is not.
    """
    heads = layer.num_kv_heads
    wanted = [(heads, layer.head_size), (heads, getattr(layer, "head_size_v", layer.head_size))]
    for tensor, (num, dim) in zip((keys, values), wanted, strict=True):
        if (tensor.shape[0], tensor.shape[2]) != (num, dim):
            raise ValueError(
                f"the KV has {tensor.shape[0]} heads of {tensor.shape[2]}, vLLM's layer {num} of "
                f"{dim}: another model's?"
            )
