"""The command line: `main` puts it together, of files with a few commands each."""

import signal
import sys

_INTERRUPTED = 130  # as shells have it for SIGINT


def run() -> None:
    """Run; an interrupt while libraries are loaded, or the process ends, is no error to trace."""
    try:
        from cached_rag.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:  # an interrupt while Python ends, which torch makes long, would be traced or abort
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
