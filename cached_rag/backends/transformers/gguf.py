"""Converts a GGUF file to a folder of safetensors, one tensor at a time. Loads no model.

Reading a GGUF file takes ten times as long as reading the converted folder. transformers' own code
gives the names, the permutations and the tokenizer. Here each tensor is unpacked, written and
released, so the conversion needs memory for the largest tensor and one shard, not for the model.
Weights in groups of 4 bits stay what they are (`few_bits.py`), all others become bf16.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, TokenizersBackend
from transformers import modeling_gguf_pytorch_utils as loader
from transformers.integrations.gguf import is_gguf_arch_supported

from cached_rag.backends.transformers.complete import empty_model, load_complete
from cached_rag.backends.transformers.few_bits import GROUP, Groups, StoredConfig, fits_groups
from cached_rag.backends.transformers.gguf_rope import (
    ROTATIONS,
    refuse_scaling,
    set_rotation,
    unlike,
)
from cached_rag.backends.untrusted import BoundedReader
from cached_rag.errors import ModelError

# A shard is written once it holds this many bytes. A loaded shard stays mapped until all of its
# weights are copied: small ones keep what is held twice small.
_SHARD_BYTES = 64 << 20
# Elements unpacked at a time: unpacking needs several times the memory of its result.
_UNPACKED = 1 << 24
# Names of the input embeddings in GGUF, and of the head in transformers.
_EMBEDDING, _HEAD = "token_embd.weight", "lm_head"
# Tensors that are in a model's configuration already, or follow from it.
_COMPUTED = (*ROTATIONS, "attn_rot_embd.weight")
_DENSE = {"F32", "F16", "BF16"}
_READING = Lock()
# Of so many layers of Gemma 3 the last sees everything, unless a file says otherwise.
_PERIOD = 6
_GEMMA_27B = (("gemma2", 46), ("gemma3", 62))
# Scores' bounds, by how both GGUFs and transformers name them, and the kinds that have them.
_CAPS, _CAPPED = ("attn_logit_softcapping", "final_logit_softcapping"), ("gemma2", "gemma3")
# Texts of control tokens that end an answer, as in `llama-vocab.cpp`.
_ENDS = (
    *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[EOS]"),
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "[e~["),
    *("<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<|return|>", "<|call|>", "<|calls|>"),
    *("<|flush|>",),
)
# Where these end an answer, "<|end|>" ends a message, such as a thought, and another follows.
_HARMONY = {"<|return|>", "<|flush|>"}
_CONTROL = gguf.TokenType.CONTROL.value
# How many groups of 4-bit weights a block of Q4_K has.
_SUPER = 8


def convert(source: Path, folder: Path) -> None:
    """Write a GGUF's configuration, tokenizer and weights into an existing folder.

    Raises:
        ModelError: the file is one of several, lacks weights, or has some that transformers has no
            place for, or rotates or caps scores as no model of transformers does.
        OSError: the disk is full, or the folder cannot be written.
        ValueError, or what readers come to: the file is damaged, or of an unknown kind.
    """
    where = _where(source)
    with _read_once(source) as reader:
        refuse_split(reader, source)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        tokenizer.save_pretrained(folder)
        kind = reader.architecture
        config = AutoConfig.from_pretrained(**where)
    ends = end_ids(reader, tokenizer.get_vocab())
    set_caps(config, reader)
    if is_gguf_arch_supported(kind):
        refuse_scaling(reader)
        _convert_whole(where, folder, ends)
        return
    set_rotation(config, reader)
    set_attention(config, reader)
    generation = GenerationConfig.from_model_config(config)
    generation.eos_token_id = ends
    generation.save_pretrained(folder)
    config.architectures = [type(empty_model(config)).__name__]
    config.dtype = torch.bfloat16
    reader.fields.clear()  # frees the vocabulary, a million small arrays
    stored = StoredConfig()
    _write(_tensors(reader, config, kind, stored), folder)
    config.quantization_config = stored
    config.save_pretrained(folder)  # last: a folder with a configuration is complete


def convert_tokenizer(source: Path, folder: Path) -> None:
    """Write a GGUF's tokenizer, and no weights, into an existing folder.

    Whatever the model's architecture: transformers need not know it.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        ValueError, or what readers come to: the file is damaged, or of an unknown kind.
    """
    with _read_once(source):
        TokenizersBackend.from_pretrained(**_where(source)).save_pretrained(folder)


def _where(source: Path) -> dict[str, str]:
    """A GGUF as `from_pretrained` takes it."""
    return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}


@contextmanager
def _read_once(source: Path) -> Iterator[BoundedReader]:
    """Inside this context the file is read once: reading its vocabulary takes seconds.

    What transformers reads files with is replaced meanwhile, by one thread at a time.
    """
    reader = BoundedReader(source)
    with _READING:
        reader_type = gguf.GGUFReader
        gguf.GGUFReader = lambda path, *_: reader if Path(path) == source else reader_type(path)
        try:
            yield reader
        finally:
            gguf.GGUFReader = reader_type


def _tensors(
    reader: Any, config: Any, kind: str, stored: StoredConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its name in the folder; adds to `stored` what is or was in few bits."""
    empty = empty_model(config)
    linears = {name for name, part in empty.named_modules() if isinstance(part, torch.nn.Linear)}
    processor = loader.TENSOR_PROCESSORS.get(kind, loader.TensorProcessor)(config.to_dict())
    names = loader.get_gguf_hf_weights_map(empty, processor)
    # Experts are merged from several tensors; the processor collects them here.
    merged: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}

    def processed(weights: Any, tensor: Any) -> Any:
        return processor.process(
            weights=weights,
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters=merged,
        )

    for tensor in reader.tensors:
        done = processed(_unpacked(tensor), tensor)
        if done.name not in names:
            if done.name is not None and not tensor.name.endswith(_COMPUTED):
                what = f"{tensor.name}, which the model has no place for in transformers"
                raise unlike(kind, what)
            continue
        is_few_bits = tensor.tensor_type.name not in _DENSE
        name = names[done.name]
        module = name.removesuffix(".weight")
        if module not in linears or name == module:
            yield name, _in_bf16(done.weights)
        elif (groups := _groups(tensor, done.weights, processed)) is None:
            if is_few_bits:
                stored.int8.append(module)
            yield name, _in_bf16(done.weights)
        else:
            stored.int4.append(module)
            for part, values in vars(groups).items():
                yield f"{module}.{part}", values
        if tensor.name == _EMBEDDING and config.tie_word_embeddings and is_few_bits:
            stored.int8.append(_HEAD)
    for name, weights in merged["tensors"].items():
        yield name, weights.bfloat16()


