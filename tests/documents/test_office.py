"""Office documents, tables, books and notebooks: read as text, and refused by name if broken."""

from __future__ import annotations

import json
import sys
import zipfile

import pytest

from cached_rag import DocumentError
from cached_rag.rag import office
from cached_rag.rag.finding import find_documents
from cached_rag.rag.readers import load_document

OFFICE = "http://schemas.openxmlformats.org"
TYPES = f'<Types xmlns="{OFFICE}/package/2006/content-types"><Default Extension="rels" \
ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml" \
ContentType="application/xml"/></Types>'


def rels(*targets):
    kinds = "".join(
        f'<Relationship Id="rId{number}" Type="{OFFICE}/officeDocument/2006/relationships/{kind}" '
        f'Target="{target}"/>'
        for number, (kind, target) in enumerate(targets, 1)
    )
    return f'<Relationships xmlns="{OFFICE}/package/2006/relationships">{kinds}</Relationships>'


def packed(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def write_docx(path, text="Copper turns green"):
    main = f"{OFFICE}/wordprocessingml/2006/main"
    body = f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p><w:p><w:r><w:t>in the air.</w:t></w:r></w:p>"
    document = f'<w:document xmlns:w="{main}"><w:body>{body}</w:body></w:document>'
    start = rels(("officeDocument", "word/document.xml"))
    packed(
        path, {"[Content_Types].xml": TYPES, "_rels/.rels": start, "word/document.xml": document}
    )


def write_xlsx(path):
    main, where = f"{OFFICE}/spreadsheetml/2006/main", f"{OFFICE}/officeDocument/2006/relationships"
    cells = [["metal", "colour"], ["copper", "green"]]
    rows = "".join(
        f'<row r="{r}">'
        + "".join(
            f'<c r="{c}{r}" t="inlineStr"><is><t>{value}</t></is></c>'
            for c, value in zip("AB", row, strict=True)
        )
        + "</row>"
        for r, row in enumerate(cells, 1)
    )
    book = f'<workbook xmlns="{main}" xmlns:r="{where}"><sheets>\
<sheet name="Metals" sheetId="1" r:id="rId1"/></sheets></workbook>'
    sheet = f'<worksheet xmlns="{main}"><sheetData>{rows}</sheetData></worksheet>'
    packed(
        path,
        {
            "[Content_Types].xml": TYPES,
            "_rels/.rels": rels(("officeDocument", "xl/workbook.xml")),
            "xl/workbook.xml": book,
            "xl/_rels/workbook.xml.rels": rels(("worksheet", "worksheets/sheet1.xml")),
            "xl/worksheets/sheet1.xml": sheet,
        },
    )


def write_epub(path):
    container = '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">\
<rootfiles><rootfile full-path="b.opf" media-type="application/oebps-package+xml"/></rootfiles>\
</container>'
    book = '<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="i">\
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>On Metals</dc:title>\
<dc:identifier id="i">x</dc:identifier><dc:language>en</dc:language></metadata>\
<manifest><item id="c" href="c.xhtml" media-type="application/xhtml+xml"/></manifest>\
<spine><itemref idref="c"/></spine></package>'
    page = (
        '<html xmlns="http://www.w3.org/1999/xhtml"><body><p>Copper turns green</p></body></html>'
    )
    packed(
        path,
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": container,
            "b.opf": book,
            "c.xhtml": page,
        },
    )


NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {},
    "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# On copper"]},
        {
            "cell_type": "code",
            "id": "b",
            "metadata": {},
            "execution_count": 1,
            "outputs": [],
            "source": ["print('Copper turns green')"],
        },
    ],
}
TEXTS = {
    ".csv": "metal,colour\ncopper,grün\n",
    ".json": json.dumps({"copper": "turns grün"}),
    ".ipynb": json.dumps(NOTEBOOK),
}
WRITERS = {
    "a.docx": write_docx,
    "b.xlsx": write_xlsx,
    "c.epub": write_epub,
    "d.csv": lambda path: path.write_text("metal,colour\ncopper,green\ntin,grey\n"),
    "e.json": lambda path: path.write_text(json.dumps({"copper": "turns green"})),
    "f.ipynb": lambda path: path.write_text(json.dumps(NOTEBOOK)),
    "g.rtf": lambda path: path.write_text(r"{\rtf1\ansi Copper turns green}"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_kind_becomes_text(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    text = load_document(path).text
    assert "copper" in text.lower()
    assert "green" in text
    assert find_documents(tmp_path) == [path]


@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "b.json", "c.ipynb"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    path, plain = tmp_path / name, tmp_path / f"plain.{name}"
    plain.write_text(TEXTS[path.suffix.lower()])
    path.write_text(TEXTS[path.suffix.lower()], encoding="utf-8-sig")
    assert load_document(path).text == load_document(plain).text
    assert "\ufeff" not in load_document(path).text


def test_a_books_title_is_its_own(tmp_path):
    write_epub(tmp_path / "a.epub")
    assert load_document(tmp_path / "a.epub").title == "On Metals"


@pytest.mark.parametrize("suffix", [".docx", ".xlsx", ".epub", ".pptx", ".odt", ".ipynb"])
@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 nonsense", b"{" * 100])
def test_a_broken_file_says_so(tmp_path, suffix, data):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    with pytest.raises(DocumentError, match="a" + suffix):
        load_document(path)


def test_entities_and_links_reach_nothing(tmp_path):
    (tmp_path / "secret.txt").write_text("TOP SECRET")
    path = tmp_path / "a.docx"
    write_docx(path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    entity = f'<!DOCTYPE x [<!ENTITY e SYSTEM "file://{tmp_path}/secret.txt">]>'
    document = files["word/document.xml"].replace("Copper", "Copper &e;")
    packed(path, files | {"word/document.xml": entity + document})
    try:
        text = load_document(path).text
    except DocumentError:
        return
    assert "SECRET" not in text


def test_a_small_archive_that_holds_a_large_document_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(office, "_MOST_BYTES", 1 << 20)
    write_docx(tmp_path / "a.docx", "green " * 500_000)
    assert (tmp_path / "a.docx").stat().st_size < 100_000
    with pytest.raises(DocumentError, match=r"a\.docx"):
        load_document(tmp_path / "a.docx")


def test_without_the_package_the_reason_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kreuzberg", None)
    write_docx(tmp_path / "a.docx")
    with pytest.raises(DocumentError, match=r"\[docs\]"):
        load_document(tmp_path / "a.docx")
