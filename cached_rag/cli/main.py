"""The command line, put together. Each command parses, calls the library and prints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

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
from cached_rag.cli.settings import FILE, SettingsCommand, defaults_from, with_settings
from cached_rag.cli.store import store_app
from cached_rag.cli.terminal import err, out
from cached_rag.errors import CachedRAGError

app = typer.Typer(
    help="Retrieval-augmented generation without prefilling the same text twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "ask": ask_command,
    "chat": chat_command,
    "explain": explain_command,
    "list": list_command,
    "search": search_command,
    "delete": delete_command,
    "demo": demo_command,
    "doctor": doctor_command,
    "eval": evaluate_command,
    "serve": serve_command,
}
app.command("ingest", cls=IngestCommand)(with_settings(ingest_command))
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=SettingsCommand)(with_settings(_command))
app.add_typer(store_app, name="store")
app.add_typer(schema_app, name="schema")
app.add_typer(bench_app, name="bench")


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="CACHED_RAG_CONFIG",
            help=f"File with settings; without it {FILE} in this folder, if it is there.",
        ),
    ] = None,
) -> None:
    """Take settings from a file, too."""
    assert isinstance(context.command, TyperGroup)
    context.default_map = defaults_from(config, context.command.commands)
    if config is None and context.default_map:
        err.print(f"settings of {FILE}", style="dim")


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