def _groups(tensor: Any, weights: Any, process: Callable[[Any, Any], Any]) -> Groups | None:
    """A tensor's 4-bit groups, its rows in the order of `weights`; None if these are not its rows.

    Args:
        weights: (rows, columns) the tensor's values as the model wants them.
        process: what made them of values of the tensor; it may have put rows in another order.
    """
    if tensor.data.ndim != 2 or not fits_groups(*weights.shape):
        return None
    groups = from_blocks(tensor.data, tensor.tensor_type)
    if groups is None:
        return None
    numbers = np.arange(len(weights), dtype=np.float32)[:, None]
    order = process(numbers, tensor).weights[:, 0]
    ordered = groups[torch.from_numpy(order.astype(np.int64))]
    return ordered if np.array_equal(ordered.dense(torch.float32).numpy(), weights) else None


def from_blocks(blocks: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> Groups | None:
    """The same weights as (rows, bytes) GGUF blocks; None if the type is not one of groups of 32.

    Layouts: ggml-quants.c of llama.cpp; `gguf.quants` has the same in numpy.
    """
    readers = {
        gguf.GGMLQuantizationType.Q4_0: _q4_0,
        gguf.GGMLQuantizationType.Q4_1: _q4_1,
        gguf.GGMLQuantizationType.Q4_K: _q4_k,
    }
    if kind not in readers:
        return None
    _, size = gguf.GGML_QUANT_SIZES[kind]
    levels, scales, lows = readers[kind](blocks.reshape(-1, size))
    rows = len(blocks)
    packed = torch.from_numpy(levels.reshape(rows, -1, 2))
    sides = (torch.from_numpy(side.astype(np.float32).reshape(rows, -1)) for side in (scales, lows))
    return Groups(packed[..., 0] | (packed[..., 1] << 4), *sides)


Parts = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def _q4_0(blocks: np.ndarray[Any, Any]) -> Parts:
    scales = _half(blocks, 0)
    return _halves(blocks[:, 2:], GROUP), scales, -8 * scales


def _q4_1(blocks: np.ndarray[Any, Any]) -> Parts:
    return _halves(blocks[:, 4:], GROUP), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: np.ndarray[Any, Any]) -> Parts:
    factors, offsets = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    scales = _half(blocks, 0)[:, None] * factors.astype(np.float32).reshape(-1, _SUPER)
    lows = -(_half(blocks, 2)[:, None] * offsets.astype(np.float32).reshape(-1, _SUPER))
    return _halves(blocks[:, 16:], 2 * GROUP), scales, lows


