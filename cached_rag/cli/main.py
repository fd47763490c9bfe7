"""The command line, put together, and the file of settings for it.

Each command parses, calls the library and prints.
"""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import TextIOWrapper, UnsupportedOperation
from pathlib import Path
from typing import Annotated, Any

import typer

from cached_rag import __version__
from cached_rag.cli import ask, bench, documents, schema, serve, store
from cached_rag.cli.options import FILE, SettingsCommand, with_settings
from cached_rag.cli.terminal import err, out
from cached_rag.errors import CachedRAGError, ConfigError
from cached_rag.options import require, unknown_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


app = typer.Typer(
    help="Retrieval-augmented generation without prefilling the same text twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "ingest": documents.ingest_command,
    "ask": ask.ask_command,
    "chat": ask.chat_command,
    "explain": ask.explain_command,
    "list": documents.list_command,
    "search": ask.search_command,
    "delete": documents.delete_command,
    "hold": documents.hold_command,
    "demo": bench.demo_command,
    "doctor": bench.doctor_command,
    "bench": bench.bench_command,
    "eval": bench.evaluate_command,
    "serve": serve.serve_command,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=SettingsCommand)(with_settings(_command))
app.add_typer(store.store_app, name="store")
app.add_typer(schema.schema_app, name="schema")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="CACHED_RAG_CONFIG",
            help=f"File with settings; without it {FILE} in this folder, if it is there.",
        ),
    ] = None,
) -> None:
    """Take settings from a file, too."""
    context.default_map = defaults_from(config, context.command)
    if config is None and context.default_map:
        err.print(f"settings of {FILE}", style="dim")


def defaults_from(file: Path | None, command: Any) -> dict[str, Any]:
    """What a file of settings has for each command, by the command's name.

    Settings at its top are for all commands that have them, those of a table for the command of
    that name, such as [serve] or [store.prune].

    Args:
        file: None for the one in the working folder, if there is one.
        command: click's group of all commands.

    Raises:
        ConfigError: the file cannot be read, or has what no such command has.
    """
    path = file or FILE
    if file is None and not path.is_file():
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'{path} cannot be read: {error}; see docs/quickstart.md, "Settings"'
        ) from error
    return _defaults_of(command, {}, found, path, "")


def _defaults_of(
    command: Any, common: Mapping[str, Any], own: Mapping[str, Any], path: Path, table: str
) -> dict[str, Any]:
    """A command's defaults, as click takes them; those of commands below it by their names.

    Args:
        common: settings of the tables that this one is in.
        own: those of this table, and the tables in it.
    """
    below = getattr(command, "commands", {})
    # A setting may be called as a command is: `search`, `store`.
    tables = {n: value for n, value in own.items() if n in below and isinstance(value, dict)}
    mine = {name: value for name, value in own.items() if name not in tables}
    known = _names(command)
    if unknown := [name for name in mine if name not in known]:
        where = f"{path}, [{table}]" if table else path
        raise ConfigError(f"{where}: {unknown_settings(unknown, sorted(known))}")
    settings = {**common, **mine}
    # Click would make Python's text of an object.
    given = {n: json.dumps(v) if isinstance(v, dict) else v for n, v in settings.items()}
    defaults = {
        one.name: _taken(one, given[one.name]) for one in command.params if one.name in given
    }
    for name, one in below.items():
        inner = f"{table}.{name}" if table else name
        defaults[name] = _defaults_of(one, settings, tables.get(name, {}), path, inner)
    return defaults


def _taken(option: Any, value: Any) -> Any:
    """A setting as click takes it: of an option that may be repeated, a text is the only one."""
    return [value] if getattr(option, "multiple", False) and isinstance(value, str) else value


def _names(command: Any) -> set[str]:
    """The settings of a command, and of those below it."""
    below = getattr(command, "commands", {}).values()
    return {one.name for one in command.params}.union(*map(_names, below))


def main() -> None:
    """Run, turning this library's errors into one line and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a code page may lack what an answer has
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, TextIOWrapper):  # a question that is no text is refused as one
        with suppress(UnsupportedOperation):  # it is in use
            sys.stdin.reconfigure(errors="surrogateescape")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        require(sys.stdout is not None, "standard output is closed; send it to a file or /dev/null")
        app()
    except CachedRAGError as error:
        err.print(f"error: {error}", style="red")
        sys.exit(1)
