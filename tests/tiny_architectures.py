"""GGUF files of tiny random models, of the architectures whose memory llama.cpp lays out otherwise.

That is: windows, chunks, recurrent layers, latents, layers without KV of their own, and positions
that are not one rotation. Shapes are in numpy's order of axes, the reverse of llama.cpp's.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
from conftest import VOCAB
from tiny_gguf import add_tokenizer

WIDTH, INNER, HEADS, KV_HEADS, DIM = 64, 128, 4, 2, 16
WINDOW = 8
_EXPERTS, _EXPERT_INNER = 4, 32
Shapes = dict[str, tuple[int, ...]]


def _weights(**shapes: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _norms(*names: str, size: int = WIDTH) -> Shapes:
    return _weights(**dict.fromkeys(names, (size,)))


def _biased(shapes: Shapes) -> Shapes:
    """The same with a bias for each weight."""
    biases = {name.replace("weight", "bias"): one[:-1] or one for name, one in shapes.items()}
    return shapes | biases


def _projections(dim: int = DIM, kv_heads: int = KV_HEADS, queries: int = 1) -> Shapes:
    """Attention without a norm. `queries`: 2 if the queries' matrix has a gate in it."""
    return _weights(
        attn_q=(queries * HEADS * dim, WIDTH),
        attn_k=(kv_heads * dim, WIDTH),
        attn_v=(kv_heads * dim, WIDTH),
        attn_output=(WIDTH, HEADS * dim),
    )


def _feed_forward(inner: int = INNER, suffix: str = "") -> Shapes:
    names = (f"ffn_{part}{suffix}" for part in ("gate", "up", "down"))
    return _weights(
        **dict(zip(names, ((inner, WIDTH), (inner, WIDTH), (WIDTH, inner)), strict=True))
    )


def _experts(inner: int = _EXPERT_INNER) -> Shapes:
    """A mixture of experts without a norm."""
    router = _weights(ffn_gate_inp=(_EXPERTS, WIDTH))
    return router | {
        name: (_EXPERTS, *shape) for name, shape in _feed_forward(inner, "_exps").items()
    }


def _latent(nope: int = 16, rope: int = 8, rank: int = 32, value: int = 16) -> Shapes:
    """Attention over a latent, without a norm and queries."""
    return _weights(
        attn_kv_a_mqa=(rank + rope, WIDTH),
        attn_kv_a_norm=(rank,),
        attn_k_b=(HEADS, rank, nope),
        attn_v_b=(HEADS, value, rank),
        attn_output=(WIDTH, HEADS * value),
    )


_QK_NORMS = _norms("attn_q_norm", "attn_k_norm", size=DIM)
_ATTENTION = _norms("attn_norm") | _projections()
_DENSE = _norms("ffn_norm") | _feed_forward()
_SHARED_EXPERT = _feed_forward(_EXPERT_INNER, "_shexp")
_POST_NORMS = _norms("post_attention_norm", "post_ffw_norm")
_GATED_ATTENTION = _norms("attn_norm") | _projections(queries=2) | _QK_NORMS
_MAMBA2 = _norms("attn_norm") | {  # inner size 128, state 16, 8 heads in 2 groups
    "ssm_in.weight": (328, WIDTH),
    "ssm_conv1d.weight": (192, 4),
    "ssm_conv1d.bias": (192,),
    "ssm_dt.bias": (8,),
    "ssm_a": (8, 1),
    "ssm_d": (8, 1),
    "ssm_norm.weight": (2, 64),
    "ssm_out.weight": (WIDTH, 128),
}
_MAMBA1 = _norms("attn_norm") | {  # inner size 128, state 16, rank 4
    "ssm_in.weight": (256, WIDTH),
    "ssm_conv1d.weight": (128, 4),
    "ssm_conv1d.bias": (128,),
    "ssm_x.weight": (36, 128),
    "ssm_dt_norm.weight": (4,),
    "ssm_dt.weight": (128, 4),
    "ssm_dt.bias": (128,),
    "ssm_b_norm.weight": (16,),
    "ssm_c_norm.weight": (16,),
    "ssm_a": (128, 16),
    "ssm_d": (128,),
    "ssm_out.weight": (WIDTH, 128),
}
_DELTA_NET = _norms("attn_norm") | {  # 2 heads of keys, 4 of values, each of 16
    "attn_qkv.weight": (128, WIDTH),
    "attn_gate.weight": (64, WIDTH),
    "ssm_conv1d.weight": (128, 4),
    "ssm_dt.bias": (4,),
    "ssm_a": (4,),
    "ssm_norm.weight": (16,),
    "ssm_out.weight": (WIDTH, 64),
}
_KIMI_DELTA = _norms("attn_norm") | {  # 4 heads of 16
    **_weights(attn_q=(64, WIDTH), attn_k=(64, WIDTH), attn_v=(64, WIDTH)),
    **_weights(ssm_conv1d_q=(64, 1, 4), ssm_conv1d_k=(64, 1, 4), ssm_conv1d_v=(64, 1, 4)),
    **_weights(ssm_f_a=(16, WIDTH), ssm_f_b=(64, 16), ssm_g_a=(16, WIDTH), ssm_g_b=(64, 16)),
    "ssm_beta.weight": (4, WIDTH),
    "ssm_a": (4, 1),
    "ssm_dt.bias": (64,),
    "ssm_norm.weight": (16,),
    "attn_output.weight": (WIDTH, 64),
}
_SHORT_CONVOLUTION = _norms("attn_norm") | {
    "shortconv.conv.weight": (WIDTH, 3),
    "shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
    "shortconv.out_proj.weight": (WIDTH, WIDTH),
}

