"""What an engine answers its requests with, and what of it all tenants of a model share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cached_rag.backends.base import Backend
from cached_rag.backends.machine import free_bytes
from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.config import StoreConfig
from cached_rag.engine.idle import Audits, Settling
from cached_rag.engine.profile import profile_of, refusal
from cached_rag.kv.buffer import Workspace
from cached_rag.kv.remote import RemoteTier
from cached_rag.kv.wire import Sizes
from cached_rag.library.encoder import Encoder
from cached_rag.library.learning import Activity, Learning
from cached_rag.library.library import Library
from cached_rag.library.sequences import Sequences
from cached_rag.library.shelf import Refuses


@dataclass(frozen=True)
class Resources:
    """What an engine answers its requests with.

    Attributes:
        library: this tenant's own, as are `tokenization` and `learning`. All the rest belongs to
            all tenants of one model.
        activity: the requests that are under way; background work waits for their end.
    """

    model: Backend
    tokenization: Tokenization
    library: Library
    learning: Learning
    sequences: Sequences
    workspace: Workspace
    activity: Activity
    audits: Audits
    settling: Settling

    @classmethod
    def of(
        cls,
        model: Backend,
        tokenization: Tokenization,
        library: Library,
        encoder: Encoder,
        settings: StoreConfig,
        shared: Resources | None,
    ) -> Resources:
        """A tenant's resources.

        Args:
            settings: see `completed`.
            shared: another tenant's, of the same model; None for the first.
        """
        activity = shared.activity if shared else Activity()
        kept = settings.sequence_bytes or 0
        if shared is None:
            sequences = Sequences(kept, keeps_repaired=settings.keeps_repaired)
            settling = Settling(model, sequences, is_on=settings.settle)
        else:
            sequences, settling = shared.sequences, shared.settling
        return cls(
            model,
            tokenization,
            library,
            Learning(encoder, settings, activity),
            sequences,
            shared.workspace if shared else Workspace(model.shapes),
            activity,
            shared.audits if shared else Audits(settings.audit_rate, settings.audit_limit),
            settling,
        )


# What prepares chunks, where a model's layers keep states, so that chunks have no KV of their own.
_NO_CHUNKS: dict[str, Any] = {
    **{"write_back": False, "learn_prefixes": False, "harvest": False, "settle": False},
    "learn": "off",
}


def completed(settings: StoreConfig, model: Backend) -> StoreConfig:
    """The settings, with what they leave to the machine filled in, and as far as the model can."""
    device = model.shapes.device
    if model.keeps_states:
        settings = replace(settings, **_NO_CHUNKS)
    room = min(settings.memory_bytes // 4, free_bytes(str(device)) // 8)
    kept, pipelined = settings.sequence_bytes, settings.pipelined
    return replace(
        settings,
        sequence_bytes=max(0, room) if kept is None else kept,
        pipelined=device.type == "cuda" if pipelined is None else pipelined,
    )


def refuses(model: Backend, remote: RemoteTier | None) -> Refuses:
    """What decides whether KV is brought from another machine; this one is measured for it once."""
    if remote is None:
        return lambda _: ""
    return partial(refusal, on_model_thread(lambda: profile_of(model)), remote.link)


def sizes_of(model: Backend) -> Sizes:
    """What KV and heads of a model look like, for checking those that come from elsewhere."""
    return Sizes(model.shapes, model.context_length, model.vocab_size)
