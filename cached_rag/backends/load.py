"""Loads a model with one of the backends."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from cached_rag.backends.base import Backend
from cached_rag.backends.llama_cpp.loading import load_llama_cpp
from cached_rag.backends.resolve import Variant
from cached_rag.backends.transformers.loading import load_model
from cached_rag.errors import ConfigError


def load_backend(
    name: str,
    backend: str = "transformers",
    *,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    weights: str = "as stored",
    variant: Variant = Variant(),  # noqa: B008
) -> Backend:
    """Load a model.

    Args:
        name: alias, hub id, folder or GGUF file; llama.cpp takes only what is a GGUF.
        backend: "transformers" or "llama.cpp".
        dtype, device, weights: see `load_model`. llama.cpp decides about dtype and weights itself;
            its devices are "cpu" and "gpu".
        variant: revision, adapter and further options, which llama.cpp has not.

    Raises:
        ConfigError: there is no such backend, or it has not these options.
        Else as `load_model` and `load_llama_cpp`.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[backend](name, dtype, device, weights, variant)


def _llama_cpp(
    name: str, dtype: torch.dtype | str | None, device: str | None, weights: str, variant: Variant
) -> Backend:
    given = {"dtype": dtype, "device": None if device in ("cpu", "gpu") else device}
    given["weights"] = None if weights == "as stored" else weights
    given |= {"revision": variant.revision, "adapter": variant.adapter}
    given["model_kwargs"] = json.loads(variant.model_kwargs)
    if set_by_user := [f"{option}={value!r}" for option, value in given.items() if value]:
        raise ConfigError(
            f'llama.cpp runs a GGUF with the weights that are in it, on "cpu" or "gpu", so '
            f"{' and '.join(set_by_user)} cannot be had; leave it out, or use "
            'backend="transformers"'
        )
    return load_llama_cpp(name, on_gpu=device == "gpu")


_Load = Callable[[str, torch.dtype | str | None, str | None, str, Variant], Backend]
BACKENDS: dict[str, _Load] = {"transformers": load_model, "llama.cpp": _llama_cpp}
