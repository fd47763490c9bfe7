"""Tiny random models of every family, a tokenizer trained on the spot, and the real small model."""

from __future__ import annotations

import functools
import gc
import os
import random
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports the hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: `make test` has a process a core

import pytest
import torch
from hypothesis import settings
from indexes import WordEmbedding
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt
from transformers.utils import logging

from cached_rag import CachedRAG, Engine, StoreConfig, load_model, wrap_model
from cached_rag.backends.transformers.decoder import cache_argument
from cached_rag.kv.layers import Layered, stacks_of
from cached_rag.methods import Auto
from cached_rag.spi import LanguageModel

if "HYPOTHESIS_EXAMPLES" not in os.environ and "SCHEMA_EXAMPLES" not in os.environ:
    # The suite's examples are the same each time; a long run finds others.
    settings.register_profile("suite", derandomize=True)
    settings.load_profile("suite")

logging.disable_progress_bar()
logging.set_verbosity_error()  # tiny vocabularies make configurations complain

# Where finished prompts leave nothing: what is asked again is asked as a new prompt.
NEW_PROMPTS = StoreConfig(sequence_bytes=0)
VOCAB = 240
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_MHA = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_OLD = {"vocab_size": VOCAB, "hidden_size": 64}
_WINDOW = 9
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
_SWITCH = {"original_max_position_embeddings": 64}

