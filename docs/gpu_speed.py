"""Times first tokens on a GPU, of a model of a real one's shape whose weights are random.

Speed needs no trained weights, so this runs on a machine that has no model: see docs/speed.md, "On
a GPU". Prints one line a method.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from cached_rag import Engine, StoreConfig, wrap_model
from cached_rag.backends.machine import best_device, fastest_dtype
from cached_rag.evaluation.timing import bench_ttft
from cached_rag.spi import LanguageModel

# Of Qwen2.5's models.
SHAPES: dict[str, dict[str, Any]] = {
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
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_model(shape: str, tokenizer_file: str, device: str) -> LanguageModel:
    """A model of random weights, made on the device it runs on."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        "qwen2", vocab_size=152064, max_position_embeddings=32768, **SHAPES[shape]
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=fastest_dtype(device))
    return wrap_model(model, tokenizer, name=shape, revision=shape)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--tokenizer", required=True, help="Qwen2.5's tokenizer.json")
    parser.add_argument("--chunks", default="8,32", help="of 512 tokens each, comma-separated")
    parser.add_argument("--methods", default="prefix,reuse,fast,auto")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    model = random_model(asked.shape, asked.tokenizer, best_device())
    for chunks in map(int, asked.chunks.split(",")):
        with Engine(model, StoreConfig(sequence_bytes=0)) as engine:
            for row in bench_ttft(
                engine,
                modules=chunks,
                methods=asked.methods.split(","),
                repeats=asked.repeats,
            ):
                print(
                    f"{asked.shape} {row.prompt_tokens} {row.method:13}{row.ttft_ms:8.1f} ms "
                    f"{row.speedup:5.2f}x, computed {row.charged_recompute:.3f}, of it "
                    f"{row.overhead_ms:.1f} ms before the model",
                    flush=True,
                )


if __name__ == "__main__":
    main()
