"""Chunks are found where their text is, whatever the texts are, and in linear time."""

from __future__ import annotations

import random

import pytest

from cached_rag.backends.prompt_text import Tokens
from cached_rag.kv.fingerprint import digest
from cached_rag.library import matching as match
from cached_rag.library.matching import ANCHOR, ChunkTable, record_of


def record(text):
    return record_of(text, Tokens([1], [0], [len(text)]))


def table_of(texts):
    table = ChunkTable()
    for text in texts:
        table.add(record(text))
    return table


def spans(table, text):
    return [(found.at, found.at + len(found.text)) for found in table.find(text)]


def twin(texts, prompt):
    """Slow: every text at every place."""
    longest_first = sorted(set(texts), key=len, reverse=True)
    found, begin = [], 0
    while begin < len(prompt):
        text = next((text for text in longest_first if prompt.startswith(text, begin)), "")
        if text:
            found.append((begin, begin + len(text)))
        begin += len(text) or 1
    return found


def like(draw, length):
    """Text that repeats itself, so that anchors hit everywhere."""
    return "".join(draw.choice(["a" * 40, "ab" * 20, "b", "é", "a" * 70]) for _ in range(length))


@pytest.mark.parametrize("seed", range(40))
def test_leftmost_first_the_longest_at_each_place_without_overlaps(seed):
    draw = random.Random(seed)
    texts = [text for _ in range(30) if len(text := like(draw, draw.randint(1, 6))) >= ANCHOR]
    prompt = "".join(
        draw.choice([draw.choice(texts), like(draw, 2), "\n\n", draw.choice(texts)[:-1]])
        for _ in range(20)
    )
    table = table_of(texts)
    assert spans(table, prompt) == twin(texts, prompt)
    gone = draw.sample(sorted(set(texts)), len(set(texts)) // 2)
    table.discard(record(text) for text in gone)
    left = set(texts) - set(gone)
    assert len(table) == len(left)
    assert spans(table, prompt) == twin(left, prompt)


@pytest.fixture
def digested(monkeypatch):
    """How many characters were digested, at most a hundred million."""
    counted = [0]

    def counting(text):
        counted[0] += len(text)
        assert counted[0] < 100_000_000
        return digest(text)

    monkeypatch.setattr(match, "digest", counting)
    return counted


def test_texts_made_to_begin_alike_cost_no_more_than_so_much_a_character(digested):
    honest = "The lighthouse keeper of Bishop Rock lit the lamp every evening. " * 12
    table = table_of([*("a" * (1000 + n) + "b" for n in range(300)), honest])
    digested[0] = 0
    prompt = f"{'a' * 32_000}\n\n{honest}\n\nWhy?"
    assert spans(table, prompt) == [(32_002, 32_002 + len(honest))]  # also behind them
    longest = table_of("a" * 32 + "b" * n for n in range(5_000, 9_000))
    assert spans(longest, "a" * 4_000) == []  # none of them has room


def test_hundreds_of_chunks_with_one_heading_are_all_found(digested):
    heading = "From the handbook of the harbour authority, second edition: "
    texts = [f"{heading}{n} " + "and so on, " * (20 + n // 4) for n in range(1_200)]
    table = table_of(texts)
    digested[0] = 0
    chosen = texts[::60]
    assert len(spans(table, "\n\n".join(chosen))) == len(chosen)


def test_a_search_goes_on_while_the_table_changes():
    texts = [f"{n} is a number, and numbers are known to everybody." for n in range(6)]
    table = table_of(texts)
    search = table.find("\n".join(texts))
    next(search)
    table.discard([table.get(texts[3])])
    table.add(record("x" * 50))
    assert len(list(search)) == 4
    assert len(spans(table, "\n".join(texts))) == 5
