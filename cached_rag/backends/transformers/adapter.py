"""Merges a LoRA adapter into a model's weights. Knows peft; knows no prompt and no KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from cached_rag.errors import ModelError, ModelNotFoundError, needs_extra

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def merge_adapter(model: Any, name: str) -> Any:
    """Add an adapter to a model's weights, in their dtype.

    Args:
        model: a transformers model with dense weights, which are changed.
        name: the adapter's folder, or its hub id.

    Raises:
        ModelNotFoundError: there is no such adapter.
        ModelError: it was made for another model, or is of a kind that cannot be merged.
        MissingPackageError: peft is not installed.
    """
    with needs_extra("lora", "a LoRA adapter", "peft"):
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
        from peft.tuners.lora import LoraLayer
        from peft.utils import load_peft_weights
    folder = _folder(name)
    try:
        if PeftConfig.from_pretrained(str(folder)).is_prompt_learning:
            raise ValueError("it learned a prompt, which is not part of the weights")
        is_tied = _is_tied(model)
        adapted = PeftModel.from_pretrained(model, str(folder))
        ends = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
        if is_tied and any(isinstance(one, LoraLayer) for one in ends):
            raise ValueError(
                "it changes the embeddings or the head, whose weights this model has in common: "
                "merged, each would change the other"
            )
        wanted, held = set(get_peft_model_state_dict(adapted)), set(load_peft_weights(str(folder)))
        if wanted != held:  # peft leaves such weights out, or makes them up
            raise ValueError(f"its weights are of other layers: {sorted(wanted ^ held)[:3]}")
        return adapted.merge_and_unload()
    except (OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"the adapter {name} cannot be merged into the model: {' '.join(str(error).split())}. "
            f"Give the model it was trained on, which {_CONFIG} names, or leave the adapter out"
        ) from error


def _is_tied(model: Any) -> bool:
    """Whether embeddings and head are the same weights."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _folder(name: str) -> Path:
    """The adapter's folder, with all that an adapter needs in it."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, allow_patterns=[_CONFIG, *_WEIGHTS]))
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(
                f"there is no adapter {name}: it is no folder, and as a hub id: {error}"
            ) from error
    has_weights = any((folder / one).is_file() for one in _WEIGHTS)
    if not has_weights or not (folder / _CONFIG).is_file():
        raise ModelNotFoundError(
            f"{folder} holds no adapter: it needs {_CONFIG} and {_WEIGHTS[0]}, as peft's "
            "save_pretrained writes them"
        )
    return folder
