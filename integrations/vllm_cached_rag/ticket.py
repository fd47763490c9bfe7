"""What a request to vLLM carries, so that the connector finds its KV. Untrusted until parsed.

KV that was repaired or moved is not what vLLM would compute, so it must not serve other requests by
vLLM's prefix cache. A ticket's name is used once, and is the request's cache salt, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The entry of `kv_transfer_params` that is ours.
FIELD = "cached_rag"
_NAME = re.compile(r"[0-9a-f]{32}")


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
