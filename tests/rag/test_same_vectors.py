"""An embedding model that was replaced under its name: all chunks get its vectors."""

from __future__ import annotations

import copy
import logging
import os

import numpy as np
import pytest
import torch
from conftest import CHUNKS, tiny_tokenizer
from indexes import WordEmbedding
from transformers import BertConfig, BertModel

from cached_rag import CachedRAG
from cached_rag.errors import IndexMismatchError
from cached_rag.rag.chunks import Embedder
from cached_rag.rag.index import DocumentIndex

TEXTS = dict(zip("abc", CHUNKS, strict=True))


class Shuffled(WordEmbedding):
    """Another model of the same name and width."""

    def embed(self, texts):
        return np.ascontiguousarray(
            super().embed(texts)[:, np.random.RandomState(3).permutation(64)]
        )


class Wider(WordEmbedding):
    """Another model of the same name, and of another width."""

    def embed(self, texts):
        found = super().embed(texts)
        return np.concatenate([np.zeros_like(found), found], axis=1)


def rag_with(opened, embedding):
    rag = opened(first_exact=True)
    rag._folder._embedder = embedding
    return rag


@pytest.mark.parametrize("other", [Shuffled, Wider])
def test_chunks_are_embedded_anew_once_and_the_right_one_is_found(opened, caplog, other):
    rag_with(opened, WordEmbedding()).add_texts(TEXTS, progress=False)
    rag = rag_with(opened, other())
    with caplog.at_level(logging.WARNING):
        (hit,) = rag.search("Why does copper turn green in the air?", k=1)
    assert hit.text.endswith(CHUNKS[1])
    assert hit.score > 0.5
    assert "its 3 chunks are embedded anew" in caplog.text
    caplog.clear()
    rag_with(opened, other()).search("copper", k=1)
    assert not caplog.text


@pytest.mark.parametrize("gives", [lambda v: v.tolist(), lambda v: 9 * v])
def test_lists_and_vectors_of_any_length_are_the_same_again(opened, caplog, monkeypatch, gives):
    embed = WordEmbedding.embed
    monkeypatch.setattr(WordEmbedding, "embed", lambda self, texts: gives(embed(self, texts)))
    rag_with(opened, WordEmbedding()).add_texts(TEXTS, progress=False)
    with caplog.at_level(logging.WARNING):
        assert rag_with(opened, WordEmbedding()).search("copper green", k=1)
    assert not caplog.text


def test_a_negative_control_finds_the_wrong_chunk(opened, monkeypatch):
    monkeypatch.setattr(DocumentIndex, "see_vectors_of", lambda *_: None)
    rag_with(opened, WordEmbedding()).add_texts(TEXTS, progress=False)
    found = [
        rag_with(opened, Shuffled()).search(text, k=1)[0].text.endswith(text) for text in CHUNKS
    ]
    assert not all(found)


def test_added_documents_do_not_hide_what_is_old(opened):
    rag_with(opened, WordEmbedding()).add_texts(TEXTS, progress=False)
    new = {"d": "Tin is brought to the harbour by mules."}
    rag_with(opened, Shuffled()).add_texts(new, progress=False)
    rag = rag_with(opened, Shuffled())
    for text in (*CHUNKS, *new.values()):
        assert rag.search(text, k=1)[0].text.endswith(text)


def test_a_read_only_index_says_who_can_mend_it(opened, monkeypatch):
    rag_with(opened, WordEmbedding()).add_texts(TEXTS, progress=False)
    rag = rag_with(opened, Shuffled())
    monkeypatch.setattr(rag.index._database, "is_read_only", True)
    with pytest.raises(IndexMismatchError, match=r"words is not the one .* read-only"):
        rag.search("copper", k=1)


@pytest.fixture
def embedding_folder(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tiny_tokenizer()), num_attention_heads=2, **sizes)
    BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_running_embedding_model_does_not_change_with_its_file(embedding_folder):
    embedder = Embedder(str(embedding_folder), device="cpu")
    before = embedder.embed(CHUNKS)
    (file,) = embedding_folder.rglob("*.safetensors")
    os.truncate(file, 0)  # would end a process that reads it by a map
    assert np.array_equal(embedder.embed(CHUNKS), before)


def test_an_index_without_documents_takes_any_model(tmp_path):
    with CachedRAG.open(tmp_path / "index", embedding=WordEmbedding()) as rag:
        assert rag.embedder.name == "words"
