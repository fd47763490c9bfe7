"""Converts a GGUF file to a folder of bf16 safetensors, one tensor at a time. Loads no model.

Reading a GGUF file takes ten times as long as reading the converted folder. transformers' own code
gives the names, the permutations and the tokenizer. Here each tensor is unpacked, written and
released, so the conversion needs memory for the largest tensor and one shard, not for the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as loader
from transformers.integrations.gguf import is_gguf_arch_supported

# A shard is written once it holds this many bytes.
SHARD_BYTES = 512 << 20
# Elements unpacked at a time: unpacking needs several times the memory of its result.
_UNPACKED = 1 << 24


def convert(source: Path, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a GGUF's configuration, tokenizer and weights into an existing folder.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        ValueError: the file is damaged, or of an unknown kind.
    """
    try:
        _convert(source, folder, shard_bytes)
    except (LookupError, RuntimeError, TypeError) as error:  # how readers fail on damaged files
        raise ValueError(f"{source} is damaged ({type(error).__name__}: {error})") from error


def put_together(pieces: Sequence[Path], target: Path, sha256: str) -> Path:
    """Join the pieces of a file and return `target`.

    Raises:
        ValueError: the joined file does not have that digest.
    """
    state = hashlib.sha256()
    with target.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                while block := file.read(1 << 22):
                    state.update(block)
                    whole.write(block)
    if state.hexdigest() != sha256:
        raise ValueError(f"the pieces of {pieces[0].name} and after are not those of {sha256}")
    return target


def _convert(source: Path, folder: Path, shard_bytes: int) -> None:
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    with _read_once(source) as reader:
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
        kind = loader.read_field(reader, "general.architecture")[0]
        config = AutoConfig.from_pretrained(**where)
    if is_gguf_arch_supported(kind):
        _convert_whole(where, folder)
        return
    config.architectures = [type(_empty(config)).__name__]
    config.dtype = torch.bfloat16
    reader.fields.clear()  # frees the vocabulary, a million small arrays
    _write(_tensors(reader, config, kind), folder, shard_bytes)
    config.save_pretrained(folder)  # last: a folder with a configuration is complete


@contextmanager
def _read_once(source: Path) -> Iterator[Any]:
    """Inside this context the file is read once: reading its vocabulary takes seconds."""
    reader_type = gguf.GGUFReader
    reader = reader_type(source)
    gguf.GGUFReader = lambda path, *_: reader if Path(path) == source else reader_type(path)
    try:
        yield reader
    finally:
        gguf.GGUFReader = reader_type


def _empty(config: Any) -> Any:
    """The model on the meta device: its shapes and names without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _tensors(reader: Any, config: Any, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by its name in transformers, in bf16."""
    processor = loader.TENSOR_PROCESSORS.get(kind, loader.TensorProcessor)(config.to_dict())
    names = loader.get_gguf_hf_weights_map(_empty(config), processor)
    # Experts are merged from several tensors; the processor collects them here.
    merged: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}

    def converted(tensor: Any) -> tuple[str, torch.Tensor] | None:
        done = processor.process(
            weights=_unpacked(tensor),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters=merged,
        )
        if done.name not in names:
            return None
        return names[done.name], torch.from_numpy(np.ascontiguousarray(done.weights)).bfloat16()

    yield from filter(None, map(converted, reader.tensors))
    for name, weights in merged["tensors"].items():
        yield name, weights.bfloat16()


def _unpacked(tensor: Any) -> Any:
    """A tensor's values in fp32."""
    data, shape = tensor.data, tuple(int(n) for n in reversed(tensor.shape))
    if data.ndim < 2:
        return gguf.dequantize(
            data, tensor.tensor_type
        ).copy()  # or it would keep the mapped file open
    values = np.empty(shape, np.float32)
    step = max(1, _UNPACKED // (values.size // len(values)))
    for begin in range(0, len(data), step):
        some = slice(begin, begin + step)
        values[some] = gguf.dequantize(data[some], tensor.tensor_type)
    return values


def _write(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int) -> None:
    """Write tensors into shards of about `shard_bytes` each, and an index of the shards."""
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
        if sum(kept.nbytes for kept in shard.values()) >= shard_bytes:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _convert_whole(where: dict[str, str], folder: Path) -> None:
    """Convert by loading the whole model, for kinds whose tensors only transformers can convert."""
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
