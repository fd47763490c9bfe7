"""Chunks of text with and without spaces, and what counting them costs."""

from __future__ import annotations

import random

import pytest
from langchain_text_splitters import RecursiveCharacterTextSplitter

from cached_rag.rag.chunks import Splitter
from cached_rag.rag.document import Document, assembled


def words(text):
    return len(text.split())


def split(text, count, most):
    chunks = Splitter(count, most).split(Document("s", "", text))
    return [chunk.text.removeprefix("\n\n") for chunk in chunks]


def test_a_title_of_too_many_tokens_is_cut_before_chunks():
    text = "\n\n".join(["a text of a few words"] * 3)
    chunks = Splitter(len, 40).split(Document("s", "t" * 200, text))
    assert {chunk.title for chunk in chunks} == {"t" * 200}
    assert {chunk.text.partition("\n\n")[0] for chunk in chunks} == {"t" * 62}


def test_text_with_spaces_is_split_as_langchain_does():
    random_ = random.Random(0)
    marks = [" ", " ", " ", " ", ". ", "\n", "\n\n", "\n\n\n", ".", "  "]
    for most in (16, 40):
        text = "".join(
            "w" * random_.randint(1, 9) + random_.choice(marks[: random_.randint(1, 10)])
            for _ in range(3000)
        )
        theirs = RecursiveCharacterTextSplitter(
            separators=["\n\n", "\n", ". ", " ", ""],
            keep_separator="end",
            chunk_size=most,
            chunk_overlap=0,
            length_function=words,
        )
        wanted = [part.strip() for part in theirs.split_text(text)]
        assert split(text, words, most) == [part for part in wanted if part]


HARD = {
    "ascii": "QUFB" * 25_000,
    "chinese": "\u5e93" * 100_000,
    "sentences": "\u8fd9\u662f\u4e00\u53e5\u8bdd\u3002" * 15_000,
    "spaces": "a" + " " * 100_000 + "b",
    "words": "a b" * 30_000,
}


@pytest.mark.parametrize("tokens_a_character", [0.25, 1, 4, 18])
@pytest.mark.parametrize("kind", HARD)
def test_counting_costs_a_few_times_the_text(kind, tokens_a_character):
    text, counted = HARD[kind], []

    def count(piece):
        counted.append(len(piece))
        return int(len(piece) * tokens_a_character) + 1

    chunks = split(text, count, 256)
    assert "".join("".join(chunks).split()) == "".join(text.split())
    assert all(count(chunk) <= 256 + 1 for chunk in chunks)
    del counted[-len(chunks) :]
    assert sum(counted) <= 8 * len(text)
    assert len(counted) <= 200 + len(text) // 5 * max(1, tokens_a_character)


def test_chunks_without_spaces_are_nearly_full():
    chunks = split("QUFB" * 25_000, lambda text: -(-len(text) // 2), 256)
    assert all(len(chunk) == 512 for chunk in chunks[:-1])


def test_sentences_without_spaces_stay_whole():
    sentence = "\u8fd9\u662f\u4e00\u53e5\u8bdd\u3002"
    chunks = split(sentence * 50, len, 16)
    assert set(chunks) == {sentence * 2}


def test_a_heading_stands_before_its_text_and_not_behind_the_one_before():
    sections = [
        ("Start", "Fill the hopper. " * 4),
        ("Stop", ""),  # with another heading right below it
        ("At once", "Press the red key. " * 4),
        ("Care", "Grease it.\n" * 30),  # more than a chunk, in lines
        ("End", "Thanks."),
    ]
    parts = [(f"{name}\n\n{said}", {"heading": name}) for name, said in sections]
    document = assembled("s", [("Manual\n\nWords.", {}), *parts], title="Manual")
    for most in range(19, 40):
        chunks = Splitter(words, most).split(document)
        texts = [chunk.text.removeprefix("Manual\n\n") for chunk in chunks]
        assert " ".join(texts).split() == document.text.removeprefix("Manual").split()
        lasts = {text.rsplit("\n", 1)[-1] for text in texts}
        assert not lasts & {name for name, _ in sections}, most
        assert all(words(text) <= most for text in texts)
    about = {chunk.metadata["heading"] for chunk in chunks if "Press the red" in chunk.text}
    assert about == {"Start; Stop; At once"}


def test_many_headings_in_a_row_are_cut_between_them():
    names = [f"Files > The option number {n:03d} of the o\ufb03ce" for n in range(99)]
    document = assembled("s", [(f"{name}\n\n", {"heading": name}) for name in names], title="T")
    chunks = Splitter(words, 40).split(document)
    lines = [line for chunk in chunks for line in chunk.text.split("\n\n")[1:]]
    assert [line.endswith("of the office") for line in lines] == [True] * len(names)
    assert len(chunks) == 33  # three of four a chunk, as the fourth goes on to the next


def test_no_chunk_is_longer_for_a_heading_that_is_carried_to_it():
    parts = [("K" * 60, {"heading": "K" * 60}), ("a" * 62 + "b" * 256 + "c" * 128, {})]
    for most in (64, 128, 256):
        found = Splitter(len, most).split(assembled("s", parts, title="T"))
        assert all(len(chunk.text) - 3 <= most for chunk in found)
