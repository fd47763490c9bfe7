"""Options of commands come from the classes of settings, and from a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from cached_rag.cli.main import app, main
from cached_rag.cli.options import FILE, OptionsOf, SettingsCommand, with_settings
from cached_rag.config import BatchConfig, GenerationConfig, ModelConfig, StoreConfig
from cached_rag.errors import ConfigError
from cached_rag.options import parted, settings_of
from cached_rag.rag.document import DocumentLimits
from cached_rag.rag.folder import IndexConfig, Reranking, Retrieval
from cached_rag.server import ServerConfig

KINDS = (
    *(GenerationConfig, ModelConfig, StoreConfig, BatchConfig, IndexConfig, Retrieval, Reranking),
    *(DocumentLimits, ServerConfig),
)
# Lines of a terminal of usual size.
SCREEN = 40
COMMANDS = (
    *("ask", "chat", "explain", "search", "list", "delete", "demo", "doctor", "serve", "ingest"),
    *("eval", "bench", "schema run", "schema encode", "store prune"),
)


@dataclasses.dataclass(frozen=True)
class Painting:
    """How a wall is painted.

    Attributes:
        colour: what it is painted with: a name; None for white.
        coats, layers: how many of them. Each
            dries for a day.
        is_wet: go on at once.
        names: of the painters.
        extra: whatever else there is.
    """

    colour: str | None = None
    coats: int = 2
    layers: float = 1.5
    is_wet: bool = False
    names: tuple[str, ...] = ()
    extra: Mapping[str, Any] | None = None


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_help(kind):
    assert not [one.name for one in settings_of(kind).values() if len(one.help) < 10]


def test_help_comes_from_the_docstring():
    found = settings_of(Painting)
    assert found["colour"].help == "what it is painted with: a name; None for white."
    assert found["coats"].help == found["layers"].help == "how many of them. Each dries for a day."
    assert found["coats"].default == 2


def painted(arguments: list[str]) -> dict[str, Any]:
    """What a command is given that takes these arguments."""
    given: dict[str, Any] = {}

    def paint(
        how: Annotated[dict[str, Any], OptionsOf((Painting,), defaults={"coats": 3})],
    ) -> None:
        given.update(how)

    cli = typer.Typer()
    cli.command(cls=SettingsCommand)(with_settings(paint))
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return given


def test_only_what_is_given_reaches_the_command():
    assert painted([]) == {"coats": 3}
    assert painted(["--colour", "red", "--names", "a", "--names", "b", "--is-wet"]) == {
        "colour": "red",
        "names": ("a", "b"),
        "is_wet": True,
        "coats": 3,
    }
    assert painted(["--coats", "1", "--layers", "2", "--extra", '{"a": [1]}']) == {
        "coats": 1,
        "layers": 2.0,
        "extra": {"a": [1]},
    }


def test_a_command_may_take_an_object_of_the_class():
    given = []

    def paint(how: Annotated[Painting, OptionsOf(shown=("coats",))]) -> None:
        given.append(how)

    cli = typer.Typer()
    cli.command(cls=SettingsCommand)(with_settings(paint))
    assert CliRunner().invoke(cli, ["--coats", "4"]).exit_code == 0
    assert given == [Painting(coats=4)]
    assert "--layers" not in CliRunner().invoke(cli, ["--help"]).output


@pytest.mark.parametrize(
    ("args", "method", "ratio"),
    [
        ([], "cacheblend", 0.3),
        (["--recompute-ratio", "0.5"], "cacheblend", 0.5),
        (["--method", "full"], "full", None),
        (["--quality", "exact"], "prefix", None),
        (["--method", "epic", "--recompute-ratio", "0.2"], "epic", 0.2),
    ],
)
def test_a_method_that_is_given_replaces_all_that_a_file_says_of_one(args, method, ratio):
    found = []

    def ask(how: Annotated[GenerationConfig, OptionsOf()]) -> None:
        found.append((how.method, how.recompute_ratio))

    cli = typer.Typer()
    cli.command(cls=SettingsCommand)(with_settings(ask))
    file = {"method": "cacheblend", "recompute_ratio": 0.3}
    result = CliRunner().invoke(cli, args, default_map=file)
    assert result.exit_code == 0, result.output
    assert found == [(method, ratio)]


@pytest.mark.parametrize(
    ("file", "args", "found"),
    [
        ({"index": "i"}, ["--store", "kv"], (None, "kv")),
        ({"store": "kv"}, ["--index", "i"], ("i", None)),
        ({"index": "i", "store": "kv"}, [], ("i", "kv")),
        ({}, ["--index", "i", "--store", "kv"], ("i", "kv")),
    ],
)
def test_a_store_or_an_index_that_is_given_replaces_what_a_file_says_of_the_other(
    file, args, found
):
    taken = []
    cli = typer.Typer()

    @cli.command(cls=SettingsCommand)
    def serve(index: str | None = None, store: str | None = None) -> None:
        taken.append((index, store))

    assert CliRunner().invoke(cli, args, default_map=file).exit_code == 0
    assert taken == [found]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_help_all_has_the_rest(command):
    runner, words = CliRunner(), command.split()
    brief = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert brief.exit_code == 0
    assert len(brief.output.splitlines()) <= SCREEN
    if "--help-all" in brief.output:
        whole = runner.invoke(app, [*words, "--help-all"], env={"COLUMNS": "80"})
        assert whole.exit_code == 0
        assert len(whole.output) > len(brief.output)


@pytest.mark.parametrize(
    ("command", "option", "default"),
    [
        ("ingest", "model", "smollm2-135m"),
        ("demo", "model", "qwen2.5-coder-0.5b"),
        *((command, "backend", "the index's") for command in ("ask", "chat", "explain")),
        ("ask", "weights", "the index's"),
        ("search", "search", "the index's"),
    ],
)
def test_help_names_a_default_that_is_one(command, option, default):
    shown = CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "80"}).output
    after = " ".join(shown.partition(f"--{option} <str>")[2].partition("\n  --")[0].split())
    assert after.endswith(f"[{default}]")


def test_no_option_of_the_command_line_names_code_to_load():
    assert "--model-kwargs" not in CliRunner().invoke(app, ["serve", "--help-all"]).output


@pytest.fixture
def listed(tmp_path, monkeypatch, capsys):
    """What `list` is told, by a file of settings in the working folder."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *arguments: str) -> str:
        FILE.write_text(text)
        monkeypatch.setattr("sys.argv", ["cached-rag", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 1
        return capsys.readouterr().err

    return run


def test_settings_come_from_a_file(listed):
    assert "no index at there" in listed('index = "there"', "list")
    assert "no index at here" in listed('index = "there"\n[list]\nindex = "here"', "list")
    assert "no index at given" in listed('index = "there"', "list", "--index", "given")
    assert "settings of cached-rag.toml" in listed('index = "there"', "list")


def test_a_setting_may_be_called_as_a_command_is(listed):
    assert "no index at there" in listed('search = "words"\nstore = "kv"\nindex = "there"', "list")


def test_a_file_reaches_commands_below_others_and_has_objects(listed, monkeypatch):
    for text in ('index = "there"', '[store]\n[store.stats]\nindex = "there"'):
        assert "no index at there" in listed(text, "store", "stats")
    monkeypatch.setattr(
        "cached_rag.Engine.load",
        lambda *_, **how: (_ for _ in ()).throw(
            ConfigError(f"given {how['chat_template_kwargs']}")
        ),
    )
    said = listed("chat_template_kwargs = {enable_thinking = false}", "doctor")
    assert "given {'enable_thinking': False}" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[store.stats]\nport = 1", "[store.stats]: unknown setting"),
        ('indx = "a"', "did you mean index?"),
        ("prot = 1", "did you mean port?"),
        ("mirostat = 1", "unknown setting 'mirostat'; settings are"),
        ("[list]\nport = 1", "[list]: unknown setting"),
        ("a = ", "cannot be read"),
        ("model_kwargs = {}", "unknown setting"),
    ],
)
def test_what_no_command_has_is_refused(listed, text, said):
    assert said in " ".join(listed(text, "list").split())


def test_a_setting_reaches_the_class_that_has_it():
    model, store = parted({"dtype": "float32", "codec": "int8"}, ModelConfig, StoreConfig)
    assert (model, store) == ({"dtype": "float32"}, {"codec": "int8"})
    with pytest.raises(ConfigError, match="did you mean dtype"):
        parted({"dtyp": "float32"}, ModelConfig, StoreConfig)


def test_bad_json_is_said():
    with pytest.raises(ConfigError, match="JSON object"):
        OptionsOf((ModelConfig,)).taken(
            dict.fromkeys(settings_of(ModelConfig)) | {"chat_template_kwargs": json.dumps([1])}
        )
