"""Office documents, tables, books and notebooks: read as text, and refused by name if broken."""

from __future__ import annotations

import json
import re
import sys
import zipfile

import pytest

from cached_rag.errors import DocumentError
from cached_rag.rag import office
from cached_rag.rag.finding import look_at
from cached_rag.rag.readers import LANGUAGES, READERS, load_document

OFFICE = "http://schemas.openxmlformats.org"
TYPES = f'<Types xmlns="{OFFICE}/package/2006/content-types"><Default Extension="rels" \
ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml" \
ContentType="application/xml"/></Types>'


BOOK = "application/vnd.openxmlformats-officedocument.spreadsheetml"
BOOK_TYPES = TYPES.replace(
    "</Types>",
    f'<Override PartName="/xl/workbook.xml" ContentType="{BOOK}.sheet.main+xml"/></Types>',
)


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


def write_docx(path, text="Copper turns green", title=""):
    main = f"{OFFICE}/wordprocessingml/2006/main"
    body = f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p><w:p><w:r><w:t>in the air.</w:t></w:r></w:p>"
    document = f'<w:document xmlns:w="{main}"><w:body>{body}</w:body></w:document>'
    start = rels(("officeDocument", "word/document.xml"))
    core = f'<cp:coreProperties xmlns:cp="{OFFICE}/package/2006/metadata/core-properties" \
xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></cp:coreProperties>'
    files = {"[Content_Types].xml": TYPES, "_rels/.rels": start, "word/document.xml": document}
    packed(path, files | ({"docProps/core.xml": core} if title else {}))


def write_pptx(path):
    main, where = (
        f"{OFFICE}/presentationml/2006/main",
        f"{OFFICE}/officeDocument/2006/relationships",
    )
    show = f'<p:presentation xmlns:p="{main}" xmlns:r="{where}"><p:sldIdLst>\
<p:sldId id="256" r:id="rId1"/></p:sldIdLst></p:presentation>'
    slide = f'<p:sld xmlns:p="{main}" xmlns:a="{OFFICE}/drawingml/2006/main"><p:cSld><p:spTree>\
<p:sp><p:txBody><a:p><a:r><a:t>Copper turns green</a:t></a:r></a:p></p:txBody></p:sp>\
</p:spTree></p:cSld></p:sld>'
    packed(
        path,
        {
            "[Content_Types].xml": TYPES,
            "_rels/.rels": rels(("officeDocument", "ppt/presentation.xml")),
            "ppt/presentation.xml": show,
            "ppt/_rels/presentation.xml.rels": rels(("slide", "slides/slide1.xml")),
            "ppt/slides/slide1.xml": slide,
        },
    )


def open_document(kind, body):
    names = "".join(
        f' xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
        for name in ("office", "text", "table")
    )
    content = f"<office:document-content{names}><office:body>{body}</office:body>\
</office:document-content>"
    mimetype = f"application/vnd.oasis.opendocument.{kind}"
    space = "urn:oasis:names:tc:opendocument:xmlns:manifest:1.0"
    manifest = f'<m:manifest xmlns:m="{space}"><m:file-entry m:full-path="/" \
m:media-type="{mimetype}"/></m:manifest>'
    files = {"mimetype": mimetype, "META-INF/manifest.xml": manifest, "content.xml": content}
    return lambda path: packed(path, files)


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
            "[Content_Types].xml": BOOK_TYPES,
            "_rels/.rels": rels(("officeDocument", "xl/workbook.xml")),
            "xl/workbook.xml": book,
            "xl/_rels/workbook.xml.rels": rels(("worksheet", "worksheets/sheet1.xml")),
            "xl/worksheets/sheet1.xml": sheet,
        },
    )


def write_epub(path, href="c.xhtml", name="c.xhtml"):
    container = '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">\
<rootfiles><rootfile full-path="b.opf" media-type="application/oebps-package+xml"/></rootfiles>\
</container>'
    book = f'<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="i">\
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>On Metals</dc:title>\
<dc:identifier id="i">x</dc:identifier><dc:language>en</dc:language></metadata>\
<manifest><item id="c" href="{href}" media-type="application/xhtml+xml"/></manifest>\
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
            name: page,
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
    ".json": json.dumps({"copper": "turns grün"}, ensure_ascii=False),
    ".ipynb": json.dumps(NOTEBOOK),
}
WRITERS = {
    "a.docx": write_docx,
    "b.xlsx": write_xlsx,
    "c.epub": write_epub,
    "e.json": lambda path: path.write_text(json.dumps({"copper": "turns green"})),
    "f.ipynb": lambda path: path.write_text(json.dumps(NOTEBOOK)),
    "g.rtf": lambda path: path.write_text(r"{\rtf1\ansi Copper turns green}"),
    "i.pptx": write_pptx,
    "j.odt": open_document(
        "text", "<office:text><text:p>Copper turns green</text:p></office:text>"
    ),
    "l.odp": open_document(
        "presentation",
        "<office:presentation><text:p>Copper turns green</text:p></office:presentation>",
    ),
    "k.ods": open_document(
        "spreadsheet",
        '<office:spreadsheet><table:table table:name="Metals"><table:table-row>\
<table:table-cell office:value-type="string"><text:p>Copper turns green</text:p>\
</table:table-cell></table:table-row></table:table></office:spreadsheet>',
    ),
}


