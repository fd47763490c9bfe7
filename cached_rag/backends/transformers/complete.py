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
        ModelError: the files lack weights, other than those that are tied or computed.
        OSError, ValueError, ImportError: as transformers raises them.
    """
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    missing = sorted(report["missing_keys"])
    if missing:
        names = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        raise ModelError(
            f"{name} lacks {len(missing)} of the model's weights ({names}), which would be random "
            "numbers; download all its files again, or save the whole model"
        )
    return model
