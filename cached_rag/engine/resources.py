"""What an engine answers with: its model, loaded by a backend, and what tenants of it share."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cached_rag.backends.base import Backend
from cached_rag.backends.llama_cpp.loading import load_llama_cpp
from cached_rag.backends.machine import Profile, free_bytes, profile_of
from cached_rag.backends.resolve import Variant
from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.transformers.loading import load_model
from cached_rag.config import StoreConfig
from cached_rag.engine.idle import Audits, Settling
from cached_rag.errors import ConfigError, StoreError
from cached_rag.kv.buffer import Workspace
from cached_rag.kv.holdings import FOLDER
from cached_rag.kv.kept import KeptPrompts
from cached_rag.kv.remote import Link, RemoteTier, open_remote
from cached_rag.kv.wire import Sizes
from cached_rag.library.archive import PromptArchive
from cached_rag.library.encoder import Encoder
from cached_rag.library.learning import Activity, Learning, WriteBack
from cached_rag.library.sequences import Sequences

_log = logging.getLogger(__name__)


class Shared:
    """What all tenants of one model answer their requests with.

    Attributes:
        activity: the requests that are under way; background work waits for their end.
        archive: what finished prompts left on disk; None if that is not kept.
        sequences: what they left in memory.
    """

    def __init__(self, model: Backend, settings: StoreConfig) -> None:
        self.activity = Activity()
        self.archive = _archive(model, settings, self.activity)
        self.sequences = Sequences(
            settings.sequence_bytes or 0,
            keeps_repaired=settings.keeps_repaired,
            disk=self.archive,
        )
        self.workspace = Workspace(model.shapes)
        self.audits = Audits(settings.audit_rate, settings.audit_limit)
        self.settling = Settling(model, self.sequences, is_on=settings.settle)


class Resources:
    """What one tenant's engine answers its requests with."""

    def __init__(self, encoder: Encoder, settings: StoreConfig, shared: Shared) -> None:
        """A tenant's own resources, beside those that all have.

        Args:
            settings: see `completed`.
        """
        self.shared, self.encoder, self.settings = shared, encoder, settings
        self.model, self.library = encoder.model, encoder.library
        self.tokenization = encoder.tokenization
        self.learning = Learning(encoder, settings, shared.activity)


def _archive(model: Backend, settings: StoreConfig, activity: Activity) -> PromptArchive | None:
    written, kept_bytes = settings.sequence_disk_bytes, settings.sequence_bytes
    most = kept_bytes if written is None else written
    if settings.path is None or not most:
        return None
    folder = Path(settings.path) / FOLDER
    try:
        kept = KeptPrompts(folder, most, settings.signing_key)
    except StoreError as error:
        _log.warning("what finished prompts leave is not kept on disk: %s", error)
        return None
    return PromptArchive(kept, model, model.shapes.device, WriteBack(activity))


# What prepares chunks, where a model's layers keep states, so that chunks have no KV of their own.
_NO_CHUNKS: dict[str, Any] = {
    **{"write_back": False, "learn_prefixes": False, "harvest": False, "settle": False},
    "learn": "off",
}


def completed(settings: StoreConfig, model: Backend) -> StoreConfig:
    """The settings, with what they leave to the machine filled in, and as far as the model can.

    Raises:
        ConfigError: states are to be composed, and the model has none that can be; or answers are
            to be audited, and it has states.
    """
    device = model.shapes.device
    if settings.composes and not (model.keeps_states and model.composer):
        raise ConfigError(
            "composes is for models whose layers keep states that can be composed, and this one "
            "has none; leave it out"
        )
    if model.keeps_states:
        if settings.audit_rate:
            raise ConfigError(
                "audit_rate compares answers in the background with full prefill, and for models "
                "whose layers keep states nothing is computed there; leave it out"
            )
        settings = replace(
            settings, **_NO_CHUNKS, first_exact=settings.first_exact and not settings.composes
        )
    room = min(settings.memory_bytes // 4, free_bytes(str(device)) // 8)
    kept, pipelined = settings.sequence_bytes, settings.pipelined
    return replace(
        settings,
        sequence_bytes=max(0, room) if kept is None else kept,
        pipelined=device.type == "cuda" if pipelined is None else pipelined,
    )


def remote_tier(model: Backend, settings: StoreConfig) -> RemoteTier | None:
    """The remote tier that the settings name, with a loading controller; None if they name none.

    What is computed sooner is not brought (CacheBlend, section 5.1). This machine is measured for
    it once. In the paper it also has more repaired where loading takes longer than repair; `auto`
    repairs so much that more gains little (docs/store.md).
    """
    sizes = Sizes(model.shapes, model.context_length, model.vocab_size)
    if (remote := open_remote(settings, sizes)) is not None:
        profile = on_model_thread(lambda: profile_of(model))
        remote.refuses = partial(refusal, profile, remote.link)
    return remote


def refusal(profile: Profile, link: Link, tokens: int) -> str:
    """Why KV of `tokens` tokens is not to be brought from a remote store; empty if it is.

    Nothing is refused as long as nothing is known of the way there.
    """
    loading, computing = link.load_s(tokens), profile.compute_s(tokens)
    if loading is None or loading < computing:
        return ""
    return (
        f"KV of {tokens} tokens would take {loading * 1000:.0f} ms from the remote store, and "
        f"{computing * 1000:.0f} ms to compute, so it is computed"
    )


def load_backend(
    name: str | Path,
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
    return BACKENDS[backend](str(name), dtype, device, weights, variant)


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