_MLA = (
    _SIZES
    | {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "v_head_dim": 16}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "moe_intermediate_size": 32}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "qwen2": ("qwen2", _SIZES),
    "qwen3": ("qwen3", _SIZES | {"head_dim": 16}),
    "mistral": ("mistral", _SIZES | {"head_dim": 16, "sliding_window": _WINDOW}),
    "gemma3": (
        "gemma3_text",
        _SIZES
        | {
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma2": (
        "gemma2",
        _SIZES | {"head_dim": 16, "sliding_window": _WINDOW, "attn_logit_softcapping": 2.0},
    ),
    "phi3": ("phi3", _SIZES | {"pad_token_id": 0}),
    "gpt_neox": ("gpt_neox", _MHA),
    "gptj": (
        "gptj",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8},
    ),
    "cohere": ("cohere", _SIZES),
    "smollm3": ("smollm3", _SIZES | {"pad_token_id": 0}),
    "falcon": (
        "falcon",
        _OLD | {"num_hidden_layers": 4, "num_attention_heads": 4, "alibi": False},
    ),
    "falcon_alibi": (
        "falcon",
        _OLD | {"num_hidden_layers": 4, "num_attention_heads": 4, "alibi": True},
    ),
    "mpt": (
        "mpt",
        {"vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 1024},
    ),
    "bloom": ("bloom", _OLD | {"n_layer": 4, "n_head": 4}),
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024},
    ),
    # Layers that differ: in heads, in what they keep, or that keep nothing and read another's.
    "gemma4": (
        "gemma4_text",
        _SIZES
        | {
            **{"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": _WINDOW},
            **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "attention_k_eq_v": True,
        },
    ),
    "lfm2": ("lfm2", _SIZES | {"layer_types": ["conv", "full_attention"] * 2}),
    "gemma3n": (
        "gemma3n_text",
        _SIZES
        | {
            **{"num_kv_shared_layers": 2, "sliding_window": _WINDOW, "head_dim": 16},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
            **{"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "deepseek_v2": ("deepseek_v2", _MLA | {"head_dim": 8}),
    "gpt_oss": (
        "gpt_oss",
        _SIZES
        | {"head_dim": 16, "sliding_window": _WINDOW, "pad_token_id": 0}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": (
        "llama4_text",
        _SIZES
        | {"head_dim": 16, "attention_chunk_size": _WINDOW, "intermediate_size_mlp": 128}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
        | {"floor_scale": 16, "attn_scale": 0.5},  # else no query is scaled before token 8192
    ),
    "longrope": ("phi3", _SIZES | {"pad_token_id": 0, "rope_parameters": _LONGROPE} | _SWITCH),
}
# Models some of whose layers keep a state.
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5_text",
        _SIZES
        | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "granite4_h": (
        "granitemoehybrid",
        _SIZES
        | _MAMBA
        | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64}
        | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "nemotron_h": (
        "nemotron_h",
        _SIZES
        | {"head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8}
        | {"n_groups": 1, "pad_token_id": 0, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "hybrid_override_pattern": "M*-M"},
    ),
    "jamba": (
        "jamba",
        _SIZES
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "pad_token_id": 0}
        | {"mamba_d_state": 8},
    ),
    "minimax": ("minimax", _SIZES | {"head_dim": 16, "num_local_experts": 4, "block_size": 32}),
}
UNMOVABLE = {"gpt2"}
ALIBI = {"bloom", "mpt", "falcon_alibi"}
RELOCATABLE = sorted(set(FAMILIES) - UNMOVABLE - {"longrope"})

CHUNKS = [
    "The lighthouse keeper of Bishop Rock lit the lamp every evening for thirty-one years.",
    "Copper turns green because it reacts with oxygen, water and carbon dioxide in the air.",
    "In 1911 a small party reached the South Pole with fifty-two dogs and four sledges.",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shuffled(seed: int) -> str:
    """The words of `CHUNKS` in another order: texts with no sentence in common."""
    words = " ".join(CHUNKS).split()
    random.Random(seed).shuffle(words)
    return " ".join(words)


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB` tokens with a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        # Printable ASCII only: random models then answer in text, not in broken UTF-8.
        initial_alphabet=[*map(chr, range(33, 127)), "Ġ", "Ċ"],
        show_progress=False,
    )
    backend.train_from_iterator(CHUNKS * 3, trainer)
    assert backend.get_vocab_size() == VOCAB
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@functools.cache
def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A random model of few layers, its weights the same in every run, but for their rounding."""
    kind, sizes = (FAMILIES | HYBRIDS)[family]
    torch.manual_seed(sum(map(ord, family)))
    special = {"bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(kind, **(sizes | special))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(4)  # else attention is nearly uniform and masks hardly matter
    model.generation_config.eos_token_id = 1
    return wrap_model(model.to(dtype), tiny_tokenizer(), name=family, revision=family)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that none is begun last: notebooks, then all else with real models."""
    notebooks = "test_notebooks.py"
    items.sort(key=lambda item: (item.path.name != notebooks, "real" not in item.keywords))
    gc.freeze()  # what is imported by now stays; to look through it takes .3 s each time


@pytest.fixture(autouse=True)
def tiny_models_stand_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models compute all of alike entries, as tests' texts are, and would repair nothing."""
    monkeypatch.setattr(Auto, "least_weights", 0)


@pytest.fixture
def pages(monkeypatch):
    """Pages of four slots, and memory that is not rounded up to more."""
    for module in ("prompt", "request"):
        monkeypatch.setattr(f"cached_rag.engine.{module}.PAGE", 4)
    monkeypatch.setattr("cached_rag.kv.rows.rounded", lambda capacity: -(-capacity // 4) * 4)


@pytest.fixture
def engine() -> Engine:
    """An engine on the tiny llama with an empty store in memory."""
    return Engine(tiny_model("llama"), NEW_PROMPTS)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny llama as files, for the command line."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").decoder.model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@functools.cache
def smollm2(dtype: str = "float32") -> LanguageModel:
    """The packaged SmolLM2-135M-Instruct."""
    return load_model("smollm2-135m", dtype=dtype, device="cpu")


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids without control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (count,), generator=generator).tolist()


def plain_logits(model: LanguageModel, token_ids: list[int]) -> torch.Tensor:
    """(seq_len, vocab) logits of transformers' own forward pass."""
    with torch.inference_mode():
        return model.decoder.model(input_ids=torch.tensor([token_ids])).logits[0]


def logits_at(model: LanguageModel, token_ids: list[int], positions: list[int]) -> torch.Tensor:
    """(vocab,) logits of the last token by transformers' own forward at these positions.

    ALiBi's biases are not by position ids, so their builders are replaced by the paper's formula.
    """
    options: dict[str, Any] = {"attention_mask": torch.ones(1, len(token_ids), dtype=torch.int64)}
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        if model.name in ALIBI:
            heads = 4
            slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1))
            bias = slopes[:, None, None] * torch.tensor(positions, dtype=torch.float32)
            patch.setattr(modeling_falcon, "build_alibi_tensor", lambda *_, **__: bias)
            patch.setattr(modeling_bloom, "build_alibi_tensor", lambda *_, **__: bias)
            patch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda *_, **__: bias)
        else:
            options["position_ids"] = torch.tensor([positions])
        output = model.decoder.model(input_ids=torch.tensor([token_ids]), **options)
    return output.logits[0, -1]


def plain_cache(
    model: LanguageModel, token_ids: list[int], start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, (layers, heads, seq_len, dim), of transformers' own forward pass.

    Sliding layers of a dynamic cache drop old tokens, so they are caught on the way in.
    """
    from transformers import DynamicCache

    class Recording(DynamicCache):  # type: ignore[misc]
        def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            seen[layer_idx] = (keys[0], values[0])
            return super().update(keys, values, layer_idx, *args, **kwargs)

        def update_conv_state(self, inputs: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            kept = inputs.transpose(1, 2)
            seen[layer_idx] = (kept[..., :0], kept)
            return super().update_conv_state(inputs, layer_idx, *args, **kwargs)

    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    options = {}
    if start and model.name not in ALIBI:
        options["position_ids"] = torch.arange(start, start + len(token_ids))[None]
    with torch.inference_mode():
        tokens = torch.tensor([token_ids])
        options[cache_argument(model.decoder.model)] = Recording(config=model.decoder.model.config)
        model.decoder.model(input_ids=tokens, use_cache=True, **options)
    shapes, layers = model.shapes, range(model.shapes.num_layers)
    sides = [
        [torch.stack([seen[i][side] for i in layers if shapes.layers[i] == kind]) for kind in kinds]
        for side, kinds in ((0, shapes.kinds), (1, shapes.kinds))
    ]
    return shapes.join(sides[0]), shapes.join(sides[1])


def alike(ours: Layered, theirs: Layered, atol: float = 1e-4) -> bool:
    """Whether keys, or values, are the same in all layers."""
    pairs = zip(stacks_of(ours), stacks_of(theirs), strict=True)
    return all(torch.allclose(one, other, atol=atol) for one, other in pairs)


def fill(layered: Layered, slots: Any, value: float) -> None:
    """Set what a buffer has in some slots, in all layers."""
    for stack in stacks_of(layered):
        stack[:, :, :, slots] = value


def count_at_rest(items: list[Any], seconds: float = 0.2) -> int:
    """How long a list is once nothing was added to it for a while."""
    count = -1
    while count != len(items):
        count = len(items)
        time.sleep(seconds)
    return count


QUESTION = "What happened?"


def ask(*chunks, system="You answer briefly."):
    context = "\n\n".join(chunks)
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{context}\n\n{QUESTION}"},
    ]


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, chunk in zip("abc", CHUNKS, strict=True):
        (folder / f"{name}.txt").write_text(f"About {name}\n\n{chunk}")
    return folder


@pytest.fixture
def opened(tmp_path):
    made = []

    def open_it(index="index", **options):
        bound = options.pop("sequence_bytes", 0)
        store = StoreConfig(
            path=str(tmp_path / index / "kv"), sequence_bytes=bound, keeps_repaired=True
        )
        engine = Engine(tiny_model("llama"), store)
        rag = CachedRAG.open(
            tmp_path / index, engine=engine, embedding=WordEmbedding(), chunk_tokens=128, **options
        )
        made.append(rag)
        return rag

    yield open_it
    for rag in made:
        rag.close()
        rag.engine.close()
