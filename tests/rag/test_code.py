"""Source code: read as it is, and split between its functions and classes."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cached_rag.errors import DocumentError
from cached_rag.rag.chunks import Splitter
from cached_rag.rag.document import Document
from cached_rag.rag.readers import LANGUAGES, load_document

FUNCTION = "def function_{0}(one, two):\n    three = one + two + {0}\n    return three * {0}\n"
CLASS = "class Thing{0}:\n    def method(self):\n        return {0}\n"


def words(text):
    return len(text.split())


def test_python_is_split_between_functions(tmp_path):
    parts = [make.format(n) for n in range(6) for make in (FUNCTION, CLASS)]
    (tmp_path / "tool.py").write_text("\n\n".join(parts))
    document = load_document(tmp_path / "tool.py")
    assert document.title == "tool.py"
    chunks = Splitter(words, 16).split(document)
    texts = [chunk.text.removeprefix("tool.py\n\n") for chunk in chunks]
    assert texts == [part.rstrip() for part in parts]


def test_an_indent_at_the_beginning_of_a_chunk_is_kept():
    body = "".join(f"    call_{n}()\n" for n in range(60))
    chunks = Splitter(words, 16).split(Document("s", "t", f"def f():\n{body}", (), "python"))
    assert len(chunks) > 3
    assert all(chunk.text.split("\n")[2].startswith("    call_") for chunk in chunks[1:])


def test_code_is_read_as_it_is(tmp_path):
    text = 'x = """one\n\n\n\ntwo"""\n    # end'
    (tmp_path / "a.py").write_text(f"\n{text}\n")
    assert load_document(tmp_path / "a.py").text == text


@pytest.mark.parametrize("language", sorted(set(LANGUAGES.values())))
@settings(max_examples=15, deadline=None)
@given(text=st.text("ab(){};\n\t #/*'\"classdefnunctionif ", max_size=400))
def test_chunks_are_the_text_in_order_and_nothing_is_lost(language, text):
    chunks = Splitter(len, 16).split(Document("s", "", text, (), language))
    place = 0
    for chunk in chunks:
        part = chunk.text.removeprefix("\n\n")
        found = text.index(part, place)
        assert not text[place:found].strip()
        place = found + len(part)
    assert not text[place:].strip()


def test_a_programs_output_is_split_as_text_in_time():
    text = "a=1;" * 200_000
    counted = []

    def count(piece):
        counted.append(len(piece))
        return len(piece) // 4 + 1

    chunks = Splitter(count, 256).split(Document("s", "t", text, (), "js"))
    assert all(len(chunk.text) < 1100 for chunk in chunks)
    assert sum(counted) < 10 * len(text)


def test_without_the_package_the_reason_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "langchain_text_splitters", None)
    (tmp_path / "a.py").write_text("print()")
    with pytest.raises(DocumentError, match=r"\[docs\]"):
        load_document(tmp_path / "a.py")
