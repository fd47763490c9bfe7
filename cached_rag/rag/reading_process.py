"""The process that reads documents for another one, which watches over it and may end it.

It takes a line of JSON for each document, and gives one back. Nothing that a parser prints gets to
the terminal, and no code is imported from the folder it is started in.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

from cached_rag.errors import DocumentError
from cached_rag.rag.limits import too_long
from cached_rag.rag.naming import shown
from cached_rag.rag.readers import load_document

# By so many seconds later than its watcher would a process ends itself, should that be gone.
_GRACE = 30.0


def main() -> None:
    """Read documents until there is nobody who asks."""
    with os.fdopen(os.dup(1), "w", encoding="ascii") as answers, open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        for line in sys.stdin:
            wanted = json.loads(line)
            if wanted["seconds"] is not None:
                late = wanted["seconds"] + _GRACE
                faulthandler.dump_traceback_later(late, exit=True, file=nothing)
            answers.write(_answer(wanted) + "\n")
            answers.flush()
            faulthandler.cancel_dump_traceback_later()


def _answer(wanted: dict[str, Any]) -> str:
    answer = json.dumps(_read(wanted))
    if len(answer) >= wanted["most_bytes"]:
        # By what surrounds its text: a part for each character, for one.
        return json.dumps(
            {"error": f"{shown(wanted['path'])}: {too_long(wanted['max_characters'])}"}
        )
    return answer


def _read(wanted: dict[str, Any]) -> dict[str, Any]:
    limits = wanted["max_bytes"], wanted["max_characters"]
    try:
        found = load_document(wanted["path"], *limits, Path(wanted["inside"]))
    except DocumentError as error:
        return {"error": str(error)}
    return {
        "title": found.title,
        "text": found.text,
        "parts": found.parts,
        "language": found.language,
    }
