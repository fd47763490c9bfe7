"""`cached-rag schema`: check, look at, encode and run prompts written in PML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.tree import Tree

import cached_rag
from cached_rag.cli import options
from cached_rag.cli.ask import Compare, plainly
from cached_rag.cli.terminal import Json, err, out, print_answer, print_json, print_pieces
from cached_rag.config import DEFAULT_MODEL
from cached_rag.errors import ConfigError, PMLError

if TYPE_CHECKING:
    from cached_rag.pml.schema import Outline

schema_app = typer.Typer(help="Prompts made of modules, in PML.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="A <schema>.")]
PromptIn = Annotated[str, typer.Argument(help="A file with a <prompt>, or the <prompt> itself.")]


@dataclasses.dataclass(frozen=True)
class Placing:
    """Where a schema's modules stand, and where their KV goes.

    Attributes:
        store: folder for KV; None keeps it in memory.
        layout: auto, compact or schema.
        behind: encode behind: schema, head or nothing.
    """

    store: str | None = None
    layout: str = "auto"
    behind: str = "schema"

    def read(self, file: Path) -> cached_rag.Schema:
        """The schema in a file."""
        return cached_rag.Schema.from_file(file, layout=self.layout, behind=self.behind)

    def kept(self, **more: Any) -> cached_rag.StoreConfig:
        """Where KV is kept."""
        return cached_rag.StoreConfig(self.store, **options.signed(more))


@schema_app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Schemas.")],
    prompt: Annotated[list[Path] | None, typer.Option(help="A <prompt> of the schema.")] = None,
    as_json: Json = False,
) -> None:
    """Say what is wrong, as FILE:LINE:COLUMN, and exit 1; or nothing, and exit 0."""
    problems: list[PMLError] = []
    for file in files:
        try:
            schema = cached_rag.Schema.from_file(file)
            for asked in prompt or []:
                schema.prompt_from_file(asked)
        except PMLError as problem:
            problems.append(problem)
    if as_json:
        attributes = ("file", "line", "column", "what")
        print_json({"problems": [{n: getattr(e, n) for n in attributes} for e in problems]})
    for error in problems if not as_json else []:
        out.print(str(error), soft_wrap=True)
    if problems:
        raise typer.Exit(1)


@schema_app.command()
def show(file: File, model: options.Model = DEFAULT_MODEL, as_json: Json = False) -> None:
    """Draw the tree with token counts and positions, by a model's tokenizer and chat template."""
    from cached_rag.backends.tokenizer import Tokenization
    from cached_rag.backends.transformers.loading import load_tokenizer

    found = cached_rag.Schema.from_file(file).outline(Tokenization(load_tokenizer(model)))
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        out.print(_tree(found))


def _tree(node: Outline, parent: Tree | None = None) -> Tree:
    label = f"{node.kind} {node.label}".strip()
    line = f"{label}  {node.tokens} tokens, {node.start}-{node.end}"
    tree = Tree(line) if parent is None else parent.add(line)
    for child in node.children:
        _tree(child, tree)
    return tree


@schema_app.command(cls=options.SettingsCommand)
@options.with_settings
def encode(
    file: File,
    model: options.Model = DEFAULT_MODEL,
    *,
    placing: Annotated[Placing, options.OptionsOf()],
    how: options.Loading,
    as_json: Json = False,
) -> None:
    """Prefill all modules, into the folder --store; those that have KV are not computed again."""
    if placing.store is None:
        raise ConfigError("give --store, a folder for KV: else nothing is left of it")
    schema = placing.read(file)
    with cached_rag.Engine.load(model, store=placing.kept(), **how) as engine:
        engine.library.check_kept()  # else nothing would be left of it in the folder asked for
        missing = len(schema.missing(engine))
        with Progress(console=err, disable=as_json) as bar:
            task = bar.add_task("modules", total=missing)
            summary = schema.encode(engine, lambda _: bar.advance(task))
    if as_json:
        print_json(dataclasses.asdict(summary))
    else:
        out.print(
            f"{summary.encoded} modules prefilled now ({summary.tokens} tokens, "
            f"{summary.seconds:.1f} s), {summary.present} were there"
        )


@schema_app.command(cls=options.SettingsCommand)
@options.with_settings
def run(
    file: File,
    prompt: PromptIn,
    model: options.Model = DEFAULT_MODEL,
    *,
    text: Annotated[str | None, typer.Option(help="Text to put at the prompt's end.")] = None,
    compare: Compare = False,
    placing: Annotated[Placing, options.OptionsOf()],
    asked: Annotated[options.Given, options.answering(max_tokens=128)],
    how: options.Loading,
    as_json: Json = False,
) -> None:
    """Answer a prompt of a schema; modules that have no KV are prefilled first."""
    schema = placing.read(file)
    is_written_out = prompt.lstrip().startswith("<")
    read = schema.prompt_from_string if is_written_out else schema.prompt_from_file
    filled = read(prompt)
    filled = filled.then(text) if text else filled
    # Full prefill must not find what the first answer left.
    with cached_rag.Engine.load(model, store=placing.kept(sequence_bytes=0), **how) as engine:
        filled.schema.encode(engine)
        stream = engine.stream(filled, **asked)
        print_pieces(stream, are_shown=not as_json)
        full = engine.generate(filled, **plainly(asked)) if compare else None
    print_answer(stream.generation, full, as_json=as_json)
