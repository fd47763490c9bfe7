"""A file of all measurements, from which an interrupted evaluation goes on where it stopped.

Each measurement is appended at once, as one line of JSON. The first line names the run's model and
settings; a journal of another run is refused. Every measurement has its origin, for one journal may
be filled at several commits and on several machines. Knows no metric.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cached_rag.errors import EvaluationError

Key = tuple[str, str, str, float]
# What of `machine` is a measurement's origin.
_ORIGIN = ("commit", "processor", "threads")


class Journal:
    """Measurements by (data set, digest of the example, method, ratio)."""

    def __init__(
        self, path: Path, run: Mapping[str, Any], machine: Mapping[str, Any] | None = None
    ) -> None:
        """Open a journal, or begin it.

        Args:
            run: what all of its measurements have in common.
            machine: where those that are added come from, see `machine`.

        Raises:
            EvaluationError: the file is another run's, or damaged, or cannot be read and written.
        """
        facts = machine or {}
        self.path = path
        self._origin = {name: facts.get(name) for name in _ORIGIN}
        self._rows: dict[Key, dict[str, Any]] = {}
        head = json.dumps({"run": run}, sort_keys=True)
        with _reported(path):
            if path.exists():
                self._load(head)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(head + "\n", encoding="utf-8")

    def _load(self, head: str) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        if not lines or lines[0].strip() != head:
            raise EvaluationError(
                f"{self.path} was written by a run with another model or other settings; "
                "delete it, or give another --journal"
            )
        for number, line in enumerate(lines[1:], 2):
            try:
                self._keep(json.loads(line))
            except (ValueError, KeyError) as error:
                if number < len(lines) or line.endswith("\n"):
                    raise EvaluationError(f"{self.path}, line {number}: {error}") from error
                # The last line was being written when the run was interrupted.
                self.path.write_text("".join(lines[:-1]), encoding="utf-8")

    def _keep(self, row: dict[str, Any]) -> None:
        # Rows of before there were digests may be of another file of that name: they serve no more.
        example = row.get("example", "")
        self._rows[row["data"], example, row["method"], row["ratio"]] = row

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def add(self, row: dict[str, Any]) -> None:
        """Add one measurement with its origin, and write it to the file.

        Raises:
            EvaluationError: the file cannot be written.
        """
        row = {**row, "origin": self._origin}
        with _reported(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._keep(row)

    def rows(self) -> Iterator[dict[str, Any]]:
        """All measurements, oldest first."""
        yield from self._rows.values()


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EvaluationError(
            f"measurements cannot be kept in {path}: {error.strerror or error}; make room or give "
            "this user the right to write it, or name another file with --journal"
        ) from error


def origins(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where measurements come from: each commit and machine once, with the number of its `rows`.

    Measurements of before journals kept it have an origin of None.
    """
    unknown = dict.fromkeys(_ORIGIN)
    found = Counter(tuple((row.get("origin") or unknown).items()) for row in rows)
    return [{**dict(origin), "rows": count} for origin, count in found.most_common()]
