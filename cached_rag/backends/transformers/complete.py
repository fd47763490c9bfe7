"""Loads a causal language model's weights, whole and for good, and says which ones they are.

transformers maps weights from their files: who writes there changes them under a running model,
and who shortens a file kills the process. And a model's files cannot be told from its folder:
an index names them, wherever they are. So weights are copied, and known by what they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import AutoModelForCausalLM

from cached_rag.errors import ModelError
from cached_rag.kv.fingerprint import digest

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
            of another shape than the configuration says; or an adapter lies among them.
        OSError, ValueError, ImportError: as transformers raises them.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"adapter_config.json is among the files of {name}, and transformers would compute "
            "with that adapter on top of its weights: load the model without it and give the "
            "adapter's folder as adapter=; or remove the file, if the adapter is merged already"
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


@torch.no_grad()
def copied(model: Any) -> str:
    """Copy a model's weights out of the files they are mapped from, one at a time.

    Returns:
        Digest of all that it computes with, but for its configuration: names, dtypes, shapes and
        numbers of weights and buffers, and code that came with the weights.
    """
    parts: list[str] = []
    for name, weights in model.named_parameters():
        weights.data = weights.data.clone()
        parts += _described(name, weights.data)
    for name, buffer in list(model.named_buffers()):
        place, _, own = name.rpartition(".")
        kept = buffer.clone()  # a view would hold its origin, whatever its data were set to
        setattr(model.get_submodule(place), own, kept)
        parts += _described(name, kept)
    return digest(*parts, *_code_of(model))


def _described(name: str, weights: torch.Tensor) -> list[str]:
    numbers = weights.contiguous().flatten().view(torch.uint8).cpu().numpy().data
    shape = str(tuple(weights.shape))
    return [name, str(weights.dtype), shape, xxhash.xxh3_128_hexdigest(numbers)]


def _code_of(model: Any) -> list[bytes]:
    """The source files that a model brought itself (`trust_remote_code`), those imported, too."""
    packages = {type(part).__module__.rpartition(".")[0] for part in model.modules()}
    own = tuple(f"{name}." for name in packages if name.startswith("transformers_modules"))
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(own)]
    return [Path(module.__file__).read_bytes() for module in modules if module.__file__]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
