"""Loads a causal language model's weights, and refuses those that are not all there."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from cached_rag.errors import ModelError

# So many names are enough to see what is missing.
_SHOWN = 3


def load_complete(path: str, name: str, **options: Any) -> Any:
    """The model as `AutoModelForCausalLM.from_pretrained` loads it, every weight from its files.

    transformers fills in missing weights with random numbers and logs a warning.

    Args:
        path: a folder or hub id.
        name: what the user calls the model, for errors.
        options: others of `from_pretrained`.

    Raises:
        ModelError: the files lack weights, other than those that are tied or computed, or have some
            of another shape than the configuration says.
        OSError, ValueError, ImportError: as transformers raises them.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} of the model's weights ({_some(missing)}), which would "
            "be random numbers; download all its files again, or save the whole model"
        )
    others = sorted(report["mismatched_keys"])  # (name, in the file, in the model)
    if others:
        names = _some([f"{key} of {list(own)} instead of {list(its)}" for key, own, its in others])
        raise ModelError(
            f"{len(others)} weights of {name} have another shape than its configuration says "
            f"({names}); config.json and weights are of different models: download both again"
        )
    return model


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
