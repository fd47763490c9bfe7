"""A model with random weights, in the shapes of Qwen2.5's, and a tokenizer for it.

Times need no trained weights. The tokenizer learns from this repository's own text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from cached_rag import wrap_model
from cached_rag.backends.machine import fastest_dtype
from cached_rag.spi import LanguageModel

_ROOT = Path(__file__).parents[2]
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}
_VOCABULARY = {"tiny": 4096}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def own_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of this repository's documents and code."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = [*_ROOT.glob("docs/*.md"), *_ROOT.glob("cached_rag/**/*.py")]
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train([str(file) for file in sorted(files)], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = _TEMPLATE
    return made


def random_model(shape: str, device: str) -> LanguageModel:
    """A model of random weights, made on the device it runs on."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=_VOCABULARY.get(shape, 152064),
        max_position_embeddings=32768,
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=fastest_dtype(device))
    return wrap_model(model, own_tokenizer(), name=shape, revision=shape)
