"""What a GGUF's fields say about the file and about where answers end. Reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import modeling_gguf_pytorch_utils as loader

from cached_rag.errors import ModelError

_GEMMA_27B = (("gemma2", 46), ("gemma3", 62))


def refuse_split(reader: Any, source: Path) -> None:
    """Refuse a file with a part of the tensors only.

    Raises:
        ModelError: the file is one of several.
    """
    count = loader.read_field(reader, "split.count")
    if count and int(count[0]) > 1:
        raise ModelError(
            f"{source.name} is one of {int(count[0])} files that make up the model, and only whole "
            "files are converted; join them with "
            f"`llama-gguf-split --merge {source.name} whole.gguf` (the first of the files) and "
            'load whole.gguf, or load the first file with backend="llama.cpp"'
        )


def end_ids(reader: Any, config: Any) -> int | list[int] | None:
    """The tokens that end an answer: the text's end, and a chat's turn's and message's."""
    own = config.eos_token_id
    ids: list[int] = list(own) if isinstance(own, list) else [own] if own is not None else []
    for name in ("eos", "eot", "eom"):
        ids += map(int, loader.read_field(reader, f"tokenizer.ggml.{name}_token_id"))
    different = list(dict.fromkeys(ids))
    return different if len(different) > 1 else next(iter(different), None)


def set_attention_scale(config: Any, kind: str) -> None:
    """Set what Gemma divides its scores by, of which a file says nothing.

    Of most models it is the root of a head's width, as transformers takes it. The largest have
    another, by which llama.cpp, too, knows them from the number of layers.
    """
    text = config.get_text_config()
    if (kind, text.num_hidden_layers) in _GEMMA_27B:
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads
