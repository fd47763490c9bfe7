"""Whole prompts' KV, on its way from the process that prefilled them to the one that decodes.

A prompt's KV is put into a folder that both reach, under a name that is used once. So it serves the
one request that was told the name, and who has it deleted takes nothing from others. What nobody
deletes leaves when others need the room. Knows a store; knows no model.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from cached_rag.kv.buffer import LayerSource, ModuleKV
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.fingerprint import module_key


class Handoff:
    """KV of prompts of one model. Safe for several threads and processes."""

    def __init__(
        self, folder: Path | str, fingerprint: str, codec: str = "raw", max_bytes: int = 4 << 30
    ) -> None:
        """Open the folder, or make it.

        Args:
            fingerprint: the model's; with another one nothing is found.
            codec: as in `StoreConfig`.
            max_bytes: most bytes of KV; the least recently used leaves first.

        Raises:
            StoreError: it cannot be used.
        """
        self._fingerprint = fingerprint
        self._disk = DiskStore(folder, codec, max_bytes)

    def put(self, kv: ModuleKV) -> str:
        """Keep a prompt's KV, from position 0 on; returns the name by which it is found.

        Raises:
            StoreError: there is no room, or the folder cannot be written.
        """
        name = secrets.token_hex(16)
        self._disk.put(self._key(name, kv.token_ids), kv)
        return name

    def has(self, name: str, token_ids: Sequence[int]) -> bool:
        """Whether there is KV of exactly these tokens under a name.

        Raises:
            StoreError: the folder cannot be read.
        """
        return self._key(name, token_ids) in self._disk

    def open(self, name: str, token_ids: Sequence[int]) -> LayerSource | None:
        """The KV, which is read layer by layer; None if it is not there.

        Raises:
            StoreError: the folder cannot be read, or the KV is damaged.
        """
        return self._disk.open(self._key(name, token_ids), token_ids)

    def delete(self, name: str, token_ids: Sequence[int]) -> bool:
        """Delete a prompt's KV; says whether it was there.

        Raises:
            StoreError: the folder cannot be written.
        """
        return self._disk.delete(self._key(name, token_ids))

    def close(self) -> None:
        """Release files."""
        self._disk.close()

    def _key(self, name: str, token_ids: Sequence[int]) -> str:
        return module_key(self._fingerprint, (), token_ids, context=f"handoff {name}")