def test_every_kind_that_is_no_plain_text_has_a_file_here():
    texts = {".txt", ".text", ".md", ".markdown", ".rst", ".html", ".htm", ".pdf", ".csv", ".tsv"}
    kinds = {f".{name.rpartition('.')[2]}" for name in WRITERS}
    assert kinds == set(READERS) - texts - set(LANGUAGES)


@pytest.mark.parametrize("name", WRITERS)
def test_each_kind_becomes_text(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    text = load_document(path).text
    assert "copper" in text.lower()
    assert "green" in text
    assert look_at(tmp_path).files == (path,)


def test_tabs_breaks_and_hyphens_of_word_stand_between_words(tmp_path):
    marks = "A<w:tab/>B<w:cr/>C<w:noBreakHyphen/>D"
    text = re.sub(r"(<w:\w+/>)", r"</w:t>\1<w:t>", marks)
    write_docx(tmp_path / "a.docx", text)
    assert load_document(tmp_path / "a.docx").text.split() == ["A", "B", "C-D", "in", "the", "air."]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])  # the latter as of PowerShell
@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "b.json", "c.ipynb"])
def test_a_byte_order_mark_is_no_text(tmp_path, name, encoding):
    path, plain = tmp_path / name, tmp_path / f"plain.{name}"
    plain.write_text(TEXTS[path.suffix.lower()])
    path.write_text(TEXTS[path.suffix.lower()], encoding=encoding)
    assert load_document(path).text == load_document(plain).text
    assert "\ufeff" not in load_document(path).text


def test_a_books_title_is_its_own(tmp_path):
    write_epub(tmp_path / "a.epub")
    assert load_document(tmp_path / "a.epub").title == "On Metals"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("staff.csv", "metal,colour\ncopper,green\n"),
        ("staff.TSV", "metal\tcolour\ncopper\tgreen\n"),
        ("staff.json", '[{"copper": "green"}, {"tin": "grey"}]'),
        ("staff.json", '{"copper": "green"}'),
    ],
)
def test_a_table_is_called_as_its_file(tmp_path, name, text):
    """Its first line, "Row 1:" or "[", says nothing, and stood before each of its chunks."""
    (tmp_path / name).write_text(text)
    assert load_document(tmp_path / name).title == name


def test_what_json_calls_itself_is_its_title(tmp_path):
    (tmp_path / "a.json").write_text('{"title": "On Metals", "copper": "green"}')
    assert load_document(tmp_path / "a.json").title == "On Metals"


ESCAPED = (
    "R&amp;D: &quot;p &lt; 5 &amp;&amp; q &gt; 3&quot;, it&apos;s &#8364;5, caf&#xe9; &amp;lt;"
)
READ = 'R&D: "p < 5 && q > 3", it\'s €5, café &lt;'


def test_references_are_characters(tmp_path):
    cell = f"{ESCAPED}</w:t></w:r></w:p><w:tbl><w:tr><w:tc><w:p><w:r><w:t>In a cell {ESCAPED}"
    ends = "</w:t></w:r></w:p></w:tc></w:tr></w:tbl><w:p><w:r><w:t>The end"
    write_docx(tmp_path / "a.docx", cell + ends, title="Black &amp; &lt;White&gt;")
    document = load_document(tmp_path / "a.docx")
    assert document.title == "Black & <White>"
    assert document.text.count(READ) == 2
    assert f"In a cell {READ}" in document.text


def test_no_reference_becomes_markup(tmp_path):
    own = "".join(map(chr, range(0xFDD0, 0xFDD5)))
    text = f"Copper{own}&#xFDD0;&#64976; &#60;/w:t&#x3e; turns"
    write_docx(tmp_path / "a.docx", f'{text}<w:x w:y="a&quot;&apos;&lt;&#34;b"/>')
    found = load_document(tmp_path / "a.docx").text
    assert found == f"Copper{own}\ufdd0\ufdd0 </w:t> turns\n\nin the air."


@pytest.mark.parametrize(
    ("href", "name"),
    [
        ("chapter%202.xhtml", "chapter 2.xhtml"),
        ("%C3%BCber%26%22.xhtml", 'über&".xhtml'),
        ("chapter%202.xhtml", "chapter%202.xhtml"),
    ],
)
def test_a_chapter_is_found_by_its_quoted_name(tmp_path, href, name):
    write_epub(tmp_path / "a.epub", href, name)
    assert "Copper turns green" in load_document(tmp_path / "a.epub").text


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


@pytest.mark.parametrize(("name", "package"), [("b.xlsx", "openpyxl"), ("e.json", "kreuzberg")])
def test_without_the_package_the_reason_names_the_extra(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    WRITERS[name](tmp_path / name)
    with pytest.raises(DocumentError, match=r"\[docs\]"):
        load_document(tmp_path / name)
