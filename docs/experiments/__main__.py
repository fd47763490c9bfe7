"""`python -m docs.experiments COMMAND`: each runs one experiment and prints its figures."""

from __future__ import annotations

import sys

import typer

from cached_rag.cli.options import SettingsCommand, with_settings
from cached_rag.cli.terminal import err
from cached_rag.errors import CachedRAGError
from docs.experiments.commands.answers import answers, chat, memory, weights_formats
from docs.experiments.commands.gpu import gpu
from docs.experiments.commands.models import (
    architectures,
    chains,
    deviation,
    loading,
    models,
    order,
)
from docs.experiments.commands.peers import peers_command
from docs.experiments.commands.scale import scale
from docs.experiments.commands.schemas import schema_demo, schema_eval, schema_lengths
from docs.experiments.commands.serving import attention, kernels, mmlu, serving, traffic
from docs.experiments.commands.stored import stored
from docs.experiments.commands.vllm import vllm_handoff

app = typer.Typer(
    help="What the docs' figures come from.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for command in (
    *(answers, chat, memory, models, architectures, loading, deviation, order, chains, scale),
    *(serving, attention, kernels, traffic, mmlu, stored, gpu),
    *(schema_demo, schema_eval, schema_lengths, vllm_handoff),
):
    app.command(cls=SettingsCommand)(with_settings(command))
app.command("peers", cls=SettingsCommand)(with_settings(peers_command))
app.command("weights", cls=SettingsCommand)(with_settings(weights_formats))


if __name__ == "__main__":
    try:
        app()
    except CachedRAGError as error:
        err.print(f"error: {error}", style="red")
        sys.exit(1)
