"""Writes figures into pages: runs the command that stands in a page, and puts its table below it.

    python docs/figures.py speed-0.5b auto-4k         # these; in the folder that has the data
    python docs/figures.py --draw                     # all tables anew, from what was measured
    python docs/figures.py --list                     # every figure's page, commit and command

A page has, as a comment that readers do not see:

    <!-- figures: NAME
    cached-rag bench --methods reuse,auto
    method: `{method}`
    first token: {ttft_ms:.0f} ms
    only: method=auto
    say: anchorflow:follow_tokens=1 => `auto` that follows
    -->
    <!-- end -->

The first line behind the name is the command, which is given `--json` if it is ours; each other
line is a column, its title and how a row of the command's is written in it. Lines "only" leave rows
out (`only: data=a b` leaves two sets), lines "say" put words in a cell's place, a line "from: NAME"
takes another list of what the command prints than "rows", and a line "like: NAME" the columns of
that name's first table. What it printed is kept in docs/figures/NAME.json, with the day; below the
table stand command, day, commit and machine. Several tables may have one name, and then one
command. Long tables stand in docs/experiments/*.md.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = [
    DOCS.parent / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("experiments/*.md")),
]
KEPT = DOCS / "figures"
# Trials are found at their commits; every other figure is of this commit or a later one.
TRIALS, SINCE = DOCS / "experiments.md", "3c2f4d6"
COMMIT = re.compile(r"(?:[Cc]ommits?\s+`?|\band )([0-9a-f]{7,40})\b")
_BLOCK = re.compile(r"(<!-- figures: (\S+)\n.*?-->\n)(.*?)<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A place in a page for figures.

    Attributes:
        head: the comment.
        shown: what stands there now.
    """

    page: Path
    name: str
    head: str
    shown: str

    @property
    def spec(self) -> list[str]:
        """The lines behind its name."""
        return self.head.strip().splitlines()[1:-1]

    @property
    def command(self) -> str:
        """What is run."""
        return self.spec[0]

    def measure(self) -> None:
        """Run the command in the working directory, and keep what it prints."""
        words = shlex.split(self.command)
        is_ours = words[0] == "cached-rag" or words[:3] == ["python", "-m", "docs.experiments"]
        words += ["--json"] if is_ours else []
        here = os.environ | {"PYTHONPATH": str(DOCS.parent)}
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=here)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        kept = {"command": self.command, "date": str(date.today()), **found}
        self._file.write_text(json.dumps(kept, indent=1) + "\n")

    def drawn(self) -> str:
        """The table of what was measured, and where it comes from."""
        found = json.loads(self._file.read_text())
        lines = list(self._lines())
        columns = {title: how for title, how in lines if title not in ("only", "say", "from")}
        only = dict(how.split("=", 1) for title, how in lines if title == "only")
        assert len(only) == sum(title == "only" for title, _ in lines), "one line a field"
        said = dict(how.split(" => ") for title, how in lines if title == "say")
        rows = [row for row in found[dict(lines).get("from", "rows")] if _passes(row, only)]
        cells = [list(columns), ["---"] * len(columns)]
        for row in rows:
            written = (_cell(how, row) for how in columns.values())
            cells.append([said.get(cell.strip("`"), cell) for cell in written])
        facts = found["machine"]
        origins = found.get("measured") or [facts]  # a journal may have been filled at several
        source = [
            f"`{found['command']}`",
            found["date"],
            *(
                f"commit {one['commit'] or 'unknown'}, {one['processor']}, {one['threads']} threads"
                for one in origins
            ),
            *([facts["accelerator"]] if facts.get("accelerator") else []),
            f"torch {facts['torch']}",
        ]
        table = [f"| {' | '.join(line)} |" for line in cells]
        return "\n".join([*table, "", f"({', '.join(source)})", ""])

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Its columns and its lines "only", "say" and "from", as (title, how)."""
        for title, how in map(_column, self.spec[1:]):
            if title == "like":
                other = next(one for page in PAGES for one in blocks(page) if one.name == how)
                yield from (line for line in other._lines() if line[0] != "only")
            else:
                yield title, how

    @property
    def _file(self) -> Path:
        return KEPT / f"{self.name}.json"


def _column(line: str) -> tuple[str, str]:
    title, _, how = line.partition(": ")
    return title.strip(), how.strip()


def _passes(row: dict[str, Any], only: dict[str, str]) -> bool:
    """Whether a row has, in each field that is named, one of the values beside it."""
    return all(str(row[name]) in values.split() for name, values in only.items())


def _cell(how: str, row: dict[str, Any]) -> str:
    try:
        return how.format(**row)
    except TypeError:  # None has no digits
        return ""


def blocks(page: Path) -> Iterator[Block]:
    """All places for figures in a page."""
    for head, name, shown in _BLOCK.findall(page.read_text()):
        yield Block(page, name, head, shown)


@dataclass(frozen=True)
class Source:
    """Where figures come from: the page they stand in, a commit, and the command or the words."""

    page: Path
    commit: str
    what: str


def sources() -> Iterator[Source]:
    """Those of all tables and texts, but for the trials."""
    for page in PAGES:
        if page == TRIALS:
            continue
        text = page.read_text()
        for block in blocks(page):
            found = json.loads((KEPT / f"{block.name}.json").read_text())
            for one in found.get("measured") or [found["machine"]]:
                yield Source(page, (one["commit"] or "unknown").rstrip("+"), block.command)
            text = text.replace(f"{block.head}{block.shown}", "")
        for one in COMMIT.finditer(text):
            before = " ".join(text[: one.start()].split())
            yield Source(page, one[1], before[-100:])


@functools.cache
def is_new(commit: str) -> bool:
    """Whether a commit is `SINCE` or comes behind it."""
    command = ["git", "-C", str(DOCS), "merge-base", "--is-ancestor", SINCE, commit]
    return subprocess.run(command, check=False).returncode == 0


def write(block: Block) -> None:
    """Put a block's table into its page."""
    text = block.page.read_text()
    begin = text.index(block.head) + len(block.head)
    end = text.index("<!-- end -->", begin)
    block.page.write_text(text[:begin] + block.drawn() + text[end:])


def main(names: list[str]) -> None:
    """Measure and write the blocks of these names, or draw all anew."""
    found = defaultdict(list)
    for page in PAGES:
        for block in blocks(page):
            found[block.name].append(block)
    if names == ["--list"]:
        for one in sorted(sources(), key=lambda one: is_new(one.commit)):
            age = "new" if is_new(one.commit) else "OLD"
            print(f"{age} {one.commit} {one.page.relative_to(DOCS.parent)}: {one.what}")
        return
    draws_only = names == ["--draw"]
    for name in [*found] if draws_only else names:
        if name not in found:
            raise SystemExit(f"no page has figures {name!r}; there are {', '.join(found)}")
        if not draws_only:
            found[name][0].measure()
        for block in found[name]:
            write(block)


if __name__ == "__main__":
    main(sys.argv[1:])
