"""Which architectures work and which are refused: examines a tiny random model of each.

For docs/models.md. The result depends on an architecture's code only, not on a model's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from cached_rag.backends.transformers.loading import wrap_model
from cached_rag.errors import ModelError
from cached_rag.kv.fingerprint import digest
from docs.experiments.models import methods_of

_SIZES = {
    "vocab_size": 240,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_HEADS = {"head_dim": 16}
_WINDOW = {"sliding_window": 9}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_MHA = {"num_key_value_heads": 4}
_OLD = {"n_embd": 64, "n_layer": 4, "n_head": 4}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
# By name: the model type of transformers, and settings that differ from `_SIZES`.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2, 3": ("llama", {}),
    "Mistral": ("mistral", _HEADS | _WINDOW),
    "Ministral": ("ministral", _HEADS | _WINDOW),
    "Mixtral": ("mixtral", _EXPERTS),
    "Qwen 2, 2.5": ("qwen2", {}),
    "Qwen 3": ("qwen3", _HEADS),
    "Qwen 3 MoE": ("qwen3_moe", _HEADS | _EXPERTS | {"moe_intermediate_size": 32}),
    "Gemma 1": ("gemma", _HEADS),
    "Gemma 2": ("gemma2", _HEADS | _WINDOW),
    "Gemma 3": ("gemma3_text", _HEADS | _WINDOW),
    "Phi 1, 2": ("phi", {}),
    "Phi 3, 4": ("phi3", {}),
    "Phi 3 longrope": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", _WINDOW),
    "Granite": ("granite", {}),
    "SmolLM 3": ("smollm3", {}),
    "StableLM": ("stablelm", {}),
    "Starcoder 2": ("starcoder2", {}),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", _WINDOW),
    "GLM 4": ("glm4", _HEADS),
    "EXAONE 4": ("exaone4", _WINDOW),
    "Nemotron": ("nemotron", {}),
    "GPT-NeoX": ("gpt_neox", _MHA),
    "gpt-oss": ("gpt_oss", _HEADS | _WINDOW | _EXPERTS),
    "DeepSeek 3": ("deepseek_v3", _MHA | {"first_k_dense_replace": 4}),
    "Falcon": ("falcon", {"alibi": False}),
    "Falcon with ALiBi": ("falcon", {"alibi": True}),
    "MPT": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 1024}),
    "BLOOM": ("bloom", {"n_layer": 4, "n_head": 4}),
    "GPT-J": ("gptj", _OLD | {"rotary_dim": 8}),
    "GPT-2": ("gpt2", _OLD | {"n_positions": 1024}),
    "OPT": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "Qwen 3 Next": ("qwen3_next", _HEADS | _EXPERTS | {"moe_intermediate_size": 32}),
    "LFM 2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "Mamba": ("mamba", {"state_size": 8}),
}


@dataclass(frozen=True)
class ArchitectureRow:
    """An architecture: how its keys depend on position, its methods; or why it is refused."""

    family: str
    position_rule: str
    methods: str
    refused: str


def bench_architectures() -> list[ArchitectureRow]:
    """Examine a tiny random model of every family that this version of transformers knows."""
    return [_row(family, *how) for family, how in ARCHITECTURES.items()]


def _row(family: str, kind: str, differs: dict[str, Any]) -> ArchitectureRow:
    try:
        config = AutoConfig.for_model(kind, **(_SIZES | differs))
        model = AutoModelForCausalLM.from_config(config)
    except (KeyError, ValueError) as error:
        return ArchitectureRow(family, "", "", f"unknown to this transformers: {error}")
    try:
        found = wrap_model(model, _Tokenizer(), name=kind, revision=digest(family))
    except ModelError as error:
        return ArchitectureRow(family, "", "", str(error).partition(". ")[0])
    return ArchitectureRow(family, str(found.rule), methods_of(found), "")


class _Tokenizer:
    """A stand-in: the examination only asks whether the tokenizer is fast."""

    is_fast = True

    @property
    def backend_tokenizer(self) -> _Tokenizer:
        return self

    def to_str(self) -> str:
        return ""
