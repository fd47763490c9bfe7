"""How commands print tables, JSON and reports on the terminal."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cached_rag.errors import ConfigError

# A pipe or a file has no width: tables are written as on a wide screen, and nothing is cut off.
_IS_SEEN = sys.stdout is not None and sys.stdout.isatty()  # None is one that is closed
_WIDTH = None if _IS_SEEN or "COLUMNS" in os.environ else 200
# Tokens of a prompt that reuse need not make faster.
_SHORT = 1000
# Control characters, halves of surrogate pairs, and what changes the direction of writing.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """A text with what would command the terminal spelled out: names and answers are untrusted."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


@contextmanager
def _written(file: IO[str]) -> Iterator[None]:
    """Says in one line that a disk is full; of a reader that has gone, click says nothing."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        with open(os.devnull, "wb") as nowhere:  # where Python writes at its end what is left
            os.dup2(nowhere.fileno(), file.fileno())
        raise ConfigError(
            f"the output cannot be written: {error.strerror}; make room, or send it elsewhere"
        ) from error


class _Terminal(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does, but text is made `visible`."""
        with _written(self.file):
            super().print(*(visible(o) if isinstance(o, str) else o for o in objects), **options)


# Texts and names are printed as they are: ":key:" is no picture of a key, and "[red]" no colour.
_AS_IT_IS: dict[str, Any] = {"emoji": False, "markup": False, "highlight": False}
out = _Terminal(width=_WIDTH, **_AS_IT_IS)
err = _Terminal(stderr=True, soft_wrap=True, **_AS_IT_IS)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def print_json(value: Mapping[str, Any]) -> None:
    """One object on one line of standard output, without any styling."""
    with _written(sys.stdout):
        sys.stdout.write(json.dumps(value, default=str) + "\n")
        sys.stdout.flush()  # into a pipe, too, whose reader may wait for it


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """A table of rows with their keys as its head; "none" without any row."""
    if not rows:
        out.print("none")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row.values()))
    out.print(table)


def print_machine(facts: Mapping[str, object]) -> None:
    """Print the machine that figures were measured on, as one dim line below them."""
    out.print(json.dumps(facts), style="dim")


def plain(row: Any) -> dict[str, Any]:
    """A dataclass as a dictionary, its floats rounded to four significant digits."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in dataclasses.asdict(row).items()
    }


def print_pieces(pieces: Iterable[str], *, are_shown: bool = True) -> None:
    """Take an answer's pieces, and print each as it comes, if it is to be shown."""
    for piece in pieces:
        if are_shown:
            out.print(piece, end="")


def print_hits(hits: Iterable[Any]) -> None:
    """Print where chunks are from, a dim line each."""
    for hit in hits:
        out.print(f"  {hit}", style="dim")


def print_notes(report: Any) -> None:
    """Print what the user of an answer should know besides."""
    for note in report.notes:
        err.print(f"note: {note}", style="yellow")


def print_answer(
    answer: Any, full: Any | None, *, as_json: bool, sources: Sequence[Any] | None = None
) -> None:
    """Print what belongs to an answer; as JSON, its text, too, which else was printed as it came.

    Args:
        answer, full: with a text and a report each; full prefill's, or None.
        sources: the chunks that were found for it; None if none were searched for.
    """
    if as_json:
        found: dict[str, Any] = {"text": answer.text, "report": answer.report.to_dict()}
        if sources is not None:
            found["sources"] = [dataclasses.asdict(hit) for hit in sources]
        if full is not None:
            found["full"] = {"text": full.text, "report": full.report.to_dict()}
        print_json(found)
        return
    out.print("\n")
    print_hits(sources or ())
    _print_reports(answer.report, full and full.report)
    print_notes(answer.report)
    if full is not None:
        out.print(f"Full prefill's answer: {full.text}")


def _print_reports(cached: Any, full: Any | None) -> None:
    """A report as a table; beside full prefill's, how much sooner or later the first token came."""
    rows = {"cached": cached} if full is None else {"cached": cached, "full prefill": full}
    print_table(
        [
            {
                "": name,
                "method": report.method,
                "prompt": report.prompt_tokens,
                "cached": report.cached_tokens,
                "recomputed": report.recomputed_tokens,
                "TTFT ms": f"{report.ttft_ms:.0f}",
                "total ms": f"{report.total_ms:.0f}",
            }
            for name, report in rows.items()
        ]
    )
    if full is not None and cached.prompt_tokens:  # else no chunk was found, and no model asked
        ratio = full.ttft_ms / cached.ttft_ms
        out.print(f"first token {sooner(ratio)} than full prefill")
        if ratio < 1 and cached.prompt_tokens < _SHORT:
            out.print("of a prompt this short, question and repair are the larger part")


def sooner(ratio: float) -> str:
    """In words, what a time is against one that is `ratio` times as long."""
    return f"{ratio:.1f}x sooner" if ratio >= 1 else f"{1 / ratio:.1f}x later"
