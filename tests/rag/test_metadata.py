"""Pages, headings and what users say of texts: kept with chunks, and used to choose among them."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
from pypdf import PdfReader, PdfWriter
from test_documents import PDF

from cached_rag import ConfigError, Hit
from cached_rag.errors import DocumentError
from cached_rag.rag.chunks import Splitter
from cached_rag.rag.readers import load_document
from cached_rag.rag.search import judge

PAGE = """<h1>Copper</h1><p>turns green</p><h2>On roofs</h2><p>within years</p>
<h3>Near the sea</h3><p>sooner</p><h2>In soil</h2><p>seldom</p>"""


def of(document, text):
    begin = document.text.index(text)
    return document.metadata(begin, begin + len(text))


def test_a_chunk_knows_the_headings_above_it(tmp_path):
    (tmp_path / "a.html").write_text(f"<p>before</p>{PAGE}")
    document = load_document(tmp_path / "a.html")
    assert of(document, "before") == {}
    assert of(document, "turns green") == {"heading": "Copper"}
    assert of(document, "within years") == {"heading": "Copper > On roofs"}
    assert of(document, "sooner") == {"heading": "Copper > On roofs > Near the sea"}
    assert of(document, "seldom") == {"heading": "Copper > In soil"}
    (chunk,) = Splitter(lambda text: len(text.split()), 256).split(document)
    assert chunk.metadata == {
        "heading": "Copper; Copper > On roofs; Copper > On roofs > Near the sea; Copper > In soil"
    }


def test_markdown_and_rst_have_headings_too(tmp_path):
    (tmp_path / "a.md").write_text("# Copper\n\nred\n\n## Patina\n\n*green*\n")
    (tmp_path / "b.rst").write_text("Copper\n======\n\nred\n\nPatina\n------\n\n*green*\n")
    for name in ("a.md", "b.rst"):
        document = load_document(tmp_path / name)
        assert str(of(document, "green")["heading"]).endswith("Patina")


def test_a_chunk_of_a_pdf_knows_its_page(tmp_path):
    writer = PdfWriter()
    for page in ("Copper turns green", "Zinc stays as is, "):  # of one length: the PDF says it
        data = PDF.replace(b"Copper turns green", page.encode())
        writer.add_page(PdfReader(io.BytesIO(data)).pages[0])
    writer.write(tmp_path / "a.pdf")
    document = load_document(tmp_path / "a.pdf")
    assert of(document, "Copper") == {"page": 1}
    assert of(document, "Zinc") == {"page": 2}


def test_a_heading_of_a_notebook_is_above_the_cells_behind_it(tmp_path):
    said = ["# Copper", "turns green", "## Roofs\n\nsooner"]
    cells = [{"cell_type": "markdown", "source": one} for one in said]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    document = load_document(tmp_path / "a.ipynb")
    assert of(document, "turns green") == {"heading": "Copper"}
    assert of(document, "sooner") == {"heading": "Roofs"}


def test_headings_are_bounded_and_those_inside_tables_are_none(tmp_path):
    deep = "".join(f"<h{n}>{'long ' * 60}</h{n}>" for n in range(1, 6))
    (tmp_path / "a.html").write_text(deep + "<h6>x</h6>" * 2_000)
    (chunk, *_) = Splitter(len, 1 << 20).split(load_document(tmp_path / "a.html"))
    assert len(chunk.metadata["heading"]) == 1000
    cells = "<td>one<br>two<br>three</td><td valign=bottom><h2>Bottom title</h2></td>"
    (tmp_path / "b.html").write_text(f"<h1>Top</h1><table><tr>{cells}</tr></table>")
    document = load_document(tmp_path / "b.html")
    assert of(document, "three") == of(document, "Bottom") == {"heading": "Top"}


@pytest.fixture
def rag(opened):
    rag = opened()
    texts = {
        f"metals/{name}": f"{name} is a metal that every smith knows; it turns {colour} in rain "
        * 4
        for name, colour in (("copper", "green"), ("iron", "red"), ("zinc", "white"))
    }
    for number, (name, text) in enumerate(texts.items()):
        rag.add_texts({name: text}, metadata={"year": 2000 + number}, progress=False)
    return rag


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ({"source": "metals/copper"}, {"copper"}),
        ({"source": "*/[iz]*"}, {"iron", "zinc"}),
        ({"year": 2001}, {"iron"}),
        ({"year": "2001"}, {"iron"}),
        ({"year": range(2001, 2009)}, {"iron", "zinc"}),
        ({"year": range(2002, 10**18)}, {"zinc"}),
        ({"source": range(9)}, set()),
        ({"year": [2000, 2002], "source": ["metals/zinc", "metals/iron"]}, {"zinc"}),
        (lambda hit: "red" in hit.text, {"iron"}),
        ({"year": 1999}, set()),
    ],
)
def test_a_search_keeps_to_its_filter(rag, where, names):
    hits = rag.search("a metal in rain", 50, where=where)
    assert {hit.source.removeprefix("metals/") for hit in hits} == names
    answer = rag.ask("a metal in rain", k=50, where=where, max_tokens=2)
    assert {hit.text for hit in answer.sources} == {hit.text for hit in hits}
    assert any("filter" in note for note in answer.report.notes) == (not names)


def test_filters_by_what_there_is_not_are_refused(rag):
    with pytest.raises(ConfigError, match=r"'yaer'.*ordinal, year"):
        rag.search("rain", where={"yaer": 2001})
    for wrong in (None, {"$gte": 2000}, b"2000", [None]):
        with pytest.raises(ConfigError, match="year"):
            rag.search("rain", where={"year": wrong})
    for wrong in ("metals/*", [("year", 2000)]):
        with pytest.raises(ConfigError, match="where is like"):
            rag.search("rain", where=wrong)
    assert len(set(rag.search("rain", 9))) == len(rag.search("rain", 9))  # hits have a hash


def test_patterns_are_read_once_and_not_for_each_chunk(monkeypatch):
    fits = judge({"source": ["a[/]*", "b", 3]}, ())
    monkeypatch.setattr(re, "compile", None)
    found = [fits(Hit("", source, "", 0, 0.0)) for source in ("a/b", "b", "3", "c")]
    assert found == [True, True, True, False]


@pytest.mark.parametrize(
    ("value", "is_within"),
    [("7", True), ("x", False), (7.0, True), (7.5, False), (math.inf, False)],
)
def test_a_range_is_not_looked_through_number_by_number(value, is_within):
    class Watched(type(value)):
        __hash__ = type(value).__hash__

        def __eq__(self, other):
            raise AssertionError(f"compared with {other}")

    fits = judge({"page": range(9)}, ("page",))
    assert fits(Hit("", "", "", 0, 0.0, {"page": Watched(value)})) == is_within


def test_texts_are_replaced_and_deleted_by_name(rag):
    before = rag.engine.library.shelf.store.nbytes
    summary = rag.add_texts({"metals/iron": "iron rusts " * 12}, progress=False)
    assert summary.added == 1
    (hit,) = rag.search("iron", 1, where={"source": "metals/iron"})
    assert "rusts" in hit.text
    assert hit.metadata == {}
    rag.delete("metals/iron")
    assert not rag.search("iron", 9, where={"source": "metals/iron"})
    assert rag.engine.library.shelf.store.nbytes < before


@pytest.mark.parametrize(
    "texts", [{"": "a text"}, {"empty": " \n"}, {"/faq": "a text"}, {"\ud800": "a text"}]
)
def test_texts_without_name_or_text_are_refused(rag, texts):
    count = len(rag.documents())
    with pytest.raises(DocumentError, match=r"cannot be called|leave it out"):
        rag.add_texts({"fine": "a fine text", **texts}, progress=False)
    assert len(rag.documents()) == count


def test_texts_and_folders_keep_out_of_each_others_names(rag, docs):
    rag.add_texts({"docs/faq": "a text of no file"}, progress=False)
    with pytest.raises(DocumentError, match="texts called docs"):
        rag.ingest(docs, progress=False, delete_missing=True)
    rag.ingest(docs, name="files", progress=False, delete_missing=True)
    with pytest.raises(DocumentError, match="cannot be called 'files/faq'"):
        rag.add_texts({"files/faq": "a text of no file"}, progress=False)
    assert "docs/faq" in [document.source for document in rag.documents()]


@pytest.mark.parametrize(
    "metadata",
    [
        {"source": "x"},
        {"tags": ["a"]},
        {"n": math.nan},
        {"n": 10**400},
        {"n": "\ud800"},
        {"\ud800": 1},
        ["n"],
    ],
)
def test_metadata_are_named_values(rag, metadata):
    with pytest.raises(ConfigError, match="metadata are"):
        rag.add_texts({"a": "text"}, metadata=metadata, progress=False)
