"""Loads a causal language model's weights, whole and for good, and says which ones they are.

transformers maps weights from their files: who writes there changes them under a running model,
and who shortens a file kills the process. And a model's files cannot be told from its folder:
an index names them, wherever they are. So weights are copied, and known by what they are. A LoRA
adapter is merged into them. Knows no prompt and no KV.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import snapshot_download
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from cached_rag.errors import ModelError, ModelNotFoundError, needs_extra
from cached_rag.kv.fingerprint import digest

# So many names are enough to see what is missing.
_SHOWN = 3
_CONFIG = "adapter_config.json"
# How files of larger models call the weights of their text half.
_TEXT_HALF = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def text_half(config: Any) -> Any:
    """The configuration of a model's text half, of one that sees images or hears; else None."""
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    text.tie_word_embeddings = config.tie_word_embeddings  # files lack a head that is tied
    return text


def load_complete(path: str, name: str, config: Any = None, **options: Any) -> Any:
    """The model as `AutoModelForCausalLM.from_pretrained` loads it, every weight from its files.

    transformers fills in missing weights with random numbers and logs a warning.

    Args:
        path: a folder or hub id.
        name: what the user calls the model, for errors.
        config: see `text_half`; the weights of other halves are not loaded. None for the file's.
        options: others of `from_pretrained`.

    Raises:
        ModelError: the files lack weights, other than those that are tied or computed, or have some
            of another shape than the configuration says; or an adapter lies among them.
        OSError, ValueError, ImportError: as transformers raises them.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        key_mapping=_TEXT_HALF,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
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
