"""The command line, put together. Each command parses, calls the library and prints."""

from __future__ import annotations

import logging
import sys
from io import TextIOWrapper

import typer

from cached_rag import __version__
from cached_rag.cli.ask import ask_command
from cached_rag.cli.bench import bench_app
from cached_rag.cli.chat import chat_command
from cached_rag.cli.demo import demo_command
from cached_rag.cli.doctor import doctor_command
from cached_rag.cli.documents import delete_command, list_command, search_command
from cached_rag.cli.eval import evaluate_command
from cached_rag.cli.explain import explain_command
from cached_rag.cli.ingest import IngestCommand, ingest_command
from cached_rag.cli.schema import schema_app
from cached_rag.cli.serve import serve_command
from cached_rag.cli.store import store_app
from cached_rag.cli.terminal import err, out
from cached_rag.errors import CachedRAGError

app = typer.Typer(
    help="Retrieval-augmented generation without prefilling the same text twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("ingest", cls=IngestCommand)(ingest_command)
app.command("ask")(ask_command)
app.command("chat")(chat_command)
app.command("explain")(explain_command)
app.command("list")(list_command)
app.command("search")(search_command)
app.command("delete")(delete_command)
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.command("eval")(evaluate_command)
app.command("serve")(serve_command)
app.add_typer(store_app, name="store")
app.add_typer(schema_app, name="schema")
app.add_typer(bench_app, name="bench")


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__)


def main() -> None:
    """Run, turning this library's errors into one line and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a code page may lack what an answer has
            stream.reconfigure(errors="replace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except CachedRAGError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