def _half(blocks: np.ndarray[Any, Any], at: int) -> np.ndarray[Any, Any]:
    """The fp16 number at a byte of each block, in fp32."""
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float32)


def _halves(bytes_: np.ndarray[Any, Any], run: int) -> np.ndarray[Any, Any]:
    """Levels: of every `run`, the first half lies in low bits, the second half in high bits."""
    split = bytes_.reshape(len(bytes_), -1, run // 2)
    return np.stack([split & 15, split >> 4], axis=2).reshape(len(bytes_), -1)


def _in_bf16(weights: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(weights)).bfloat16()


def _unpacked(tensor: Any) -> Any:
    """A tensor's values in fp32."""
    data, shape = tensor.data, tuple(int(n) for n in reversed(tensor.shape))
    if data.ndim < 2:
        # Copied, or it would keep the mapped file open.
        return gguf.dequantize(data, tensor.tensor_type).copy()
    values = np.empty(shape, np.float32)
    step = max(1, _UNPACKED // (values.size // len(values)))
    for begin in range(0, len(data), step):
        some = slice(begin, begin + step)
        values[some] = gguf.dequantize(data[some], tensor.tensor_type)
    return values


def _write(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write tensors into shards of about `_SHARD_BYTES` each, and an index of the shards."""
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    total = 0

    def flush() -> None:
        file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, weights in tensors:
        shard[name] = weights
        total += weights.nbytes
        if sum(kept.nbytes for kept in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _convert_whole(where: dict[str, str], folder: Path, ends: int | list[int] | None) -> None:
    """Convert by loading the whole model, for kinds whose tensors only transformers can convert."""
    path, file = where.values()
    model = load_complete(path, file, gguf_file=file, dtype=torch.bfloat16)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)


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


def end_ids(reader: Any, vocabulary: Mapping[str, int]) -> int | list[int] | None:
    """The tokens that end an answer: the text's end, and a chat's turn's and message's.

    Many files name the first one alone. The others are known by their texts, as in llama.cpp.
    """
    ids: list[int] = []
    for name in ("eos", "eot", "eom"):
        ids += map(int, loader.read_field(reader, f"tokenizer.ggml.{name}_token_id"))
    kinds = loader.read_field(reader, "tokenizer.ggml.token_type")
    control = {at for at, kind in enumerate(kinds) if kind == _CONTROL}
    found = {text for text in _ENDS if vocabulary.get(text) in control}
    if found & _HARMONY:
        found.discard("<|end|>")
    ids += sorted(vocabulary[text] for text in found)
    different = list(dict.fromkeys(ids))
    return different if len(different) > 1 else next(iter(different), None)


def set_caps(config: Any, reader: BoundedReader) -> None:
    """Bound attention's scores and the logits as the file says, which transformers does not read.

    Raises:
        ModelError: it says so of a kind that has no bounds in transformers.
    """
    kind, text = reader.architecture, config.get_text_config()
    for name in _CAPS:
        if kind in _CAPPED:
            setattr(text, name, reader.number(name, getattr(text, name) or 0.0) or None)
        elif cap := reader.number(name, 0.0):
            raise unlike(kind, f"{name} {cap:g}, which transformers leaves out")


def set_attention(config: Any, reader: BoundedReader) -> None:
    """Set the windows that the file names, and what Gemma divides its scores by, which none names.

    That is the root of a head's width. The largest have another, by which llama.cpp, too, knows
    them from the number of layers.
    """
    kind, text = reader.architecture, config.get_text_config()
    if kind == "phi3":
        text.sliding_window = int(reader.number("attention.sliding_window", 0)) or None
    if kind == "gemma3":
        given = loader.read_field(reader, "gemma3.attention.sliding_window_pattern") or [_PERIOD]
        layers = range(1, text.num_hidden_layers + 1)
        slides = given if len(given) > 1 else [layer % given[0] for layer in layers]
        text.layer_types = [f"{'sliding' if one else 'full'}_attention" for one in slides]
    if (kind, text.num_hidden_layers) in _GEMMA_27B:
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads
    elif kind in ("gemma2", "gemma3"):
        text.query_pre_attn_scalar = text.head_dim
