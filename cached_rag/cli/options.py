"""Options of commands, made from the classes of settings that they fill.

Those that several commands have stand here, too, each with its name and help in one place.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand

import cached_rag
from cached_rag.config import DEFAULT_MODEL, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.errors import ConfigError
from cached_rag.kv.files import is_file
from cached_rag.options import Setting, members, settings_of
from cached_rag.rag.folder import IndexConfig, Reranking
from cached_rag.rag.index import CHANGEABLE, DocumentIndex

# Looked for in the working folder.
FILE = Path("cached-rag.toml")
_ALL = "--help-all"
_MORE = f"{_ALL} shows rare options, too. All may stand in {FILE}: docs/quickstart.md."
_WORDS = {"true": True, "false": False}
# The first sentence of a help text, or what stands before its first semicolon.
_BRIEF = re.compile(r"(\([^)]*\)|\{[^}]*\}|[.;](?! |$)|[^.;])*")
# Variables of the environment that stand for an option.
_ENVIRONMENT = {"remote": "CACHED_RAG_REMOTE", "api_key": "CACHED_RAG_API_KEYS"}
# Settings that are no options: an index has its own folder for KV; the key comes from the
# environment, as others see what a command is given; of `model_kwargs` some load code; and the
# others are for programs, which want a form, or study a method.
_NO_OPTIONS = (
    *("path", "namespace", "signing_key", "model_kwargs"),
    *("grammar", "shows_control", "logprobs", "ignore_eos"),
)
Number = TypeVar("Number", int, float)


def filters(where: list[str]) -> dict[str, list[str]]:
    """What `--where` says, by field.

    Raises:
        ConfigError: one of them has no "=".
    """
    found: dict[str, list[str]] = {}
    for text in where:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--where takes FIELD=VALUE, not {text!r}")
        found.setdefault(name, []).append(value)
    return found


@dataclass(frozen=True)
class OptionsOf:
    """Settings that a command has as options.

    It annotates a parameter of the command, which gets those that were given: by name, or as an
    object, if its type is a class of settings.

    Attributes:
        kinds: classes of settings; empty for that one.
        shown: those that `--help` shows, None for all; `--help-all` shows the others, too.
        only: those that the command has; empty for all.
        but: those that it does not have.
        defaults: those that this command has other defaults for.
        recalled: those that the index remembers, so that `--help` names no default.
    """

    kinds: tuple[type, ...] = ()
    shown: tuple[str, ...] | None = None
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    recalled: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Setting]:
        """Those that the command has, by name."""
        found = settings_of(*self.kinds)
        names = [name for name in self.only or found if name not in (*self.but, *_NO_OPTIONS)]
        return {name: found[name] for name in names}

    def parameters(self) -> Iterator[inspect.Parameter]:
        """A parameter of the command line for each; None where it is not given."""
        for name, one in self.settings.items():
            kind = list[str] if name == "where" else _plain_type(one.type)
            default = self.defaults.get(name, one.default)
            told = "the index's" if name in self.recalled else default
            option = typer.Option(
                _flag(name, kind, default),
                help=_brief(one.help) + _said(told),
                hidden=self.shown is not None and name not in self.shown,
                envvar=_ENVIRONMENT.get(name),
                metavar="FIELD=VALUE" if name == "where" else None,
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
                found[name] = _parsed(one, value)
        return found


def _parsed(one: Setting, value: Any) -> Any:
    """A setting of what the command line read for it."""
    if one.name == "where":
        return filters(value)
    if isinstance(value, list):
        return tuple(value)
    if Mapping in members(one.type):
        return _object(one.name, value)
    return _WORDS.get(value, value) if bool in members(one.type) else value


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that `OptionsOf` annotates are options, one for each setting."""
    signature = inspect.signature(command, eval_str=True)
    takes: dict[str, tuple[Callable[..., Any], OptionsOf]] = {}
    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        kind, *notes = get_args(one.annotation) or (None,)
        found = [given for given in notes if isinstance(given, OptionsOf)]
        if found:
            group = found[0] if found[0].kinds else replace(found[0], kinds=(kind,))
            takes[one.name] = (kind, group)
            parameters += group.parameters()
        else:
            parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        taken = {name: kind(**group.taken(values)) for name, (kind, group) in takes.items()}
        command(**values, **taken)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


# Which method it is, and where KV is: what is given of these says all of it.
OF_METHODS = ("method", "quality", "recompute_ratio")
_OF_FOLDERS = ("index", "store")