_EXPERT_FIELDS = {
    "expert_count": _EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": _EXPERT_INNER,
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
        fields: in addition to those that all have, or instead of them; None leaves one out.
        others: tensors outside of layers, in addition to the embedding.
    """

    layers: list[Shapes]
    fields: dict[str, Any] = field(default_factory=dict)
    others: Shapes = field(default_factory=lambda: _norms("output_norm"))


def _gemma3n() -> Architecture:
    """Layers from the 21st on share KV, whatever a file says; so it has two of them."""
    count, width, streams, rank = 22, 256, 4, 64  # all but the first are fixed in llama.cpp
    layer = _ATTENTION | _QK_NORMS | _DENSE | _POST_NORMS
    layer |= _weights(
        inp_gate=(width, WIDTH),
        proj=(WIDTH, width),
        altup_correct_coef=(streams, streams),
        altup_predict_coef=(streams**2, streams),
        altup_router=(streams, WIDTH),
        laurel_l=(rank, WIDTH),
        laurel_r=(WIDTH, rank),
    )
    layer |= _norms("post_norm", "altup_correct_scale", "altup_router_norm", "laurel_post_norm")
    others = _norms("output_norm") | _norms("per_layer_proj_norm", size=width)
    others |= _weights(
        altup_proj=(streams - 1, WIDTH, WIDTH),
        altup_unembd_proj=(streams - 1, WIDTH, WIDTH),
        per_layer_token_embd=(VOCAB, count * width),
        per_layer_model_proj=(count * width, WIDTH),
    )
    return Architecture([layer] * count, {"attention.sliding_window": WINDOW}, others)


def _gemma4() -> Architecture:
    """Two sliding layers and a global one, with wider heads; then three that take their KV."""
    count, own, width = 6, 3, 16
    is_sliding = [True, True, False] * 2
    layers = []
    for layer, sliding in enumerate(is_sliding):
        dim, kv_heads = (DIM, 2) if sliding else (2 * DIM, 1)
        shapes = _norms("attn_norm", "ffn_norm", "post_norm") | _POST_NORMS
        shapes |= _projections(dim, kv_heads) | _norms("attn_q_norm", "attn_k_norm", size=dim)
        if layer >= own:
            unused = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
            shapes = {name: shape for name, shape in shapes.items() if name not in unused}
        shapes |= _feed_forward(INNER if layer < own else 2 * INNER)
        shapes |= _weights(inp_gate=(width, WIDTH), proj=(WIDTH, width), layer_output_scale=(1,))
        layers.append(shapes)
    fields = {
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": is_sliding,
        "attention.shared_kv_layers": count - own,
        "attention.head_count_kv": [2, 2, 1] * 2,
        "attention.key_length": 2 * DIM,
        "attention.value_length": 2 * DIM,
        "attention.key_length_swa": DIM,
        "attention.value_length_swa": DIM,
        "rope.dimension_count": 2 * DIM,
        "rope.dimension_count_swa": DIM,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "feed_forward_length": [INNER] * own + [2 * INNER] * own,
        "embedding_length_per_layer_input": width,
        "final_logit_softcapping": 30.0,
    }
    others = _norms("output_norm") | _norms("per_layer_proj_norm", size=width)
    others |= _weights(
        per_layer_token_embd=(VOCAB, count * width),
        per_layer_model_proj=(count * width, WIDTH),
        rope_freqs=(DIM,),
    )
    return Architecture(layers, fields, others)


_UNTIED = _norms("output_norm") | _weights(output=(VOCAB, WIDTH))
ARCHITECTURES = {
    "gemma3": Architecture(
        [_ATTENTION | _QK_NORMS | _DENSE | _POST_NORMS] * 6,
        {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 3},
    ),
    "gpt-oss": Architecture(
        [
            _norms("attn_norm", "post_attention_norm")
            | _biased(_projections() | _experts())
            | {"attn_sinks.weight": (HEADS,)}
        ]
        * 4,
        {"attention.sliding_window": WINDOW, **_EXPERT_FIELDS},
        _UNTIED,
    ),
    "gemma4": _gemma4(),
    "qwen35": Architecture(
        [
            shapes | _norms("post_attention_norm") | _feed_forward()
            for shapes in (_DELTA_NET | _weights(ssm_alpha=(4, WIDTH), ssm_beta=(4, WIDTH)),) * 3
            + (_GATED_ATTENTION,)
        ],
        {**_DELTA_FIELDS, "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "lfm2": Architecture(
        [_SHORT_CONVOLUTION | _DENSE, _ATTENTION | _QK_NORMS | _DENSE] * 2,
        {"attention.head_count_kv": [0, KV_HEADS] * 2, "shortconv.l_cache": 3},
        _norms("token_embd_norm"),
    ),
    "gemma2": Architecture(
        [_ATTENTION | _DENSE | _POST_NORMS] * 4,
        {
            "attention.sliding_window": WINDOW,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "granitehybrid": Architecture(
        [
            shapes | _norms("ffn_norm") | _experts() | _SHARED_EXPERT
            for shapes in (_MAMBA2, _ATTENTION) * 2
        ],
        {
            **_SSM_FIELDS,
            **_EXPERT_FIELDS,
            "attention.head_count_kv": [0, KV_HEADS] * 2,
            "feed_forward_length": _EXPERT_INNER,
            "expert_shared_feed_forward_length": _EXPERT_INNER,
            "rope.scaling.finetuned": False,
            "attention.scale": 0.25,
            "embedding_scale": 4.0,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
        },
    ),
    "llama4": Architecture(  # chunks of 8192 tokens, whatever a file says
        [_ATTENTION | _DENSE, _ATTENTION | _norms("ffn_norm") | _experts() | _SHARED_EXPERT] * 2,
        {**_EXPERT_FIELDS, "interleave_moe_layer_step": 2},
    ),
    "deepseek2": Architecture(
        [
            _norms("attn_norm", "ffn_norm")
            | _norms("attn_q_a_norm", size=32)
            | _weights(attn_q_a=(32, WIDTH), attn_q_b=(HEADS * 24, 32))
            | _latent()
            | others
            for others in (_feed_forward(), *[_experts() | _SHARED_EXPERT] * 2)
        ],
        {**_LATENT_FIELDS, **_EXPERT_FIELDS, "attention.q_lora_rank": 32},
        _UNTIED,
    ),
    "falcon-h1": Architecture(
        [_MAMBA2 | _ATTENTION | {"ffn_norm": (WIDTH,)} | _feed_forward()] * 3, _SSM_FIELDS
    ),
    "nemotron_h": Architecture(
        [
            _MAMBA2,
            _norms("attn_norm") | _weights(ffn_up=(INNER, WIDTH), ffn_down=(WIDTH, INNER)),
            _ATTENTION,
        ]
        * 2,
        {
            **_SSM_FIELDS,
            "attention.head_count_kv": [0, 0, KV_HEADS] * 2,
            "feed_forward_length": [0, INNER, 0] * 2,
            "attention.layer_norm_epsilon": 1e-5,
        },
        _UNTIED,
    ),
    "gemma3n": _gemma3n(),
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
        [_MAMBA1 | _DENSE, _ATTENTION | _norms("ffn_norm") | _experts(INNER)] * 2,
        {
            **_SSM_FIELDS,
            **_EXPERT_FIELDS,
            "ssm.time_step_rank": 4,
            "attention.head_count_kv": [0, KV_HEADS] * 2,
        },
    ),
    "kimi-linear": Architecture(
        [
            _KIMI_DELTA | _DENSE,
            *[
                shapes
                | _norms("ffn_norm")
                | _experts()
                | _SHARED_EXPERT
                | {"exp_probs_b.bias": (_EXPERTS,)}
                for shapes in (
                    _KIMI_DELTA,
                    _norms("attn_norm") | _weights(attn_q=(HEADS * 24, WIDTH)) | _latent(),
                )
            ],
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
            shapes
            | _norms("post_attention_norm")
            | _experts()
            | _SHARED_EXPERT
            | _weights(ffn_gate_inp_shexp=(WIDTH,))
            for shapes in (_DELTA_NET | _weights(ssm_ba=(8, WIDTH)),) * 3 + (_GATED_ATTENTION,)
        ],
        {
            **_DELTA_FIELDS,
            **_EXPERT_FIELDS,
            "expert_shared_feed_forward_length": _EXPERT_INNER,
            "rope.dimension_count": 8,
        },
    ),
    "bloom": Architecture(
        [
            _biased(
                _norms("attn_norm", "ffn_norm")
                | _weights(attn_qkv=(3 * WIDTH, WIDTH), attn_output=(WIDTH, WIDTH))
                | _weights(ffn_up=(INNER, WIDTH), ffn_down=(WIDTH, INNER))
            )
        ]
        * 3,
        {"attention.head_count_kv": HEADS, "attention.layer_norm_epsilon": 1e-5},
        _biased(_norms("token_embd_norm", "output_norm")),
    ),
    "qwen2vl": Architecture([_ATTENTION | _DENSE] * 3, {"rope.dimension_sections": [2, 3, 3, 0]}),
}


def write_architecture(path: Any, name: str) -> Any:
    """Write the file of a model of one of `ARCHITECTURES`; the same in every run."""
    architecture = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, name)
    fields = {
        "block_count": len(architecture.layers),
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
    }
    for key, value in (fields | architecture.fields).items():
        if value is not None:
            _FIELD_WRITERS[type(value)](writer, f"{name}.{key}", value)
    add_tokenizer(writer)
    tensors = {"token_embd.weight": (VOCAB, WIDTH)} | architecture.others
    for layer, shapes in enumerate(architecture.layers):
        tensors |= {f"blk.{layer}.{tensor}": shape for tensor, shape in shapes.items()}
    random = np.random.default_rng(zlib.crc32(name.encode()))
    for tensor, shape in tensors.items():
        values = _values(tensor, random.standard_normal(shape, np.float32))
        writer.add_tensor(tensor, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_FIELD_WRITERS = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    list: gguf.GGUFWriter.add_array,
}


def _values(tensor: str, normal: np.ndarray) -> np.ndarray:
    """Weights such that a token's trace neither fades nor drowns the others', from random ones."""
    part = tensor.removesuffix(".weight").rpartition(".")[2]
    if part == "rope_freqs":  # the latter half does not turn
        return np.where(np.arange(len(normal)) < len(normal) // 2, 1.0, 1e30)
    if "norm" in part or "scale" in part:
        return 1 + normal / 5
    if part == "ssm_a":
        return -np.exp(normal / 2)
    if tensor.endswith("ssm_dt.bias"):  # else a recurrent layer forgets within a few tokens
        return normal / 5 - 3
    if normal.ndim == 1:
        return normal / 5
    # Else attention is nearly uniform.
    gain = 2 if part in ("attn_q", "attn_k", "attn_qkv") else 1
    return gain * normal / np.sqrt(normal.shape[-1])
