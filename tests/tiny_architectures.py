"""GGUF files of tiny random models, of the architectures whose memory llama.cpp lays out otherwise.

That is: windows, chunks, recurrent layers, latents, layers without KV of their own, and positions
that are not one rotation.

A layer's tensors stand in a text, "name:shape" each, the axes in numpy's order, the reverse of
llama.cpp's; V is the size of the vocabulary. The file's names end in ".weight" but for those that
say ".bias", or end in "!" here. A "+" after a name is for a bias beside it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
from conftest import TEMPLATE, VOCAB
from tiny_gguf import add_tokenizer

WINDOW = 8
_ATTENTION = "attn_norm:64 attn_q:64x64 attn_k:32x64 attn_v:32x64 attn_output:64x64"
_QK_NORMS = "attn_q_norm:16 attn_k_norm:16"
_GATED_ATTENTION = f"{_ATTENTION} attn_q:128x64 {_QK_NORMS}"
_DENSE = "ffn_norm:64 ffn_gate:128x64 ffn_up:128x64 ffn_down:64x128"
_POST_NORMS = "post_attention_norm:64 post_ffw_norm:64"
_EXPERTS = "ffn_gate_inp:4x64 ffn_gate_exps:4x32x64 ffn_up_exps:4x32x64 ffn_down_exps:4x64x32"
_SHARED = f"{_EXPERTS} ffn_gate_shexp:32x64 ffn_up_shexp:32x64 ffn_down_shexp:64x32"
_WIDE = "attn_q:128x64 attn_output:64x128 attn_q_norm:32"
_GEMMA4 = f"attn_norm:64 {_POST_NORMS} inp_gate:16x64 proj:64x16 post_norm:64 layer_output_scale:1"
# A latent of 32, and 8 that turn; heads of 16 and 8 for queries, of 16 for values.
_LATENT = (
    "attn_norm:64 attn_kv_a_mqa:40x64 attn_kv_a_norm:32 attn_k_b:4x32x16 attn_v_b:4x16x32 "
    "attn_output:64x64"
)
# Inner size 128, state 16; 8 heads in 2 groups.
_MAMBA2 = (
    "attn_norm:64 ssm_in:328x64 ssm_conv1d+:192x4 ssm_dt.bias:8 ssm_a!:8x1 ssm_d!:8x1 "
    "ssm_norm:2x64 ssm_out:64x128"
)
_MAMBA1 = (
    "attn_norm:64 ssm_in:256x64 ssm_conv1d+:128x4 ssm_x:36x128 ssm_dt_norm:4 ssm_dt+:128x4 "
    "ssm_b_norm:16 ssm_c_norm:16 ssm_a!:128x16 ssm_d!:128 ssm_out:64x128"
)
# 2 heads of keys and 4 of values, each of 16.
_DELTA_NET = (
    "attn_norm:64 attn_qkv:128x64 attn_gate:64x64 ssm_conv1d:128x4 ssm_dt.bias:4 ssm_a!:4 "
    "ssm_norm:16 ssm_out:64x64"
)
_KIMI_DELTA = (
    "attn_norm:64 attn_q:64x64 attn_k:64x64 attn_v:64x64 ssm_conv1d_q:64x1x4 ssm_conv1d_k:64x1x4 "
    "ssm_conv1d_v:64x1x4 ssm_f_a:16x64 ssm_f_b:64x16 ssm_g_a:16x64 ssm_g_b:64x16 ssm_beta:4x64 "
    "ssm_a!:4x1 ssm_dt.bias:64 ssm_norm:16 attn_output:64x64"
)
_CONVOLUTION = "attn_norm:64 shortconv.conv:64x3 shortconv.in_proj:192x64 shortconv.out_proj:64x64"
_UNTIED = "output_norm:64 output:Vx64"
_BIASED = (
    "attn_norm+:64 attn_qkv+:192x64 attn_output+:64x64 ffn_norm+:64 ffn_up+:128x64 ffn_down+:64x128"
)
_T5 = "attn_norm:64 attn_q:64x64 attn_k:64x64 attn_v:64x64 attn_o:64x64 attn_rel_b:32x4"
_CROSS = (
    "cross_attn_norm:64 cross_attn_q:64x64 cross_attn_k:64x64 cross_attn_v:64x64 cross_attn_o:64x64"
)

_FIELDS = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
}
_WINDOW_FIELD = {"attention.sliding_window": WINDOW}
_EXPERT_FIELDS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}
_SSM_FIELDS = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
_DELTA_FIELDS = _SSM_FIELDS | {"ssm.inner_size": 64, "ssm.time_step_rank": 4}
_LATENT_FIELDS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
}


@dataclass(frozen=True)
class Architecture:
    """What a tiny model's file has.

    Attributes:
        layers: each one's tensors.
        fields: in addition to `_FIELDS`, or instead of them; None leaves one out.
        others: tensors outside of layers, in addition to the embedding.
    """

    layers: list[str]
    fields: dict[str, Any] = field(default_factory=dict)
    others: str = "output_norm:64"


ARCHITECTURES = {
    "gemma3": Architecture(
        [f"{_ATTENTION} {_QK_NORMS} {_DENSE} {_POST_NORMS}"] * 6,
        {**_WINDOW_FIELD, "attention.sliding_window_pattern": 3},
    ),
    "gpt-oss": Architecture(
        [
            "attn_norm:64 post_attention_norm:64 attn_sinks:4 attn_q+:64x64 attn_k+:32x64 "
            "attn_v+:32x64 attn_output+:64x64 ffn_gate_inp+:4x64 ffn_gate_exps+:4x32x64 "
            "ffn_up_exps+:4x32x64 ffn_down_exps+:4x64x32"
        ]
        * 4,
        {**_WINDOW_FIELD, **_EXPERT_FIELDS},
        _UNTIED,
    ),
    # Two sliding layers and a global one, whose heads are wider; then three that use their KV.
    "gemma4": Architecture(
        [
            f"{_ATTENTION} {_QK_NORMS} {_DENSE} {_GEMMA4}",
            f"{_ATTENTION} {_QK_NORMS} {_DENSE} {_GEMMA4}",
            f"{_WIDE} attn_k:32x64 attn_v:32x64 attn_k_norm:32 {_DENSE} {_GEMMA4}",
            f"attn_q:64x64 attn_output:64x64 attn_q_norm:16 {_DENSE} {_GEMMA4}",
            f"attn_q:64x64 attn_output:64x64 attn_q_norm:16 {_DENSE} {_GEMMA4}",
            f"{_WIDE} {_DENSE} {_GEMMA4}",
        ],
        {
            **_WINDOW_FIELD,
            "attention.sliding_window_pattern": [True, True, False] * 2,
            "attention.shared_kv_layers": 3,
            "attention.head_count_kv": [2, 2, 1] * 2,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "rope.dimension_count": 32,
            "rope.dimension_count_swa": 16,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "embedding_length_per_layer_input": 16,
            "final_logit_softcapping": 30.0,
        },
        "output_norm:64 per_layer_token_embd:Vx96 per_layer_model_proj:96x64 "
        "per_layer_proj_norm:16 rope_freqs:16",
    ),
    "qwen35": Architecture(
        [
            f"{part} post_attention_norm:64 ffn_gate:128x64 ffn_up:128x64 ffn_down:64x128"
            for part in (*[f"{_DELTA_NET} ssm_alpha:4x64 ssm_beta:4x64"] * 3, _GATED_ATTENTION)
        ],
        {**_DELTA_FIELDS, "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "lfm2": Architecture(
        [f"{_CONVOLUTION} {_DENSE}", f"{_ATTENTION} {_QK_NORMS} {_DENSE}"] * 2,
        {"attention.head_count_kv": [0, 2] * 2, "shortconv.l_cache": 3},
        "token_embd_norm:64",
    ),
    "gemma2": Architecture(
        [f"{_ATTENTION} {_DENSE} {_POST_NORMS}"] * 4,
        {**_WINDOW_FIELD, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "granitehybrid": Architecture(
        [f"{part} ffn_norm:64 {_SHARED}" for part in (_MAMBA2, _ATTENTION) * 2],
        {
            **_SSM_FIELDS,
            **_EXPERT_FIELDS,
            "attention.head_count_kv": [0, 2] * 2,
            "attention.scale": 0.25,
            "feed_forward_length": 32,
            "rope.scaling.finetuned": False,  # keys do not turn
            "embedding_scale": 4.0,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
        },
    ),
    # Chunks are of 8192 tokens, whatever a file says.
    "llama4": Architecture(
        [f"{_ATTENTION} {_DENSE}", f"{_ATTENTION} ffn_norm:64 {_SHARED}"] * 2,
        {**_EXPERT_FIELDS, "interleave_moe_layer_step": 2},
    ),
    "deepseek2": Architecture(
        [
            f"{_LATENT} attn_q_a:32x64 attn_q_a_norm:32 attn_q_b:96x32 {part}"
            for part in (_DENSE, *[f"ffn_norm:64 {_SHARED}"] * 2)
        ],
        {**_LATENT_FIELDS, **_EXPERT_FIELDS, "attention.q_lora_rank": 32},
        _UNTIED,
    ),
    "falcon-h1": Architecture(
        [f"{_MAMBA2} {_ATTENTION} ffn_norm!:64 ffn_gate:128x64 ffn_up:128x64 ffn_down:64x128"] * 3,
        _SSM_FIELDS,
    ),
    "nemotron_h": Architecture(
        [_MAMBA2, "attn_norm:64 ffn_up:128x64 ffn_down:64x128", _ATTENTION] * 2,
        {
            **_SSM_FIELDS,
            "attention.head_count_kv": [0, 0, 2] * 2,
            "feed_forward_length": [0, 128, 0] * 2,
            "attention.layer_norm_epsilon": 1e-5,
        },
        _UNTIED,
    ),
    # Layers use others' KV from the 21st on, whatever a file says; as are the sizes 256, 4 and 64.
    "gemma3n": Architecture(
        [
            f"{_ATTENTION} {_QK_NORMS} {_DENSE} {_POST_NORMS} post_norm:64 inp_gate:256x64 "
            "proj:64x256 altup_correct_coef:4x4 altup_correct_scale:64 altup_predict_coef:16x4 "
            "altup_router:4x64 altup_router_norm:64 laurel_l:64x64 laurel_r:64x64 "
            "laurel_post_norm:64"
        ]
        * 22,
        _WINDOW_FIELD,
        "output_norm:64 altup_proj:3x64x64 altup_unembd_proj:3x64x64 per_layer_token_embd:Vx5632 "
        "per_layer_model_proj:5632x64 per_layer_proj_norm:256",
    ),
    "mamba2": Architecture(
        [_MAMBA2] * 3,
        {
            **_SSM_FIELDS,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "attention.value_length": None,
        },
    ),
    "jamba": Architecture(
        [
            f"{_MAMBA1} ffn_norm:64 ffn_gate:32x64 ffn_up:32x64 ffn_down:64x32",
            f"{_ATTENTION} ffn_norm:64 {_EXPERTS}",
        ]
        * 2,
        {
            **_SSM_FIELDS,
            **_EXPERT_FIELDS,
            "ssm.time_step_rank": 4,
            "attention.head_count_kv": [0, 2] * 2,
            "feed_forward_length": 32,
        },
    ),
    "kimi-linear": Architecture(
        [
            f"{_KIMI_DELTA} {_DENSE}",
            f"{_KIMI_DELTA} ffn_norm:64 {_SHARED} exp_probs_b.bias:4",
            f"{_LATENT} attn_q:96x64 ffn_norm:64 {_SHARED} exp_probs_b.bias:4",
        ],
        {
            **_LATENT_FIELDS,
            **_EXPERT_FIELDS,
            "attention.head_count_kv": [0, 0, 1],
            "ssm.conv_kernel": 4,
            "kda.head_dim": 16,
        },
        _UNTIED,
    ),
    "qwen3next": Architecture(
        [
            f"{part} {_SHARED} ffn_gate_inp_shexp:64 post_attention_norm:64"
            for part in (*[f"{_DELTA_NET} ssm_ba:8x64"] * 3, _GATED_ATTENTION)
        ],
        {**_DELTA_FIELDS, **_EXPERT_FIELDS, "rope.dimension_count": 8},
    ),
    "bloom": Architecture(
        [_BIASED] * 3,
        {"attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-5},
        "token_embd_norm+:64 output_norm+:64",
    ),
    "gpt2": Architecture(
        [_BIASED] * 3,
        {"attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-5},
        "position_embd:512x64 output_norm+:64 output:Vx64",
    ),
    "llama-embed": Architecture([f"{_ATTENTION} {_DENSE}"] * 2),
    "t5": Architecture(
        [""],
        {
            "attention.head_count_kv": 4,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.relative_buckets_count": 32,
            "decoder_start_token_id": 0,
        },
        " ".join(
            ["enc.output_norm:64 dec.output_norm:64 output:Vx64"]
            + [f"enc.blk.0.{one}" for one in f"{_T5} {_DENSE}".split()]
            + [f"dec.blk.0.{one}" for one in f"{_T5} {_CROSS} {_DENSE}".split()]
        ),
    ),
    "qwen2vl": Architecture(
        [f"{_ATTENTION} {_DENSE}"] * 3, {"rope.dimension_sections": [2, 3, 3, 0]}
    ),
}
_WRITERS = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    list: gguf.GGUFWriter.add_array,
}


def write_architecture(path: Any, name: str, split_max_tensors: int = 0) -> Any:
    """Write the file of a model of one of `ARCHITECTURES`; the same in every run.

    Args:
        split_max_tensors: how many tensors a file has at most, of a model that is split; 0 for all.
    """
    architecture = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    writer.add_block_count(len(architecture.layers))
    for key, value in (_FIELDS | architecture.fields).items():
        if value is not None:
            _WRITERS[type(value)](writer, f"{name}.{key}", value)
    add_tokenizer(writer)
    writer.add_chat_template(TEMPLATE)
    tensors = dict(_tensors(f"token_embd:Vx64 {architecture.others}"))
    for layer, text in enumerate(architecture.layers):
        tensors |= _tensors(text, f"blk.{layer}.")
    random = np.random.default_rng(zlib.crc32(name.encode()))
    for tensor, shape in tensors.items():
        values = _values(tensor, random.standard_normal(shape, np.float32))
        writer.add_tensor(tensor, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(text: str, prefix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    for one in text.split():
        name, _, sizes = one.partition(":")
        shape = tuple(VOCAB if size == "V" else int(size) for size in sizes.split("x"))
        name, full = prefix + name.rstrip("+!"), name.endswith((".bias", "!"))
        yield name if full else f"{name}.weight", shape
        if "+" in one:
            yield f"{name}.bias", shape[:-1] or shape


def _values(tensor: str, normal: np.ndarray) -> np.ndarray:
    """Weights such that all tokens count, and none drowns the others, from random ones."""
    part = tensor.removesuffix(".weight").rpartition(".")[2]
    if part == "rope_freqs":  # the latter half does not turn
        return np.where(np.arange(len(normal)) < len(normal) // 2, 1.0, 1e30)
    if "norm" in part or "scale" in part:  # smaller after a layer, or deep models amplify errors
        return (1 + normal / 5) / (2 if "post" in part else 1)
    if part == "ssm_a":
        return -np.exp(normal / 2)
    if tensor.endswith("ssm_dt.bias"):  # else a recurrent layer forgets within a few tokens
        return normal / 5 - 3
    if normal.ndim == 1:
        return normal / 5
    gain = 2 if part in ("attn_q", "attn_k", "attn_qkv") else 1  # else attention hardly chooses
    return gain * normal / np.sqrt(normal.shape[-1])
