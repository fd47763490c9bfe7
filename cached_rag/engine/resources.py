"""What an engine answers its requests with, and what of it all tenants of a model share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cached_rag.backends.base import Backend
from cached_rag.backends.machine import free_bytes
from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.config import StoreConfig
from cached_rag.engine.idle import Audits, Settling
from cached_rag.engine.profile import profile_of, refusal
from cached_rag.errors import StoreError
from cached_rag.kv.buffer import Workspace
from cached_rag.kv.holdings import FOLDER
from cached_rag.kv.kept import KeptPrompts
from cached_rag.kv.remote import RemoteTier
from cached_rag.kv.wire import Sizes
from cached_rag.library.archive import Archive
from cached_rag.library.encoder import Encoder
from cached_rag.library.learning import Activity, Learning, WriteBack
from cached_rag.library.library import Library
from cached_rag.library.sequences import Sequences
from cached_rag.library.shelf import Refuses

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resources:
    """What an engine answers its requests with.

    Attributes:
        library: this tenant's own, as are `tokenization` and `learning`. All the rest belongs to
            all tenants of one model.
        archive: what finished prompts left on disk; None if that is not kept.
        activity: the requests that are under way; background work waits for their end.
    """

    model: Backend
    tokenization: Tokenization
    library: Library
    learning: Learning
    archive: Archive | None
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
            archive = _archive(model, settings, activity)
            sequences = Sequences(kept, keeps_repaired=settings.keeps_repaired, disk=archive)
            settling = Settling(model, sequences, is_on=settings.settle)
        else:
            archive, sequences, settling = shared.archive, shared.sequences, shared.settling
        return cls(
            model,
            tokenization,
            library,
            Learning(encoder, settings, activity),
            archive,
            sequences,
            shared.workspace if shared else Workspace(model.shapes),
            activity,
            shared.audits if shared else Audits(settings.audit_rate, settings.audit_limit),
            settling,
        )


def _archive(model: Backend, settings: StoreConfig, activity: Activity) -> Archive | None:
    if settings.path is None or not settings.sequence_disk_bytes:
        return None
    folder = Path(settings.path).expanduser() / FOLDER
    try:
        kept = KeptPrompts(folder, settings.sequence_disk_bytes, settings.signing_key)
    except StoreError as error:
        _log.warning("what finished prompts leave is not kept on disk: %s", error)
        return None
    writing = WriteBack(activity, finish_seconds=settings.finish_seconds)
    return Archive(kept, model, model.shapes.device, writing)


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
    kept = max(0, room) if kept is None else kept
    written = settings.sequence_disk_bytes
    return replace(
        settings,
        sequence_bytes=kept,
        sequence_disk_bytes=kept if written is None and settings.path is not None else written,
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
