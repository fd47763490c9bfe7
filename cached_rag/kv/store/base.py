"""What every KV store promises. Knows no file format and no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cached_rag.kv.module import LayerSource, ModuleKV


@dataclass(frozen=True)
class Problem:
    """What `check` found: the name of an entry or file, and what is wrong with it in words."""

    key: str
    reason: str


# Says, when KV is about to be kept, whether it still is to be: its text may be deleted by now.
IsWanted = Callable[[], bool]


class KVStore(Protocol):
    """Modules' KV by key. Every method may be called from several threads.

    Keys come from `fingerprint.module_key`. A store compares the stored token ids with the wanted
    ones, so that even two equal keys could not make it serve the wrong KV.
    """

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, key: str) -> bool: ...

    def keys(self) -> Iterator[str]:
        """All keys, least recently used first."""
        ...

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """The module, or None if it is not held. The caller must not write into its tensors.

        Raises:
            CorruptBlobError: held, but damaged or with other token ids; the entry is gone then.
        """
        ...

    def open(self, key: str, token_ids: Sequence[int]) -> LayerSource | None:
        """As `get`, but a module on disk is not read: each layer is when it is asked for."""
        ...

    def put(self, key: str, kv: ModuleKV, wanted: IsWanted = lambda: True) -> None:
        """Keep a module; replaces an entry of the same key; may evict others, least recent first.

        Args:
            wanted: called when no `delete` can come in between; nothing is kept if it says no. So
                a text that is forgotten first, and whose KV is deleted then, leaves none, even if
                this process is killed.

        Raises:
            StoreFullError: it does not fit; nothing is changed.
        """
        ...

    def delete(self, key: str) -> bool:
        """Delete an entry; says whether it was there."""
        ...

    def check(self) -> list[Problem]:
        """Read everything, and report what is wrong; changes nothing."""
        ...
