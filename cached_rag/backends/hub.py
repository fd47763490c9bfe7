"""Whether the Hugging Face hub can be reached. Knows no model."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

# Seconds until a machine that does not answer counts as unreachable.
_PATIENCE_S = 10.0


def see_hub(hub_id: str, file: str, **access: Any) -> None:
    """Refuse a model that is not on this machine, where no hub is: else it is tried for a minute.

    Args:
        file: one that the model has.
        access: of the options of `from_pretrained`, those that say how files are reached.

    Raises:
        OSError: the hub cannot be reached.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    is_asked = not (constants.HF_HUB_OFFLINE or access.get("local_files_only") or getproxies())
    cache = access.get("cache_dir")
    has_copy = os.path.exists(hub_id) or try_to_load_from_cache(hub_id, file, cache_dir=cache)
    if not is_asked or has_copy:
        return
    url = urlsplit(constants.ENDPOINT)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((str(url.hostname), port), _PATIENCE_S).close()
    except OSError as error:
        raise OSError(f"{constants.ENDPOINT} cannot be reached ({error})") from error
