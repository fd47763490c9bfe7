"""Loads a causal language model's weights, whole and for good, and says which ones they are.

transformers maps weights from their files: who writes there changes them under a running model,
and who shortens a file kills the process. And a model's files cannot be told from its folder:
an index names them, wherever they are. So weights are copied, and known by what they are. Of
folders that this library made itself, tables of embeddings stay on disk. A LoRA adapter is merged
into the weights. Knows no prompt and no KV.
"""

import json
import os
import sys
import weakref
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.func import functional_call
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from cached_rag.backends.machine import return_memory
from cached_rag.errors import ModelError, ModelNotFoundError, needs_extra
from cached_rag.kv.fingerprint import digest

# So many names are enough to see what is missing.
_SHOWN = 3
_CONFIG = "adapter_config.json"
# How files of larger models call the weights of their text half.
_TEXT_HALF = {
    r"^model\.(language|text)_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def becomes_dense(config: Any) -> bool:
    """Have fp8 and MXFP4 made ordinary weights, whatever a GPU can do; says if there are any."""
    stored = getattr(config, "quantization_config", None) or {}
    if found := stored.get("quant_method") in ("fp8", "mxfp4"):
        stored["dequantize"] = True
    return found


def text_half(config: Any) -> Any:
    """The configuration of a model's text half, of one that sees images or hears; else None."""
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if hasattr(config, "tie_word_embeddings"):  # files lack a head that is tied
        text.tie_word_embeddings = config.tie_word_embeddings
    if stored := getattr(config, "quantization_config", None):  # it stands beside both halves
        text.quantization_config = stored
    return text


def empty_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The model on the meta device: its shapes and names without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


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
            of another shape than the configuration says, or of linear layers that the
            configuration does not explain, as scales; or an adapter lies among them.
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
    if strange := {type(w).__name__ for w in model.parameters()} - {"Parameter"}:
        raise ModelError(
            f"{name} is quantised, and of {_some(sorted(strange))} nobody can tell the numbers; "
            'load the model that it was made from, with weights="int8" or "int4", or a GGUF of it'
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} of the model's weights ({_some(missing)}), which would "
            "be random numbers; download all its files again, or save the whole model; if it has "
            "other halves besides text, load it by transformers and give it to `wrap_model`"
        )
    others = sorted(report["mismatched_keys"])  # (name, in the file, in the model)
    if others:
        names = _some([f"{key} of {list(own)} instead of {list(its)}" for key, own, its in others])
        raise ModelError(
            f"{len(others)} weights of {name} have another shape than its configuration says "
            f"({names}): they are of different models, or a GGUF does not name its sizes. Download "
            'config.json and the weights again, or load a GGUF with backend="llama.cpp"'
        )
    linears = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    unused = [key for key in report["unexpected_keys"] if key.rpartition(".")[0] in linears]
    # Where it does say how they are quantised, transformers knows what else of it has no use.
    if unused and getattr(model.config, "quantization_config", None) is None:
        raise ModelError(
            f"{name} has {_some(sorted(unused))}, which its configuration does not explain: its "
            "linear layers would compute wrong numbers; download config.json again, or use a model "
            "that is not quantised"
        )
    return model


@torch.no_grad()
def copied(model: Any) -> str:
    """Copy a model's weights out of the files they are mapped from, one at a time.

    A file is let go when the last of its weights is copied, so they go module by module.

    Returns:
        Digest of all that it computes with, but for its configuration: names, dtypes, shapes and
        numbers of weights and buffers, and code that came with the weights.
    """
    order = {place: number for number, (place, _) in enumerate(model.named_modules())}
    names = [name for name, _ in chain(model.named_parameters(), model.named_buffers())]
    parts = dict[str, list[str]]()
    for name in sorted(names, key=lambda name: order[name.rpartition(".")[0]]):
        place, _, own = name.rpartition(".")
        module = model.get_submodule(place)
        given = getattr(module, own)
        kept = given.detach().clone()
        if isinstance(given, nn.Parameter):
            given.data = kept
        else:  # a view would hold its origin, whatever its data were set to
            setattr(module, own, kept)
        parts[name] = _described(name, kept)
    return digest(*chain.from_iterable(parts[name] for name in names), *_code_of(model))


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


