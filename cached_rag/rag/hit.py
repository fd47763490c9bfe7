"""A chunk that a search found."""

from __future__ import annotations

from dataclasses import dataclass, field

from cached_rag.rag.document import Metadata
from cached_rag.rag.naming import shown

# Characters of a title: that of a text without one is its first paragraph.
_TITLE = 60


@dataclass(frozen=True, repr=False)
class Hit:
    """A chunk that a search found. `str` and `repr` leave out its text, and the end of long titles.

    Attributes:
        text: the chunk's text.
        source: its document's name in the index.
        title: its document's title.
        ordinal: its number in the document, from 0.
        score: cosine similarity to the question, -1 to 1.
        metadata: what is known of it: "page" (of a PDF, from 1, where it begins), "heading"
            ("Install > Linux"; of several, joined by "; "), and what was said of it when it was
            added.
    """

    text: str
    source: str
    title: str
    ordinal: int
    score: float
    metadata: Metadata = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.score:.2f}  {self._name}  {self._title}"

    def __repr__(self) -> str:
        return f"<Hit {self.score:.2f} {self._name} {self._title!r}>"

    @property
    def _name(self) -> str:
        page = f" p. {self.metadata['page']}" if "page" in self.metadata else ""
        return f"{shown(self.source)} #{self.ordinal}{page}"

    @property
    def _title(self) -> str:
        is_long = len(self.title) > _TITLE
        return f"{self.title[:_TITLE].rstrip()} ..." if is_long else self.title
