"""Which architectures work and which are refused: examines and runs a tiny random model of each.

For docs/models.md. The families are those that transformers itself lists; what they are called
stands in its documentation. The result depends on an architecture's code only, not on a model's
weights. A model is examined in fp32, whatever its dtype; so it is run in another, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cached_rag.backends.base import RepairInput, StepInput
from cached_rag.backends.transformers.loading import wrap_model
from cached_rag.backends.transformers.model import LanguageModel
from cached_rag.errors import ModelError
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.fingerprint import digest
from cached_rag.kv.rows import RowKV
from cached_rag.methods import SELECTORS, Layout, parse_method
from docs.experiments.models import methods_of

_SIZES = {
    **{"vocab_size": 240, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
}
# Given where a configuration has such a setting.
_MORE = {
    **{"head_dim": 16, "sliding_window": 9, "attention_chunk_size": 9, "global_head_dim": 32},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1},
    **{"topk_group": 1, "first_k_dense_replace": 1, "hidden_size_per_layer_input": 16},
    **{"vocab_size_per_layer_input": 240, "kv_lora_rank": 32, "q_lora_rank": 24, "v_head_dim": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"n_embd": 64, "n_layer": 4, "n_head": 4, "d_model": 64, "n_heads": 4, "n_layers": 4},
    **{"state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32},
    **{"mamba_n_groups": 1, "rotary_dim": 8, "ffn_dim": 128, "word_embed_proj_dim": 64},
}
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
# What these families need besides: layers of each kind that they have, and sizes that fit.
_DIFFERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "glm4_moe_lite", "minicpm3", "sarvam_mla"), _LATENT),
    **dict.fromkeys(("axk1", "youtu", "longcat_flash"), _LATENT),
    "deepseek_v3": {"num_key_value_heads": 4},
    "gemma3n_text": {
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
        **{"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **{"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16},
    },
    "falcon_h1": {"mamba_d_ssm": 128},
}
_SPREAD = 0.3
_MOST_WEIGHTS = 30_000_000
# Tokens of the prompt that models are run with, and how far, by share, two computations of the same
# may be apart.
_TOKENS = 40
_MOST_APART = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}
# In some deep ones rounding grows more than that, where a fault still shows; in bf16 Gemma 4 moves
# by .14 if its weights do by half a rounding, and only a fault that does more would show.
_MOST_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.2}
# With `published`, a family's configuration is transformers' default, which is its first published
# model's: so many layers, in that order, with those heads and windows. Only these sizes are less.
_NARROW = {
    **{"vocab_size": 240, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"vocab_size_per_layer_input": 240, "hidden_size_per_layer_input": 16},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
}
# Those that people run, and what the defaults leave open.
_PUBLISHED: dict[str, dict[str, Any]] = {
    **{"gemma4_text": {}, "gpt_oss": {}, "llama4_text": {}, "deepseek_v3": {}},
    **{"glm4_moe_lite": {}, "qwen3_5_text": {}, "qwen3_next": {}, "falcon_h1": {}},
    "granite_swa": {"hidden_size": 160},
    "gemma3n_text": {"intermediate_size": [96] * 35},
    "lfm2": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "kimi_linear": {},
    "granitemoehybrid": {
        "num_hidden_layers": 40,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    },
    "nemotron_h": {},
}


@dataclass(frozen=True)
class ArchitectureRow:
    """Families of which the same is true.

    Attributes:
        methods: which methods they have, or why none.
        families: transformers' names of them (`model_type` in a model's config.json).
    """

    methods: str
    families: str


def bench_architectures(
    only: tuple[str, ...] = (), *, published: bool = False, dtype: torch.dtype = torch.float32
) -> list[ArchitectureRow]:
    """Examine a tiny random model of every family that this version of transformers knows.

    Args:
        only: these families; empty for all.
        published: of those that people run, with the layers of a published model.
        dtype: of its weights.
    """
    found: dict[str, list[str]] = {}
    for kind in only or (_PUBLISHED if published else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        config = _narrow(kind) if published else next(_tiny(kind), None)
        found.setdefault(examined(kind, config, dtype), []).append(kind)
    ordered = sorted(found.items(), key=lambda row: (row[0].startswith("refused"), -len(row[1])))
    return [ArchitectureRow(methods, ", ".join(kinds)) for methods, kinds in ordered]


def examined(kind: str, config: Any, dtype: torch.dtype = torch.float32) -> str:
    """Which methods a family has, or why none, or where it computes something else.

    Args:
        config: of its model; None if there is none that is small.
    """
    if config is None:
        return "not tried: it cannot be built at tiny size"
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():  # ones and zeros would hide what norms, biases and decays do
            for weights in model.parameters():
                if weights.ndim < 2:
                    weights.add_(torch.randn_like(weights) * _SPREAD)
        found = wrap_model(model, _Tokenizer(), name=kind, revision=digest(kind))
    except ModelError as error:
        return f"refused: {_reason(str(error))}"
    return _fault(found) or methods_of(found)


@torch.inference_mode()
def _fault(model: LanguageModel) -> str:
    """What does not give what the model's own pass gives; empty if all does."""
    ids = torch.randint(5, 200, (1, _TOKENS + 1), generator=torch.Generator().manual_seed(0))
    # A step may do as one pass does, or as one behind the model's own cache (Gemma 4's differ).
    steps = [model.forward(ids)[-1], model.forward(ids, _TOKENS)[-1]]
    expected = [model.forward(ids[:, :-1])[-1]], steps
    apart = {}
    for name, (compute, after) in _passes(model, ids).items():
        try:
            logits = compute().float()
        except Exception as error:
            return f"fails: {name}: {type(error).__name__}: {error}"
        apart[name] = min(_distance(logits, own) for own in expected[after])
    dtype = model.shapes.dtype
    most = _MOST_APART[dtype]
    if not max(apart.values()) <= most:
        most = max(most, min(_rounding(model, ids), _MOST_ROUNDING[dtype]))
    return next((f"wrong: {name}" for name, far in apart.items() if not far <= most), "")