class DiskEmbedding(nn.Module):
    """A table of embeddings that stays in its file: rows are read when tokens ask for them.

    A prompt of four thousand tokens has about a thousand different ones; a table has up to 262,144
    rows, a fifth of the 0.5B's weights, and more than half of those of Gemma 3's smallest.

    Attributes:
        own: the layer that it stands for, without its rows; it does what it does with them.
    """

    def __init__(self, own: nn.Embedding, path: Path, name: str) -> None:
        """Take over a layer and open its file.

        Args:
            path: of safetensors.
            name: the table's, in the file.
        """
        super().__init__()
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        header_bytes = int.from_bytes(os.pread(self._file, 8, 0), "little")
        place = json.loads(os.pread(self._file, header_bytes, 8))[name]
        self._first = 8 + header_bytes + place["data_offsets"][0]
        self._dtype = _DTYPES[place["dtype"]]
        self._num_rows, self._width = place["shape"]
        self.own = own
        own.padding_idx = None  # for gradients only, and no row of so few
        own.weight = nn.Parameter(own.weight.new_empty(0, self._width), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """None of the rows, in the dtype that they are given in."""
        return self.own.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(..., width) for (...) token ids.

        Raises:
            IndexError: an id is none of the table's.
            ModelError: the file was shortened.
        """
        tokens, where = torch.unique(ids, return_inverse=True)
        rows = self._rows(tokens.tolist()).to(self.own.weight.dtype)
        found: torch.Tensor = functional_call(self.own, {"weight": rows}, (where,))
        return found

    def _rows(self, tokens: list[int]) -> torch.Tensor:
        if tokens and not 0 <= tokens[0] <= tokens[-1] < self._num_rows:
            raise IndexError(f"ids {tokens[0]} to {tokens[-1]} of {self._num_rows} embeddings")
        size = self._width * self._dtype.itemsize
        places = (self._first + token * size for token in tokens)
        rows = bytearray().join(os.pread(self._file, size, place) for place in places)
        if len(rows) != size * len(tokens):
            raise ModelError(
                f"{self._path} was shortened while the model was in use; load the model again"
            )
        return torch.frombuffer(rows, dtype=self._dtype).view(-1, self._width)


def leave_on_disk(model: nn.Module, network: nn.Module, folder: Path) -> None:
    """Read embeddings from a folder of safetensors, where nothing else uses their weights.

    Args:
        model: a transformers model, loaded from that folder, on a CPU.
        network: its lean form, or the model itself.
        folder: whose files nobody changes.
    """
    if not hasattr(os, "pread"):  # Windows
        return
    files: dict[str, Path] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    parts = [*model.modules(), *network.modules()]
    heads = {id(part.weight) for part in parts if isinstance(part, nn.Linear)}
    found = {name: part for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    for name, own in found.items():
        key = f"{name}.weight"
        if key not in files or id(own.weight) in heads:
            continue
        table = DiskEmbedding(own, files[key], key)
        for whole in (model, network):
            for place in [place for place, part in whole.named_modules() if part is own]:
                if not place.endswith(".own"):
                    whole.set_submodule(place, table)
    return_memory()


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
        head = model.get_output_embeddings()
        is_tied = head is not None and head.weight is model.get_input_embeddings().weight
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
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can be an error of many kinds
        raise ModelError(
            f"the adapter {name} cannot be merged into the model: {' '.join(str(error).split())}. "
            f"Give the model it was trained on, which {_CONFIG} names, or leave the adapter out"
        ) from error


def _folder(name: str) -> Path:
    """The adapter's folder, with all that an adapter needs in it."""
    folder = Path(os.path.expanduser(name))
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
