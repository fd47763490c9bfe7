"""Which questions of a set are asked, and what of them is measured. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from cached_rag.options import check_types, require


@dataclass(frozen=True)
class Questions:
    """Which questions of a set are asked, and what of them is measured.

    Attributes:
        limit: most questions of a file; None for all.
        answers: generate answers, for F1, EM and ROUGE-L; else only likelihoods are measured, in a
            third of the time.
        chunks: most chunks of a question; its answer's come first. None for all.
        join: make one chunk of so many that are neighbours.
        answer_in: only questions whose answer is in the first chunk, or in others: "first",
            "others", "any".

    Raises:
        ConfigError: a count below 1, or another `answer_in`.
    """

    limit: int | None = None
    answers: bool = True
    chunks: int | None = None
    join: int = 1
    answer_in: str = "any"

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("limit", "chunks", "join"):
            count = getattr(self, name)
            require(count is None or count >= 1, f"{name} is at least 1, not {count}")
        require(
            self.answer_in in ("any", "first", "others"),
            f"answer_in is any, first or others, not {self.answer_in!r}",
        )
