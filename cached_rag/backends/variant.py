"""Which weights of a model are loaded, and what is merged into them. Loads nothing itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cached_rag.errors import ConfigError

# Options of `from_pretrained` that say how files are reached, and others that change no number.
_ACCESS = ("token", "cache_dir", "local_files_only", "force_download")
_NEUTRAL = (*_ACCESS, "low_cpu_mem_usage")
# Options of `from_pretrained` for which this library has its own.
_OURS = {
    **dict.fromkeys(("dtype", "torch_dtype"), "dtype"),
    **dict.fromkeys(("device_map", "max_memory", "offload_folder"), "device"),
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), "weights"),
    "revision": "revision",
}


@dataclass(frozen=True)
class Variant:
    """What is loaded under a model's name. `of` makes one.

    Attributes:
        revision: branch, tag or commit of a hub id; None for its main branch.
        adapter: folder or hub id of a LoRA adapter; None for none.
        model_kwargs: further options of `from_pretrained`, as JSON.
    """

    revision: str | None = None
    adapter: str | None = None
    model_kwargs: str = "{}"

    @classmethod
    def of(
        cls, revision: str | None, adapter: str | None, model_kwargs: Mapping[str, Any] | None
    ) -> Variant:
        """Check what was asked for.

        Raises:
            ConfigError: an option for which this library has its own, or that is no plain value.
        """
        given = dict(model_kwargs or {})
        for name in given.keys() & _OURS:
            raise ConfigError(
                f"model_kwargs has {name!r}, for which this library has an option of its own; "
                f"leave it out and give {_OURS[name]}="
            )
        return cls(revision, adapter, plain_json("model_kwargs", given))

    @property
    def options(self) -> dict[str, Any]:
        """Those of the model's `from_pretrained`."""
        found: dict[str, Any] = json.loads(self.model_kwargs)
        return found

    @property
    def access(self) -> dict[str, Any]:
        """Those of them that say how files are reached."""
        return {name: value for name, value in self.options.items() if name in _ACCESS}

    @property
    def common(self) -> dict[str, Any]:
        """Those of them that its configuration and its tokenizer are loaded with, too."""
        shared = (*_ACCESS, "trust_remote_code", "subfolder")
        return {name: value for name, value in self.options.items() if name in shared}

    @property
    def facts(self) -> dict[str, Any]:
        """Those of them that KV may depend on."""
        return {name: value for name, value in self.options.items() if name not in _NEUTRAL}


def plain_json(name: str, values: Mapping[str, Any] | None) -> str:
    """Options as JSON, the same for the same options.

    Args:
        name: what the options are called where they were given.

    Raises:
        ConfigError: a value is no plain one.
    """
    try:
        return json.dumps(dict(values or {}), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} takes strings, numbers, lists and the like, by which KV is told apart: {error}"
        ) from error
