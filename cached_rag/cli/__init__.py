"""The command line: `main` puts it together, of files with a few commands each."""

from __future__ import annotations

import sys

_INTERRUPTED = 130  # as shells have it for SIGINT


def run() -> None:
    """Run; an interrupt while the libraries are loaded is no error to be traced."""
    try:
        from cached_rag.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
