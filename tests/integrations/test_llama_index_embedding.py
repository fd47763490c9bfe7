"""Embeddings for LlamaIndex: the vectors are the embedder's, in threads and in event loops."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import CHUNKS
from indexes import WordEmbedding
from llama_index.llms.cached_rag import SentenceTransformerEmbedding

from cached_rag import Embedder


@pytest.fixture
def embedding(monkeypatch):
    monkeypatch.setattr(Embedder, "embed", WordEmbedding.embed)
    return SentenceTransformerEmbedding()


async def test_vectors_are_the_embedders(embedding):
    wanted = WordEmbedding().embed(CHUNKS)
    assert np.allclose(embedding.get_text_embedding_batch(CHUNKS), wanted)
    assert np.allclose(await embedding.aget_text_embedding_batch(CHUNKS), wanted)
    for found in (
        embedding.get_query_embedding(CHUNKS[0]),
        embedding.get_text_embedding(CHUNKS[0]),
        await embedding.aget_query_embedding(CHUNKS[0]),
        await embedding.aget_text_embedding(CHUNKS[0]),
    ):
        assert np.allclose(found, wanted[0])


def test_settings_survive_and_nothing_is_loaded_before_it_is_needed():
    embedding = SentenceTransformerEmbedding(model_name="some/model", device="cpu")
    again = SentenceTransformerEmbedding.from_dict(embedding.to_dict())
    assert (again.model_name, again.device) == ("some/model", "cpu")
