"""When texts that a framework brings are encoded. Knows no framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, Protocol, get_args

from cached_rag.errors import ConfigError, ContextOverflowError
from cached_rag.library.ledger import HALF_PAIR

Encode = Literal["eager", "background", "off"]
_log = logging.getLogger(__name__)


class FrameworkModel(Protocol):
    """A framework's model, with an engine behind it; its methods are as `Engine`'s."""

    @property
    def encode(self) -> Callable[..., object]:
        """Prefills texts; raises `ContextOverflowError` if one of them is too long."""
        ...

    def register(self, texts: Iterable[str]) -> None:
        """Knows texts, so that they are encoded after the answers that used them."""
        ...

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begins to bring texts' KV into memory."""
        ...


@dataclass(frozen=True)
class Learner:
    """A framework's model, and what happens to texts that have no KV.

    Attributes:
        encode: "eager" prefills them now, "background" after the first answer that used them, "off"
            leaves them to others.
        options: what the model's `encode` is given besides the texts.

    Raises:
        ConfigError: `encode` is none of these.
    """

    llm: FrameworkModel
    encode: Encode = "background"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.encode not in get_args(Encode):
            raise ConfigError(f"encode is one of {get_args(Encode)}, not {self.encode!r}")

    def learn(self, texts: Sequence[str], sources: Sequence[Hashable] | None = None) -> None:
        """Do that. What no tokenizer takes, or exceeds the context, is left out, and logged.

        A framework's store has them by then, so one such text must not keep the others from KV.

        Args:
            sources: what names the document that each text is a part of: neighbours with the same
                are its chunks, in their order. None if each stands alone.
        """
        if self.encode == "off":
            return
        known = sources or range(len(texts))
        pairs = [one for one in zip(texts, known, strict=True) if not HALF_PAIR.search(one[0])]
        whole = [text for text, _ in pairs]
        if len(whole) < len(texts):
            _log.warning(
                "documents that stay without KV: %d, as half of a surrogate pair stands alone in "
                "them, which no tokenizer takes; replace it when the documents are read",
                len(texts) - len(whole),
            )
        if self.encode == "eager":
            by_document = groupby(pairs, key=itemgetter(1))
            self._encode([[text for text, _ in group] for _, group in by_document])
        else:
            self.llm.register(whole)

    def _encode(self, texts: Sequence[str | Sequence[str]]) -> None:
        try:
            self.llm.encode(texts, **self.options)
        except ContextOverflowError as error:
            if len(texts) == 1 and not isinstance(texts[0], str):
                texts = texts[0]
            if len(texts) == 1:
                _log.warning("a document stays without KV: %s", error)
                return
            middle = len(texts) // 2
            self._encode(texts[:middle])
            self._encode(texts[middle:])
