"""A tokenizer with tokens that control a model, and others that are text."""

from __future__ import annotations

from conftest import CHUNKS, TEMPLATE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROLS = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "[INST]", "<think>", "</think>"]


TEXTS = ["    ", "\n\n\n", "<table>", "</td>", "->"]  # tokens of a document's own


def made(normalizer=None, added=()):
    """A byte-level BPE that knows all bytes."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CHUNKS * 3, trainer)
    backend.add_tokens([AddedToken(text, special=False) for text in (*CONTROLS, *TEXTS)])
    backend.add_tokens(list(added))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZER = made()
