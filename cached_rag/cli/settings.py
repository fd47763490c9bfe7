"""Options of commands, made from the classes of settings that they fill, and from a file."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from cached_rag.errors import ConfigError
from cached_rag.options import Setting, settings_of, unknown_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Looked for in the working folder.
FILE = Path("cached-rag.toml")
_ALL = "--help-all"
_MORE = f"{_ALL} shows rare options, too. All may stand in {FILE}: docs/quickstart.md."
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class OptionsOf:
    """Settings that a command has as options.

    It annotates a parameter of the command, which gets those that were given, by name.

    Attributes:
        kinds: classes of settings.
        shown: those that `--help` shows; `--help-all` shows the others, too.
        only: those that the command has; empty for all.
        but: those that it does not have.
        defaults: those that this command has other defaults for.
        parsers: what makes a setting of the option's texts, where it is no plain one.
        environment: variables of the environment that stand for some.
    """

    kinds: tuple[type, ...]
    shown: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    parsers: Mapping[str, Callable[[list[str]], Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Setting]:
        """Those that the command has, by name."""
        found = settings_of(*self.kinds)
        names = [name for name in self.only or found if name not in self.but]
        return {name: found[name] for name in names}

    def parameters(self) -> Iterator[inspect.Parameter]:
        """A parameter of the command line for each; None where it is not given."""
        for name, one in self.settings.items():
            is_parsed = name in self.parsers
            kind = list[str] if is_parsed else _plain_type(one.type)
            default = self.defaults.get(name, one.default)
            option = typer.Option(
                _flag(name, kind, default),
                help=_brief(one.help) + _said(default),
                hidden=name not in self.shown,
                envvar=self.environment.get(name),
                metavar="FIELD=VALUE" if is_parsed else None,
            )
            annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )

    def taken(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those that were given, taken out of a command's values, and this command's defaults."""
        found = dict(self.defaults)
        for name, one in self.settings.items():
            if (value := values.pop(name)) not in (None, []):
                found[name] = self._parsed(one, value)
        return found

    def _parsed(self, one: Setting, value: Any) -> Any:
        if one.name in self.parsers:
            return self.parsers[one.name](value)
        if isinstance(value, list):
            return tuple(value)
        if _is_any_of(one.type, Mapping) and isinstance(value, str):
            return _object(one.name, value)
        return _WORDS.get(value, value) if _is_any_of(one.type, bool) else value


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that `OptionsOf` annotates are options, one for each setting."""
    signature = inspect.signature(command, eval_str=True)
    takes: dict[str, OptionsOf] = {}
    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        found = [given for given in get_args(one.annotation)[1:] if isinstance(given, OptionsOf)]
        if found:
            takes[one.name] = found[0]
            parameters += found[0].parameters()
        else:
            parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        taken = {name: group.taken(values) for name, group in takes.items()}
        command(**values, **taken)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


class SettingsCommand(TyperCommand):
    """A command that hides its rare options, unless asked for all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.context_settings.setdefault("max_content_width", 100)
        if any(getattr(one, "hidden", False) for one in self.params):
            self.epilog = _MORE

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, after `--help-all`."""
        if _ALL in args:
            for one in self.params:
                one.hidden = False  # type: ignore[attr-defined]
            args = ["--help"]
        return super().parse_args(ctx, args)


def defaults_from(file: Path | None, commands: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a file of settings has for each command, by the command's name.

    Settings at its top are for all commands that have them, those of a table for the command of
    that name, such as [serve] or [store.prune].

    Args:
        file: None for the one in the working folder, if there is one.
        commands: click's, by name.

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
    tables = {name: found.pop(name) for name in list(found) if name in commands}
    _check_known(path, found, set().union(*map(_names, commands.values())))
    return {
        name: _defaults_of(command, found, tables.get(name, {}), f"{path}, [{name}]")
        for name, command in commands.items()
    }


def _defaults_of(
    command: Any, common: Mapping[str, Any], own: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """A command's defaults, as click takes them; those of commands below it by their names."""
    below, has = getattr(command, "commands", {}), {one.name for one in command.params}
    mine = {name: value for name, value in own.items() if name not in below}
    _check_known(where, mine, has)
    mine = {name: value for name, value in common.items() if name in has} | mine
    # Click would make Python's text of an object.
    plain = {n: json.dumps(v) if isinstance(v, dict) else v for n, v in mine.items()}
    return plain | {
        name: _defaults_of(one, common, own.get(name, {}), f"{where[:-1]}.{name}]")
        for name, one in below.items()
    }


def _names(command: Any) -> set[str]:
    """The settings of a command, and of those below it."""
    below = getattr(command, "commands", {}).values()
    return {one.name for one in command.params}.union(*map(_names, below))


def _check_known(where: object, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"{where}: {unknown_settings(unknown, sorted(known))}")


def _flag(name: str, kind: Any, default: Any) -> str:
    """The option's name; with its opposite, if it is on or off and not off by default."""
    flag = name.replace("_", "-")
    if len(name) == 1:
        return f"-{flag}"
    has_opposite = kind is bool and default is not False
    return f"--{flag}/--no-{flag}" if has_opposite else f"--{flag}"


def _said(default: Any) -> str:
    if default is None or default in ("", ()) or default is False:
        return ""
    return " [on]" if default is True else f" [{default}]"


def _brief(text: str) -> str:
    """The first thing that a help text says, as a sentence."""
    depth = 0
    for at, (sign, after) in enumerate(zip(text, text[1:] + " ", strict=True)):
        depth += (sign in "({") - (sign in ")}")
        if sign in ".;" and after == " " and not depth:
            text = text[:at]
            break
    return text[:1].upper() + text[1:] + "."


def _plain_type(kind: Any) -> Any:
    """What the command line reads for a setting of a type."""
    if str in (members := _members(kind)):
        return str
    plain = [one for one in members if one in (bool, int, float)]
    if len(plain) == len(members) == 1:
        return plain[0]
    return list[str] if _is_any_of(kind, tuple) else str


def _members(kind: Any) -> list[Any]:
    """The types of a union, less None."""
    found = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [one for one in found if one is not type(None)]


def _is_any_of(kind: Any, wanted: type) -> bool:
    return any((get_origin(one) or one) is wanted for one in _members(kind))


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is a JSON object, not {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is a JSON object, not {text!r}")
    return found