def _distance(logits: torch.Tensor, own: torch.Tensor) -> float:
    return float((logits - own).norm(dim=-1).max() / own.norm())


def _rounding(model: LanguageModel, ids: torch.Tensor) -> float:
    """How far the model's own pass moves when its weights do, by a rounding: in place."""
    own = model.forward(ids)[-1]
    for weights in model.decoder.model.parameters():
        step = torch.finfo(weights.dtype).eps / 2
        weights.mul_(1 + step * torch.randn_like(weights))
    return _distance(model.forward(ids)[-1], own)


def _passes(
    model: LanguageModel, ids: torch.Tensor
) -> dict[str, tuple[Callable[[], torch.Tensor], int]]:
    """What a model is to compute, by name: logits behind all tokens, or all but the last (0)."""
    buffers = [KVBuffer.like(model.shapes, _TOKENS + 1) for _ in range(2)]
    known, slots = ids[:, :-1], torch.arange(_TOKENS)
    rows = [StepInput(RowKV(buffer, _TOKENS), ids[0, -1:].tolist()) for buffer in buffers]
    fresh = (slots < 4) | (slots > _TOKENS - 6)
    layout = Layout(
        fresh=fresh,
        exact=torch.zeros(_TOKENS, dtype=torch.bool),
        modules=((4, 19), (19, _TOKENS - 5)),
        num_layers=model.shapes.num_layers,
        ids=known[0],
        first_attending=model.shapes.first_attending,
    )

    def repaired(method: str) -> torch.Tensor:
        chosen = parse_method(method, SELECTORS, None)
        return model.repair(RepairInput(buffers[0], known, layout, chosen)).logits

    found: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
        "a prefill": (lambda: [model.prefill(b, known) for b in buffers][-1].logits, 0)
    }
    if not model.keeps_states and model.rule.is_movable:
        found["scattered rows"] = (
            lambda: model.prefill(buffers[0], known, slots[fresh | (slots % 5 == 0)]).logits,
            0,
        )
        found["cacheblend"] = lambda: repaired("cacheblend:recompute_ratio=0.3"), 0
        if model.can_watch:
            found["auto"] = lambda: repaired("anchorflow:recompute_ratio=0.3"), 0
    found["a step"] = lambda: model.step(rows if model.can_batch else rows[:1]), 1
    return found


def _reason(error: str) -> str:
    """The same words for what is the same."""
    if "no list of" in error or "could not be examined" in error:
        return "no plain decoder"
    if "does not reproduce" in error:
        return "partial prefill does not give what its own does (it sees later tokens, say)"
    if "hands no keys" in error:
        return "no attention, or a cache of its own"
    return "its cache is of a kind that is unknown here"


def _tiny(kind: str) -> Iterator[Any]:
    """Configurations of a family that are small and can be built, the best one first."""
    known = CONFIG_MAPPING[kind]
    names = {*getattr(known, "__dataclass_fields__", {}), *getattr(known, "attribute_map", {})}
    fitting = {name: size for name, size in _MORE.items() if name in names}
    for more in (fitting | _DIFFERS.get(kind, {}), _MORE, {}):
        try:
            config = AutoConfig.for_model(kind, **(_SIZES | more))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception:
            continue
        if sum(weights.numel() for weights in model.parameters()) <= _MOST_WEIGHTS:
            yield config


def _narrow(kind: str) -> Any:
    """A published model's configuration, narrowed."""
    known = CONFIG_MAPPING[kind]
    names = {*getattr(known, "__dataclass_fields__", {}), *getattr(known, "attribute_map", {})}
    sizes = {name: size for name, size in _NARROW.items() if name in names}
    return AutoConfig.for_model(kind, **(sizes | _PUBLISHED.get(kind, {})))


class _Tokenizer:
    """A stand-in: the examination only asks whether the tokenizer is fast."""

    is_fast = True

    @property
    def backend_tokenizer(self) -> _Tokenizer:
        return self

    def to_str(self) -> str:
        return ""
