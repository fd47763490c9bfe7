"""What carries blobs to another machine and back, by name. Knows no tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

# Seconds that sending a blob may take; nobody waits for it.
SENDING_S = 60.0
_SECRET = re.compile(r"(?<=://)\S*@|\?\S*")


class Transport(Protocol):
    """Blobs by name. Safe for several threads.

    Every method may raise any error, when the other side is away, slow, refuses, or replies what
    it was not asked for. No reply takes more memory than was expected.

    Attributes:
        label: the address without passwords, for messages.
        batch: how many names `has` and `delete` take at most.
    """

    label: str
    batch: int

    def get(self, names: Sequence[str], most_bytes: Sequence[int]) -> list[bytes | None]:
        """The blobs of these names, None for each that is not there. All in one round trip.

        Args:
            most_bytes: as much is taken of each blob; of a longer one, its beginning.
        """
        ...

    def has(self, names: Sequence[str]) -> list[bool]:
        """Whether there are blobs of these names. All in one round trip."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep a blob, in place of any of the same name."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete blobs; names without one are ignored."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


def label_of(url: str) -> str:
    """A URL without user, password and query, to be shown."""
    scheme, _, rest = url.partition("://")
    secret, _, place = rest.rpartition("@")
    if "?" in secret:  # a password has it, or a query has the "@": both may be secret
        place = "..."
    return f"{scheme}://{place.partition('?')[0]}"


def why_unusable(url: str, error: Exception) -> str:
    """Why a URL is no address, to be shown: an error's own words may have parts of a password."""
    if label_of(url) == url:
        return shown(error)
    return "check it, and percent-encode : / # ? @ where a user or a password has them"


def shown(error: Exception) -> str:
    """An error's first line, without users, passwords and queries of the URLs in it."""
    return _SECRET.sub("", str(error).partition("\n")[0])[:500]
