"""Loads a causal language model of transformers, and makes a `LanguageModel` of it.

Knows no prompt, chunk or store.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file, logging

from cached_rag.backends.machine import best_device, check_device, fastest_dtype, parse_dtype
from cached_rag.backends.resolve import (
    ModelSource,
    Variant,
    file_digest,
    made,
    offline_hint,
    put_together,
    resolve,
    see_hub,
)
from cached_rag.backends.transformers import packing
from cached_rag.backends.transformers.complete import (
    becomes_dense,
    copied,
    empty_model,
    leave_on_disk,
    load_complete,
    merge_adapter,
    text_half,
)
from cached_rag.backends.transformers.decoder import rotations
from cached_rag.backends.transformers.gguf import convert
from cached_rag.backends.transformers.lean import lean_model
from cached_rag.backends.transformers.model import LanguageModel
from cached_rag.backends.transformers.probe import examine
from cached_rag.backends.untrusted import check_config, judged
from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError
from cached_rag.kv import fingerprint

_log = getLogger(__name__)
# Of a model's `generation_config`, what has `generate` choose other tokens; sampling is the user's.
_UNFOLLOWED = (
    *("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("sequence_bias", "exponential_decay_length_penalty"),
)
# Part of the fingerprint: raised when the same tokens would get other KV than before.
_KV_VERSION = 1
# Behind this, transformers names the two hundred kinds of models that it knows.
_ALL_KINDS = "Model type should be one of"
_TRUSTED, _NO_DECODER = "trust_remote_code", "for this kind of AutoModel"
# Part of the names of converted folders: raised when their content changes.
_FOLDER_VERSION = 8


@judged
def load_model(
    name: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    weights: str = "as stored",
    variant: Variant = Variant(),  # noqa: B008
) -> LanguageModel:
    """Load a model by alias, folder, GGUF file or hub id.

    Args:
        name: see `resolve`.
        dtype: "float32", "bfloat16" or "float16"; None for the fastest one on this machine, in
            which layers of few bits round what they are given to bf16.
        device: "cpu", "cuda" or "mps"; None for "cuda" if there is one, else "cpu".
        weights: how linear layers keep their weights for passes with few rows, such as decoding:
            "bf16" (in `dtype`), "int8", "int4", or "as stored", which keeps a GGUF's few bits and
            is as "bf16" for other models and other devices than a CPU. See docs/models.md.
        variant: revision, adapter and further options.

    Raises:
        ModelNotFoundError: there is no such model or adapter, or it cannot be downloaded.
        ModelError: it is no causal LM with a fast tokenizer, partial prefill does not work with
            it, its files lack weights, transformers cannot do what a GGUF says, it does not fit in
            memory, or the adapter does not fit it.
        ConfigError: there is no such device, dtype or format, or not on this device; or an option
            that the model does not have.
    """
    name = str(name)
    source = resolve(name)
    is_local = source.is_gguf or Path(source.path).is_dir()
    if variant.revision is not None and is_local:
        raise ConfigError(
            f"revision={variant.revision!r} is for models from the hub, and {name} are files on "
            "this machine; leave it out"
        )
    device = str(device or best_device())
    check_device(device)
    torch_dtype = parse_dtype(dtype) if dtype is not None else fastest_dtype(device)
    # Where a CPU has no bf16, few bits are read in it all the same, unless fp32 was asked for.
    few_bit_dtype = torch_dtype if dtype is not None else torch.bfloat16
    wanted = packing.parse_format(weights, device)
    if variant.adapter is not None and wanted == "as stored":
        wanted = "bf16"  # what is stored lacks what the adapter adds
    try:
        path = _converted(source) if source.is_gguf else source.path
        commit = None if is_local else _commit(path, variant)
        check_config(path, revision=commit, **variant.common)
        config = AutoConfig.from_pretrained(path, revision=commit, **variant.common)
        is_packed, text = becomes_dense(config), text_half(config)
        given = config if is_packed and text is None else text
        empty = empty_model(text or config, trust_remote_code=variant.common[_TRUSTED])
        load_dtype, keeps = packing.kept_as(
            name, empty, torch_dtype, device, wanted, is_asked=dtype is not None
        )
        tokenizer = AutoTokenizer.from_pretrained(path, revision=commit, **variant.common)
        with _without_bars() if Path(path).is_dir() else nullcontext():
            model = load_complete(
                path, name, given, dtype=load_dtype, revision=commit, **variant.options
            )
    except TypeError as error:
        if variant.model_kwargs == "{}":
            raise
        raise ConfigError(f"{name} cannot be loaded with model_kwargs: {error}") from error
    except (OSError, ValueError, ImportError, NotImplementedError, StrictDataclassError) as error:
        raise _unloadable(name, source, error) from error
    revision = copied(model)
    packing.densify(model, load_dtype, keeps_groups=keeps != "dense")
    if variant.adapter is not None:
        if keeps == "nothing":
            raise ModelError(
                f"the adapter {variant.adapter} needs the dense weights of {name}, which do not "
                "fit in memory; leave it out, or use a machine with more memory"
            )
        model = merge_adapter(model, variant.adapter)
        packing.forget_stored(model)
        revision = copied(model)
    if variant.facts:
        revision += json.dumps(variant.facts, sort_keys=True)
    found = wrap_model(
        model.to(device),
        tokenizer,
        name=name,
        revision=revision,
        weights=wanted,
        few_bit_dtype=few_bit_dtype,
        keeps=keeps,
    )
    found = replace(found, num_weights=empty.num_parameters())  # packed ones are not counted
    if source.is_gguf and variant.adapter is None and wanted != "bf16":
        leave_on_disk(found.decoder.model, found.decoder.network, Path(path))
    return found


def _unloadable(name: str, source: ModelSource, error: Exception) -> ModelError:
    """Why a model cannot be loaded, and what to do: about its file, its folder, or its name."""
    why = f"cannot load a causal language model from {name!r}: "
    why += str(error).partition(_ALL_KINDS)[0].strip().rstrip(".")
    if _TRUSTED in why:
        return ModelError(f'{why}. If you trust its authors: model_kwargs={{"{_TRUSTED}": True}}')
    if isinstance(error, ImportError):  # it names what is missing
        return ModelError(why)
    if _NO_DECODER in why:
        return ModelError(
            f"{why}. Give one that continues text; if it sees images as well, load it by "
            "transformers and give it to `wrap_model`"
        )
    if source.is_gguf:
        return ModelError(f'{why}. Try backend="llama.cpp", or download the file again')
    if Path(source.path).is_dir():
        return ModelError(
            f"{why}. A folder needs config.json, tokenizer.json and all files of weights with "
            "their index; download or save it again"
        )
    remedy = offline_hint(name) or (
        " Give a Hugging Face id, a folder with config.json and weights, a .gguf file, or an alias "
        "such as smollm2-135m."
    )
    return ModelNotFoundError(f"{why}.{remedy}")


def _commit(hub_id: str, variant: Variant) -> str:
    """The commit of a hub id that is loaded: the name of the folder that its files are kept in.

    Raises:
        OSError: there is no such model or revision, or it cannot be downloaded.
    """
    file = Path(variant.options.get("subfolder") or "", CONFIG_NAME)
    see_hub(hub_id, file.as_posix(), **variant.access)
    found = cached_file(hub_id, file.as_posix(), revision=variant.revision, **variant.access)
    return Path(str(found)).parents[len(file.parts) - 1].name


@judged
def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer, not its weights; a GGUF file is converted whole the first time.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be downloaded.
    """
    source = resolve(name)
    try:
        path = _converted(source) if source.is_gguf else source.path
        return AutoTokenizer.from_pretrained(path, **Variant().common)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"cannot load a tokenizer from {name!r}: {error}") from error


