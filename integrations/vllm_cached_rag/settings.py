"""The connector's settings, as `describe` writes them into vLLM's `--kv-transfer-config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cached_rag import ConfigError


@dataclass(frozen=True)
class Settings:
    """What the connector has to know, for it loads no model.

    Attributes:
        handoff: the folder in which the prefill node leaves prompts' KV.
        fingerprint: of the model as the prefill node runs it; other KV is not found.
        dtype: of the KV, "bfloat16" for example; vLLM's must be the same.
        num_layers: of the model.

    Raises:
        ConfigError: a value is wrong.
    """

    handoff: str
    fingerprint: str
    dtype: str
    num_layers: int

    def __post_init__(self) -> None:
        for name in ("handoff", "fingerprint", "dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{name} must be a string: {value!r}; {_REMEDY}")
        if type(self.num_layers) is not int or self.num_layers < 1:
            raise ConfigError(f"num_layers must be a number: {self.num_layers!r}; {_REMEDY}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """From vLLM's `kv_connector_extra_config`.

        Raises:
            ConfigError: an entry is unknown, missing or wrong.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if given.keys() != known:
            odd = sorted(given.keys() ^ known)
            raise ConfigError(f"kv_connector_extra_config: {odd} missing or unknown; {_REMEDY}")
        return cls(**given)

    def check_vllm(self, *, devices: int, policy: str, dtype: str) -> None:
        """Check that vLLM runs so that KV can be handed over.

        Args:
            devices: number of workers that share the model.
            policy: what vLLM does when a load fails.
            dtype: the model's.

        Raises:
            ConfigError: it does not.
        """
        if devices != 1:
            raise ConfigError(f"the connector knows one worker a model, and vLLM has {devices}")
        if policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy is {policy!r}, so a request would fail where its KV is "
                'gone; set "recompute"'
            )
        if dtype != self.dtype:
            raise ConfigError(
                f"the prefill node's KV is in {self.dtype} and vLLM computes in {dtype}; start "
                f"vLLM with --dtype {self.dtype}, or the node with --dtype {dtype} and describe it "
                "anew"
            )

    def transfer_config(self) -> dict[str, Any]:
        """The value of vLLM's `--kv-transfer-config`, as JSON has it."""
        return {
            "kv_connector": "CachedRAGConnector",
            "kv_connector_module_path": "vllm_cached_rag.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dataclasses.asdict(self),
        }


_REMEDY = "take what `python -m vllm_cached_rag describe` prints"
