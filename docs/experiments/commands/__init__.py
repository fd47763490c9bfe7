"""The command line of the experiments: a file a subject."""

from __future__ import annotations

from typing import Annotated, Any

from cached_rag.cli.settings import OptionsOf
from cached_rag.config import ModelConfig

_OF_LOAD_MODEL = ("dtype", "device", "weights")
# How a model is loaded that no engine is made of.
Loaded = Annotated[
    dict[str, Any],
    OptionsOf(
        (ModelConfig,),
        shown=_OF_LOAD_MODEL,
        but=("backend", "revision", "adapter", "model_kwargs", "chat_template_kwargs"),
    ),
]
