"""How much of the machine a document may take while it is read."""

from __future__ import annotations

from dataclasses import dataclass

from cached_rag.errors import ConfigError

MAX_BYTES = 50 << 20


@dataclass(frozen=True)
class DocumentLimits:
    """Limits on reading one document. One beyond them is skipped with its reason.

    Attributes:
        max_bytes: most bytes of its file.
        seconds: most seconds that reading it may take; None for any.
        memory_bytes: most memory of the process that reads it, parser included; None for any.
            With neither of the two, documents are read in the process that asks.
    """

    max_bytes: int = MAX_BYTES
    seconds: float | None = 300.0
    memory_bytes: int | None = 2 << 30

    def __post_init__(self) -> None:
        for name in ("max_bytes", "seconds", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1 << 62:
                raise ConfigError(f"{name} of documents is to be positive, not {value}")
        if self.max_bytes is None:
            raise ConfigError("max_bytes of documents is a number; give a large one for any size")

    @property
    def need_a_process(self) -> bool:
        """Whether they can be kept only where another process reads."""
        return self.seconds is not None or self.memory_bytes is not None
