"""A GGUF file of a tiny llama or phi3, as llama.cpp's tools would write it."""

from __future__ import annotations

import json

import gguf
import numpy as np
from conftest import VOCAB, tiny_tokenizer
from gguf import GGMLQuantizationType as Kind

LAYERS, WIDTH, INNER, HEADS, KV_HEADS = 2, 64, 128, 4, 2
_TENSORS = {
    "attn_norm": ((WIDTH,), Kind.F32),
    "ffn_norm": ((WIDTH,), Kind.F32),
    "attn_q": ((WIDTH, WIDTH), Kind.Q4_1),
    "attn_k": ((KV_HEADS * WIDTH // HEADS, WIDTH), Kind.Q4_1),
    "attn_v": ((KV_HEADS * WIDTH // HEADS, WIDTH), Kind.Q4_0),
    "attn_output": ((WIDTH, WIDTH), Kind.Q8_0),
    "ffn_gate": ((INNER, WIDTH), Kind.Q4_1),
    "ffn_up": ((INNER, WIDTH), Kind.Q5_0),
    "ffn_down": ((WIDTH, INNER), Kind.Q4_0),
}
_FUSED = {
    "attn_qkv": ((WIDTH + 2 * KV_HEADS * WIDTH // HEADS, WIDTH), Kind.Q8_0),
    "ffn_up": ((2 * INNER, WIDTH), Kind.Q8_0),
}
_PARTS = {"attn_q", "attn_k", "attn_v", "ffn_gate"}


def write_gguf(
    path, matrices=None, *, kind="llama", add=None, without="", files=1, scale=1.0, window=0
):
    """Write the file, its tokenizer inside: most weights in 4 bits, some in 5 and 8.

    Args:
        matrices: the type of all weights but the norms' instead.
        kind: "llama" or "phi3".
        add: called with the writer, adds fields and tensors.
        without: the name of a tensor to leave out.
        scale: how large the weights but the norms' are; small ones round less.
        window: the sliding window of a "phi3"; 0 for none.
        files: how many files to split it into, as `llama-gguf-split` names them.
    """
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=0 if files == 1 else 20 // files)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    add_tokenizer(writer)
    if kind == "phi3":
        writer.add_pad_token_id(0)
        writer.add_sliding_window(window)
    if add is not None:
        add(writer)
    random = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": ((VOCAB, WIDTH), Kind.Q8_0),
        "output_norm.weight": ((WIDTH,), Kind.F32),
    }
    if kind == "phi3":
        tensors["output.weight"] = ((VOCAB, WIDTH), Kind.Q8_0)
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": given for name, given in _layer(kind).items()}
    for name, (shape, stored) in tensors.items():
        values = random.standard_normal(shape, np.float32)
        stored = stored if matrices is None or len(shape) == 1 else matrices
        if len(shape) > 1:
            values *= np.float32(scale)
        if name != without:
            writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer):
    """Add the fields of the tests' tokenizer."""
    vocabulary = tiny_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    merges = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _layer(kind):
    if kind == "llama":
        return _TENSORS
    return {name: given for name, given in _TENSORS.items() if name not in _PARTS} | _FUSED
