"""What the prefill node and vLLM's connector agree on: settings, tickets, and places in blocks.

KV that was repaired or moved is not what vLLM would compute, so it must not serve other requests by
vLLM's prefix cache. A ticket's name is used once, and is the request's cache salt, too. Tickets are
untrusted until parsed. Knows names and numbers; loads no model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cached_rag import ConfigError

# The entry of `kv_transfer_params` that is ours.
FIELD = "cached_rag"
_NAME = re.compile(r"[0-9a-f]{32}")
_REMEDY = "take what `python -m vllm_cached_rag describe` prints"
# vLLM 0.32 extends one contiguous beginning. Once it takes external KV with gaps (its pull request
# 32785), a `Load` gets several spans, and vLLM itself computes what lies between them.


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


@dataclass(frozen=True)
class Ticket:
    """The name under which a prompt's KV was handed over."""

    name: str

    @property
    def salt(self) -> str:
        """The only `cache_salt` with which a request may use this KV."""
        return f"cached-rag-{self.name}"

    def fields(self, token_ids: list[int]) -> dict[str, Any]:
        """What to add to a request's body.

        Args:
            token_ids: the prompt's, all of them. vLLM takes them in place of what it would render.
        """
        params = {FIELD: {"prompt": self.name}, "prompt_token_ids": token_ids}
        return {"kv_transfer_params": params, "cache_salt": self.salt}


def ticket_of(params: Mapping[str, Any] | None, salt: str | None) -> Ticket | str | None:
    """The ticket of a request as vLLM has it.

    Args:
        params: its `kv_transfer_params`.
        salt: its `cache_salt`.

    Returns:
        None if there is none; a string, why it is not good, in words, if there is a wrong one.
    """
    found = (params or {}).get(FIELD)
    if found is None:
        return None
    name = found.get("prompt") if isinstance(found, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f'kv_transfer_params[{FIELD!r}] is not {{"prompt": NAME}} as the prefill node writes'
    ticket = Ticket(name)
    if salt != ticket.salt:
        return "its cache_salt is not the ticket's, so other requests could get approximate KV"
    return ticket


@dataclass(frozen=True)
class Load:
    """KV that the worker puts into a request's blocks.

    Attributes:
        name: of the ticket.
        token_ids: the tokens that the KV was handed over for: all of the prompt's but the last.
        begin, end: those of them (`end` exclusive) that are taken; vLLM has the ones before.
        block_ids: the request's blocks, from its first token on.
    """

    name: str
    token_ids: tuple[int, ...]
    begin: int
    end: int
    block_ids: tuple[int, ...]

    def slots(self, block_size: int) -> list[int]:
        """The slot of each token that is taken."""
        return [
            self.block_ids[at // block_size] * block_size + at % block_size
            for at in range(self.begin, self.end)
        ]

    def blocks(self, block_size: int) -> set[int]:
        """The blocks that are written to."""
        return set(self.block_ids[self.begin // block_size : -(-self.end // block_size)])


def whole_blocks(num_tokens: int, block_size: int) -> int:
    """How many of a prompt's tokens, from the first, are handed over: all but its last block's.

    vLLM computes the rest, one token at least, and thereby what follows in its own precision.
    """
    return max(0, num_tokens - 1) // block_size * block_size


def layers_in_order(names: Sequence[str] | Mapping[str, object]) -> list[str]:
    """Names of attention layers by the number in them, as in "model.layers.12.self_attn.attn".

    Raises:
        ValueError: a name has not exactly one number, or they do not count from 0: it is not known
            then which layer is which.
    """
    numbers = {}
    for name in names:
        found = [int(part) for part in name.split(".") if part.isdecimal()]
        if len(found) != 1:
            raise ValueError(f"layer {name!r} has {len(found)} numbers in its name, expected one")
        numbers[name] = found[0]
    ordered = sorted(numbers, key=lambda name: numbers[name])
    if [numbers[name] for name in ordered] != list(range(len(ordered))):
        raise ValueError(f"layers {ordered[:3]}... do not count from 0 on, one by one")
    return ordered