class SettingsCommand(TyperCommand):
    """A command that hides its rare options, unless asked for all.

    A method that is given takes the place of all that a file of settings says of one, and an index
    or a store that of the other.
    """

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
        left: list[str] = super().parse_args(ctx, args)
        for group in (OF_METHODS, _OF_FOLDERS):
            sources = {name: ctx.get_parameter_source(name) for name in group if name in ctx.params}
            given = {name for name, source in sources.items() if source.name == "COMMANDLINE"}
            if given - {"recompute_ratio"}:
                ctx.params.update(dict.fromkeys(sources.keys() - given))
        return left


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
    found = _BRIEF.match(text)
    text = found[0] if found else text
    return text[:1].upper() + text[1:] + "."


def _plain_type(kind: Any) -> Any:
    """What the command line reads for a setting of a type."""
    found = members(kind)
    if len(found) == 1 and found[0] in (bool, int, float):
        return found[0]
    return list[str] if tuple in found else str


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is a JSON object, not {text!r}")
    return found


# What a command is given of settings that are not all of one class.
Given = dict[str, Any]
DEFAULT_INDEX = Path("cached-rag-index")
_MODEL = "Alias, Hugging Face id, folder or .gguf file."


def at_home(path: Path | None) -> Path | None:
    """A path whose `~` is the user's home; of `--index=~/x`, unlike `--index ~/x`, shells keep it.

    Raises:
        ConfigError: nobody knows where the home is.
    """
    try:
        return path and path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}; write the whole path") from error


def to_write(path: Path | None) -> Path | None:
    """A file for results, of which it is known before they are measured that it can be written.

    Raises:
        ConfigError: it cannot.
    """
    path = at_home(path)
    if path and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{path} cannot be written; name a file in a folder that is there")
    return path


Index = Annotated[Path, typer.Option("--index", callback=at_home, help="Folder of the index.")]
Model = Annotated[str, typer.Option(help=_MODEL)]


def index_model(default: str) -> Any:
    """The option `--model` of a command that may open an index, for which there is none."""
    said = f"{_MODEL} An index keeps its own."
    return typer.Option("--model", help=said + _said(default))


IndexModel = Annotated[str | None, index_model(DEFAULT_MODEL)]

# How a model is loaded.
Loading = Annotated[
    Given, OptionsOf((ModelConfig,), shown=("device", "dtype", "weights", "backend"))
]
# What the first ingestion of an index settles.
SETTLED = ("embedding", "chunk_tokens", "codec", "primers", "first_exact", "system")


def answering(*kinds: type, shown: tuple[str, ...] = (), **defaults: Any) -> OptionsOf:
    """Which chunks a question is answered from, and how."""
    return OptionsOf(
        (*kinds, GenerationConfig),
        shown=("k", "method", "quality", "max_tokens", *shown),
        defaults=defaults,
    )


def opening(**defaults: Any) -> OptionsOf:
    """How an index that is there is opened: all but what its first ingestion settled."""
    return OptionsOf(
        (IndexConfig, Reranking, ModelConfig, StoreConfig),
        shown=("search", "device", "backend", "remote"),
        but=SETTLED,
        defaults=defaults,
        recalled=CHANGEABLE,
    )


def require_index(index: Path) -> None:
    """Refuse a folder that is no index.

    Raises:
        ConfigError: it is none.
    """
    if not is_file(index / "documents.sqlite"):
        raise ConfigError(
            f"there is no index at {index}; make one with: cached-rag ingest PATH --index {index}"
        )


def documents_of(index: Path) -> closing[DocumentIndex]:
    """What an index has of its documents; a folder that is no index is refused."""
    require_index(index)
    return closing(DocumentIndex(index / "documents.sqlite"))


def opened(index: Path, **options: Any) -> cached_rag.CachedRAG:
    """See `CachedRAG.open`; a folder that is no index is refused, as by `require_index`."""
    require_index(index)
    return cached_rag.CachedRAG.open(index, **signed(options))


def signed(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a store, with the key that the environment has."""
    key = signing_key()
    return {**options, "signing_key": key} if key else options


def signing_key() -> str | None:
    """What KV is signed with; a key that is too short or too long is refused."""
    return StoreConfig(signing_key=os.environ.get("CACHED_RAG_SIGNING_KEY") or None).signing_key


def names(text: str) -> list[str]:
    """Names between commas; a comma between the options of one method does not split."""
    parts: list[str] = []
    for part in text.split(","):
        method, _, _ = part.partition("@")  # what follows names how chunks are encoded
        if parts and "=" in method and ":" not in method and ":" in parts[-1]:
            parts[-1] += "," + part
        elif part.strip():
            parts.append(part.strip())
    return parts


def numbers(text: str, kind: Callable[[str], Number], what: str) -> list[Number]:
    """Numbers between commas.

    Args:
        what: says in the error what they are.

    Raises:
        ConfigError: there is none, or one of them is no number.
    """
    try:
        found = [kind(part) for part in names(text)]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{what}, comma-separated where several, not {text!r}")
    return found