def wrap_model(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    revision: str,
    weights: packing.Format = "bf16",
    few_bit_dtype: torch.dtype | None = None,
    keeps: packing.Keeps = "dense",
) -> LanguageModel:
    """Make a backend of a model that is in memory already.

    Args:
        model: a transformers causal LM; or what torch.compile, or peft, made of one.
        tokenizer: its fast tokenizer.
        revision: identifies the weights: models with the same revision share stored KV.
        weights: see `load_model`.
        few_bit_dtype: `dtype` of `pack`; None for the model's.
        keeps: see `pack`.

    Raises:
        ModelError: as `load_model`; or it is no model of transformers.
        ConfigError: there is no such format, or not on the model's device.

    Effects: puts the model in eval mode, replaces its attention function, and makes projections
        views of fused weights. "int8" and "int4" round the model's own weights.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{name} has no fast tokenizer; chunks are found in prompts by its character offsets. "
            "Convert it with transformers, or use another model."
        )
    model = _unwrapped(model, name)
    weights = packing.parse_format(weights, str(model.device))
    model.eval()
    num_weights = model.num_parameters()  # before any is packed
    few_bit_dtype = few_bit_dtype or model.dtype
    began = time.perf_counter()
    lean = lean_model(model)
    if keeps != "dense":
        packing.pack(model, lean or model, weights, few_bit_dtype, keeps)
    found = examine(model, lean)
    _check_penalty(model.generation_config, name)
    _warn_of_unfollowed(model.generation_config, name)
    if keeps == "dense":
        packing.pack(model, found.decoder.network, weights, few_bit_dtype, keeps)
    examined_s = time.perf_counter() - began
    facts = {
        "version": _KV_VERSION,
        "weights": revision,
        "config": _config_facts(model.config),
        "tokenizer": fingerprint.digest(tokenizer.backend_tokenizer.to_str()),
        "dtype": str(found.shapes.dtype),
    }
    if few := packing.formats(found.decoder.network).keys() - {"dense"}:
        facts["format"] = [weights, str(few_bit_dtype), "fp16" in few]
    return LanguageModel(
        name=name,
        tokenizer=tokenizer,
        weights=weights,
        **vars(found),
        fingerprint=fingerprint.model_fingerprint(facts),
        context_length=_context_length(model.config),
        eos_ids=_eos_ids(model),
        num_weights=num_weights,
        examined_s=examined_s,
    )


def _unwrapped(model: Any, name: str) -> Any:
    """The transformers model inside of others, which would hide what it takes and how it attends.

    Raises:
        ModelError: there is none, or it cannot be computed with.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    if hasattr(model, "get_base_model"):  # peft's; layers with adapters stay in the model
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise ModelError(f"{name} puts learned tokens before prompts, which no chunk would see")
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise ModelError(f"{name} is a {kind}, and no model of transformers; give the one in it")
    try:
        parse_dtype(model.dtype)
    except ConfigError as error:
        raise ModelError(f"{name}: {error}; give it as model.to(torch.bfloat16)") from error
    if any(weight.is_meta for weight in model.parameters()):
        raise ModelError(
            f"{name} has weights that are not in memory, as device_map leaves some on disk; load "
            "it without, or a smaller model"
        )
    if len(devices := {str(weight.device) for weight in model.parameters()}) > 1:
        raise ModelError(
            f"{name} is spread over {' and '.join(sorted(devices))}, and a prompt's KV lies on one "
            "device; load it without device_map on one that has room, or take a smaller model"
        )
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    """Inside this context, transformers shows no progress bars."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _config_facts(config: Any) -> dict[str, Any]:
    text = config.get_text_config()
    facts: dict[str, Any] = text.to_dict()
    noise = {"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"}
    noise.add("quantization_config")  # how a folder keeps weights does not change them
    return {key: value for key, value in facts.items() if key not in noise}


def _context_length(config: Any) -> int:
    """Most tokens of a prompt. With YaRN, as far as it stretches what the model was trained with.

    Qwen's own instructions add it and leave `max_position_embeddings` as it was.
    """
    text = config.get_text_config()
    stretched = 0
    for rope in rotations(text):
        if rope.get("rope_type") == "yarn":
            trained = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            stretched = max(stretched, int((rope.get("factor") or 1) * trained))
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int):
            return max(value, stretched)
    return 1 << 20  # ALiBi models name no bound


def _check_penalty(config: Any, name: str) -> None:
    penalty = getattr(config, "repetition_penalty", None) or 1.0
    if not isinstance(penalty, int | float) or not 0 < penalty < math.inf:
        raise ModelError(
            f"{name} has a repetition_penalty of {penalty!r} in its generation_config, which must "
            "be a number above 0; 1.0 changes nothing. Correct it, or download the file again"
        )


def _warn_of_unfollowed(config: Any, name: str) -> None:
    """Say what of a model's own defaults has `generate` answer otherwise."""
    found = {key: value for key in _UNFOLLOWED if (value := getattr(config, key, None))}
    if found:
        _log.warning("%s asks for %s in its generation_config, which is not followed", name, found)


def _eos_ids(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    ids = eos if isinstance(eos, list) else [eos]
    return frozenset(int(one) for one in ids if one is not None)


def _converted(source: ModelSource) -> str:
    """The folder with the GGUF's weights as safetensors, made once and named by digest."""

    def make(folder: Path) -> None:
        path = Path(source.path)
        if source.pieces:
            path = put_together(source, folder)
        convert(path, folder)
        if source.pieces:
            path.unlink()
        elif file_digest(path) != source.digest:
            raise ModelError(f"{path} was changed while it was read; load it again")

    return str(made("models", f"{source.digest}-{_FOLDER_VERSION}", make))
