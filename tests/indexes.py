"""Indexes of documents without a real embedding model, and whether two are the same."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import product

import numpy as np
import torch


class WordEmbedding:
    """Hashed word counts: texts that share words are near."""

    name = "words"

    def embed(self, texts):
        rows = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row[sum(map(ord, word.strip("?.,"))) % 64] += 1
        return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1)


def rows(rag):
    """All of documents.sqlite but where the files are, and when they changed, as it is kept."""
    documents = "(SELECT source, digest, title, is_encoded FROM documents)"
    tables = ("settings", documents, "chunks", "unneeded")
    with closing(sqlite3.connect(rag.path / "documents.sqlite")) as connection:
        return {t: connection.execute(f"SELECT * FROM {t} ORDER BY 1").fetchall() for t in tables}


def kept(rag):
    """All KV in the store, by the text and what it was encoded behind."""
    library = rag.engine.library
    library.refresh()
    found = {
        (chunk.text_digest, behind): library.shelf.fetch(behind, chunk.token_ids)
        for chunk, behind in product(library.table, library.encoded_after())
    }
    return {key: torch.stack([*kv.keys, *kv.values]) for key, kv in found.items() if kv}


def assert_same_index(found, wanted):
    """The same rows, bit for bit, and KV that differs by no more than rounding."""
    assert rows(found) == rows(wanted)
    own, other = kept(found), kept(wanted)
    assert own.keys() == other.keys()
    assert len(own) > 20
    for key, kv in own.items():
        assert torch.allclose(kv, other[key], atol=1e-5), key
    return [key for key, kv in own.items() if not torch.equal(kv, other[key])]


def ingest(rag, path, **options):
    return rag.ingest(path, progress=False, **options)
