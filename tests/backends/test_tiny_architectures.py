"""The tiny models that other tests use: llama.cpp loads them, and their tokens matter."""

from __future__ import annotations

import os

import pytest
import torch
from conftest import random_ids
from tiny_architectures import ARCHITECTURES, write_architecture

from cached_rag.backends.llama_cpp import api
from cached_rag.backends.llama_cpp.context import LlamaContext, Work


def last_logits(context, *pieces):
    position = 0
    with context.opened() as own:
        for ids in pieces:
            found = context.compute([Work(own, ids, position)])
            position += len(ids)
    return found[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_computed(tmp_path, name):
    library = api.load()
    path = write_architecture(tmp_path / "tiny.gguf", name)
    params = api.default_params(library, api.ModelParams)
    params.n_gpu_layers, params.load_mode = 0, api.LOAD_MODE_NONE
    model = library.llama_model_load_from_file(os.fsencode(path), params)
    assert model
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    context = LlamaContext(library, model, None, size, 1)
    context.resize(0)
    ids = random_ids(40)
    whole = last_logits(context, ids)
    pieces = last_logits(context, ids[:20], ids[20:])
    changed = last_logits(context, [*ids[:34], ids[34] ^ 2, *ids[35:]])
    context.free()
    library.llama_model_free(model)
    assert whole.isfinite().all()
    torch.testing.assert_close(pieces, whole, atol=2e-2, rtol=0)
    assert (changed - whole).abs().max() > 0.1
