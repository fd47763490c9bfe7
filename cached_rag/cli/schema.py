"""`cached-rag schema`: check, look at, encode and run prompts written in PML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.tree import Tree

from cached_rag.cli.options import (
    Device,
    Dtype,
    MaxTokens,
    Method,
    Model,
    Quality,
)
from cached_rag.cli.terminal import (
    Json,
    err,
    out,
    print_json,
    print_reports,
)
from cached_rag.defaults import DEFAULT_MODEL
from cached_rag.errors import PMLError

if TYPE_CHECKING:
    from cached_rag.pml import Schema, SchemaPrompt
    from cached_rag.pml.outline import Outline

schema_app = typer.Typer(help="Prompts made of modules, in PML.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="A <schema>.")]
PromptIn = Annotated[str, typer.Argument(help="A file with a <prompt>, or the <prompt> itself.")]
Store = Annotated[str | None, typer.Option(help="Folder for KV; without it, KV is kept in memory.")]
Layout = Annotated[str, typer.Option(help="auto, compact or schema.")]
Behind = Annotated[str, typer.Option(help="Encode behind: schema, head or nothing.")]


@schema_app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Schemas.")],
    prompt: Annotated[list[Path] | None, typer.Option(help="A <prompt> of the schema.")] = None,
    as_json: Json = False,
) -> None:
    """Say what is wrong, as FILE:LINE:COLUMN, and exit 1; or nothing, and exit 0."""
    from cached_rag.pml import Schema

    problems: list[PMLError] = []
    for file in files:
        try:
            schema = Schema.from_file(file)
            for asked in prompt or []:
                schema.prompt_from_file(asked)
        except PMLError as problem:
            problems.append(problem)
    if as_json:
        attributes = ("file", "line", "column", "what")
        print_json({"problems": [{n: getattr(e, n) for n in attributes} for e in problems]})
    for error in problems if not as_json else []:
        out.print(str(error), markup=False, highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


@schema_app.command()
def show(file: File, model: Model = DEFAULT_MODEL, as_json: Json = False) -> None:
    """Draw the tree with token counts and positions, by a model's tokenizer and chat template."""
    from cached_rag.backends.tokenizer import Tokenization
    from cached_rag.backends.transformers.loading import load_tokenizer
    from cached_rag.pml import Schema
    from cached_rag.pml.outline import outline

    found = outline(Schema.from_file(file), Tokenization(load_tokenizer(model)))
    if as_json:
        print_json(found.to_dict())
    else:
        out.print(_tree(found), markup=False, highlight=False)


def _tree(node: Outline, parent: Tree | None = None) -> Tree:
    label = f"{node.kind} {node.label}".strip()
    line = f"{label}  {node.tokens} tokens, {node.start}-{node.end}"
    tree = Tree(line) if parent is None else parent.add(line)
    for child in node.children:
        _tree(child, tree)
    return tree


@schema_app.command()
def encode(
    file: File,
    store: Annotated[str, typer.Option(help="Folder for KV.")],
    model: Model = DEFAULT_MODEL,
    layout: Layout = "auto",
    behind: Behind = "schema",
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Prefill all modules now; those that have KV are not computed again."""
    from cached_rag import Engine
    from cached_rag.pml import Schema

    schema = Schema.from_file(file, layout=layout, behind=behind)
    with Engine.load(model, store=store, dtype=dtype, device=device) as engine:
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


@schema_app.command()
def run(
    file: File,
    prompt: PromptIn,
    text: Annotated[str | None, typer.Option(help="Text to put at the prompt's end.")] = None,
    model: Model = DEFAULT_MODEL,
    store: Store = None,
    layout: Layout = "auto",
    behind: Behind = "schema",
    method: Method = "auto",
    quality: Quality = None,
    max_tokens: MaxTokens = 128,
    compare: Annotated[bool, typer.Option(help="Answer with full prefill, too.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answer a prompt of a schema; modules that have no KV are prefilled first."""
    from cached_rag import Engine, StoreConfig
    from cached_rag.pml import Schema

    asked = _prompt(Schema.from_file(file, layout=layout, behind=behind), prompt)
    asked = asked.then(text) if text else asked
    settings = StoreConfig(store, sequence_bytes=0)  # full prefill must not find what it left
    with Engine.load(model, store=settings, dtype=dtype, device=device) as engine:
        asked.schema.encode(engine)
        stream = engine.stream(asked, method=method, quality=quality, max_tokens=max_tokens)
        pieces = []
        for piece in stream:
            pieces.append(piece)
            if not as_json:
                out.print(piece, end="", markup=False, highlight=False)
        options: dict[str, Any] = {"method": "full", "max_tokens": max_tokens}
        full = engine.generate(asked, **options) if compare else None
    if as_json:
        found: dict[str, Any] = {"text": "".join(pieces), "report": stream.report.to_dict()}
        if full is not None:
            found["full"] = {"text": full.text, "report": full.report.to_dict()}
        print_json(found)
        return
    out.print("\n")
    print_reports([("cached", stream.report)] + ([("full prefill", full.report)] if full else []))
    if full is not None:
        out.print(f"Full prefill's answer: {full.text}", markup=False)


def _prompt(schema: Schema, prompt: str) -> SchemaPrompt:
    if prompt.lstrip().startswith("<"):
        return schema.prompt_from_string(prompt)
    return schema.prompt_from_file(prompt)
