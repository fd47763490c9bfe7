"""What each construct of a document becomes, by format: the text that a reader of it sees."""

from __future__ import annotations

import json
import zipfile

import pytest
from test_documents import PDF
from test_office import (
    BOOK,
    BOOK_TYPES,
    NOTEBOOK,
    OFFICE,
    open_document,
    packed,
    rels,
    write_epub,
    write_pptx,
    write_xlsx,
)

from cached_rag.rag.document import searchable
from cached_rag.rag.readers import joined, load_document
from cached_rag.rag.tables import formatted

TABLE = "<table><tr><th>a<th>b<th>c</tr><tr><td>1<td><td>3</tr></table>"
LISTS = "<p>1. x<ol start=5><li>five<ol type=a><li>in<li>er</ol><li value=9>nine</ol>"
MATH = "<math><semantics><mrow><mi>x</mi><mo>=</mo><msqrt><mn>2</mn></msqrt></mrow>\
<annotation>x = sqrt 2</annotation></semantics></math>"
MARKUP = {
    # Lists
    "go-on.md": ("1. Close.\n\nThen:\n\n2. Turn.", "1. Close.\n\nThen:\n\n2. Turn."),
    "go-on.rst": ("1. Close.\n\nThen:\n\n2. Turn.", "1. Close.\n\nThen:\n\n2. Turn."),
    "letters.rst": ("c. Close.\nd. Turn.", "c. Close.\nd. Turn."),
    "nested.html": (LISTS, "1. x\n\n5. five\n  a. in\n  b. er\n9. nine"),
    "back.html": ("<ol reversed><li>c<li>b<li>a</ol>", "3. c\n2. b\n1. a"),
    "roman.html": ("<ol type=I start=4><li>c<li>b</ol>", "IV. c\nV. b"),
    "nested.md": ("- a\n  - b\n- c", "- a\n  - b\n- c"),
    "odd.html": ("<ol start=x><li value=1e9>a</ol><li>b", "1. a\n\n- b"),
    # Tables
    "table.html": (TABLE, "a | b | c\n1 | | 3"),
    "table.md": ("|a|b|c|\n|-|-|-|\n|1||3|", "a | b | c\n1 | | 3"),
    "table.rst": ("= = =\na b c\n= = =\n1 \\  3\n= = =", "a | b | c\n1 | | 3"),
    "blocks.html": ("<table><tr><td><p>a</p><p>b</p><td><ul><li>c<li>d</ul>", "a b | - c - d"),
    "inner.html": (
        f"<table><tr><td>x<td>y<tr><td>2<td>{TABLE}</table>",
        "x | y\n2\n\na | b | c\n1 | | 3",
    ),
    "first.html": ("<table><tr><td>1<td>2<tr><td><td>3</table>", "1 | 2\n| 3"),
    "empty.html": ("<table><tr><td><td></tr><tr><td>1<td>2</table>", "1 | 2"),
    # Blocks
    "dl.html": ("<dl><dt>Pressure</dt><dd>6</dd><dt>Limit<dd>80", "Pressure\n  6\nLimit\n  80"),
    "dl.rst": ("Pressure\n  6\n\nLimit\n  80", "Pressure\n  6\nLimit\n  80"),
    "details.html": ("<details><summary>V 3</summary>P 7</details>", "V 3\nP 7"),
    "rule.html": ("above<hr>below", "above\n\nbelow"),
    "rule.md": ("above\n\n---\n\nbelow", "above\n\nbelow"),
    "option.html": ("<select><option>Red<option>Blue</select>", "Red\nBlue"),
    "legend.html": ("<fieldset><legend>Leg</legend>Field</fieldset>", "Leg\nField"),
    "button.html": ("<button>A</button><button>B</button>", "A\nB"),
    "inline.html": ("<b>bold</b>face H<sub>2</sub>O 10<sup>6</sup>", "boldface H2O 10^6"),
    "equation.html": (
        "<math><mfrac><mn>1</mn><msup><mn>10</mn><mn>6</mn></msup></mfrac></math>",
        "1/10^6",
    ),
    "root.html": ("<math><mroot><mn>2</mn><mn>3</mn></mroot></math>", "2^1/3"),
    "katex.html": (
        f"<span class=katex><span class=katex-mathml>{MATH}</span>"
        "<span class=katex-html aria-hidden=true>x=2</span></span>",
        "x=\u221a2",
    ),
    "note.html": (
        "10<a role=doc-noteref><sup>1</sup></a> or 20<sup><a epub:type=noteref>2</a></sup>",
        "10[1] or 20[2]",
    ),
    "power.rst": ("10\\ :sup:`6`", "10^6"),
    "quote.html": ("a<blockquote>b</blockquote>c", "a\n\nb\n\nc"),
    "quote.md": ("a\n\n> b\n> c", "a\n\nb c"),
    "code.md": ("x\n\n```\na\n   b\n```", "x\n\na\n   b"),
    "code.rst": ("x::\n\n  a\n     b", "x:\n\na\n   b"),
    "heading.md": ("# A\n## B\ntext", "A\n\nB\n\ntext"),
    "note.rst": ("Text [1]_\n\n.. [1] Note.", "Text [1]\n\n[1]\n\nNote."),
    # What nobody sees
    "hidden.html": (
        "a<p hidden>X<p style='visibility: hidden'>X</p><i style=display:none>X</i>"
        "<ol><li hidden>X<li>b</ol><template>X</template>c<!-- X -->d",
        "a\n\n1. b\n\ncd",
    ),
    "soft.html": ("<p>pro&shy;cedure", "procedure"),
    "soft.txt": ("pro\u00ad\n  cedure", "procedure"),
    "ligature.txt": ("o\ufb03ce \ufb01t \ufb06", "office fit st"),
    "page.txt": ("last\ffirst", "last\nfirst"),
    # Values
    "one.csv": (
        "metal\ncopper, red\ntin\n",
        "Row 1:\n  metal: copper, red\n\nRow 2:\n  metal: tin",
    ),
    "more.csv": ("a;b\n1;2;3\n", "Row 1:\n  a: 1\n  b: 2\n  3"),
    "none.csv": ("a,b,c\n1,,3\n", "b\n\nRow 1:\n  a: 1\n  c: 3"),
}


def paragraph(text, number="", level=0, style="", more=""):
    listed = f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>'
    said = f'<w:pStyle w:val="{style}"/>' + listed * bool(number)
    run = f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'
    return f"<w:p>\n<w:pPr>{said}</w:pPr>\n{run}\n{more}</w:p>"


def word_table(*rows):
    cells = ("".join(f"<w:tc>{cell}</w:tc>" for cell in row) for row in rows)
    return "<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in cells) + "</w:tbl>"


def level(number, kind, text, start=1):
    return f'<w:lvl w:ilvl="{number}"><w:start w:val="{start}"/><w:numFmt w:val="{kind}"/>\
<w:lvlText w:val="{text}"/></w:lvl>'


LEVELS = level(0, "decimal", "%1.") + level(1, "lowerLetter", "%1.%2)")
NUMBERING = (
    f'<w:abstractNum w:abstractNumId="0">{LEVELS}</w:abstractNum>'
    f'<w:abstractNum w:abstractNumId="1">{level(0, "bullet", "x")}{level(1, "bullet", " ")}'
    "</w:abstractNum>"
    '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    '<w:num w:numId="2"><w:abstractNumId w:val="1"/></w:num>'
    '<w:num w:numId="3"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0">'
    '<w:startOverride w:val="7"/></w:lvlOverride></w:num>'
)
STYLES = '<w:style w:styleId="H"><w:name w:val="heading 1"/></w:style>\
<w:style w:styleId="L"><w:name w:val="Steps"/><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr>\
</w:pPr></w:style><w:style w:styleId="X"><w:rPr><w:vanish/></w:rPr></w:style>\
<w:style w:styleId="Y"><w:basedOn w:val="X"/></w:style>'
WORD = {
    "go-on": (
        paragraph("Close.", 1) + paragraph("Then:") + paragraph("Turn.", style="L"),
        "1. Close.\n\nThen:\n\n2. Turn.",
    ),
    "nested": (
        paragraph("a", 1) + paragraph("b", 1, 1) + paragraph("c", 1) + paragraph("d", 1, 1),
        "1. a\n1.a) b\n2. c\n2.a) d",
    ),
    "begun": (paragraph("a", 3) + paragraph("b", 3) + paragraph("c", 2), "7. a\n8. b\n- c"),
    "unmarked": (paragraph("a", 2) + paragraph("b", 2, 1), "- a\n\nb"),
    "heading": (paragraph("A", style="H") + paragraph("text"), "A\n\ntext"),
    "table": (
        word_table(
            [paragraph("a"), paragraph("b"), paragraph("c")],
            [paragraph("1"), paragraph(""), paragraph("3") + paragraph("x")],
        ),
        "a | b | c\n1 | | 3 x",
    ),
    "rows": (
        word_table([paragraph("a"), paragraph("b")], [paragraph("1"), paragraph("2")]).replace(
            "<w:tr>", "<w:tr><w:trPr><w:tblHeader/></w:trPr>"
        ),
        "a | b\n1 | 2",
    ),
    "symbol": (
        paragraph("5 ", more='<w:r><w:sym w:font="Symbol" w:char="F06D"/><w:t>m</w:t></w:r>'),
        "5 \u03bcm",
    ),
    "form": (
        word_table([paragraph("1"), paragraph("2")])
        .replace("<w:tc>", "<w:sdt><w:sdtContent><w:tc>")
        .replace("</w:tc>", "</w:tc></w:sdtContent></w:sdt>"),
        "1 | 2",
    ),
    "power": (
        paragraph(
            "10",
            more='<w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>6</w:t></w:r>',
        ),
        "10^6",
    ),
    "equation": (
        "<w:p><m:f><m:num><m:r><m:t>10</m:t></m:r></m:num><m:den><m:sSup><m:e><m:r><m:t>2</m:t>"
        "</m:r></m:e><m:sup><m:r><m:t>6</m:t></m:r></m:sup></m:sSup></m:den></m:f></w:p>".replace(
            "m:", "w:"
        ),
        "10/2^6",
    ),
    "root": (
        "<w:p><w:rad><w:deg><w:r><w:t>3</w:t></w:r></w:deg><w:e><w:r><w:t>2</w:t></w:r></w:e>"
        "</w:rad><w:rad><w:deg/><w:e><w:r><w:t>5</w:t></w:r></w:e></w:rad></w:p>",
        "3\u221a2\u221a5",
    ),
    "inner": (word_table([word_table([paragraph("3"), paragraph("5")])]), "3 | 5"),
    "note": (
        paragraph("Text", more='<w:r><w:footnoteReference w:id="2"/></w:r>'),
        "Text[1]\n\n[1]\nThe note.",
    ),
    "page": (paragraph("a", more='<w:r><w:br w:type="page"/></w:r>') + paragraph("b"), "a\n\nb"),
    "hidden": (
        paragraph(
            "a",
            more="<w:r><w:rPr><w:vanish/></w:rPr><w:t>X</w:t></w:r><w:del><w:r><w:delText>X"
            "</w:delText></w:r></w:del><w:moveFrom><w:r><w:t>X</w:t></w:r></w:moveFrom>",
        ),
        "a",
    ),
    "styled": (
        paragraph(
            "a",
            more='<w:r><w:rPr><w:rStyle w:val="Y"/></w:rPr><w:t>X</w:t></w:r>'
            '<w:r><w:rPr><w:rStyle w:val="Y"/><w:vanish w:val="0"/></w:rPr><w:t>b</w:t></w:r>',
        )
        + paragraph("X", style="Y"),
        "ab",
    ),
    "run": (
        paragraph("pro", more="<w:r><w:t>cedure &lt; 5 &amp; *b*</w:t></w:r>"),
        "procedure < 5 & *b*",
    ),
}


def write_word(path, body):
    space = f'xmlns:w="{OFFICE}/wordprocessingml/2006/main"'
    note = '<w:footnote w:id="2"><w:p><w:r><w:t>The note.</w:t></w:r></w:p></w:footnote>'
    names = [(name, f"{name}.xml") for name in ("numbering", "styles", "footnotes")]
    files = {
        "_rels/.rels": rels(("officeDocument", "word/document.xml")),
        "word/_rels/document.xml.rels": rels(*names),
        "word/document.xml": f"<w:document {space}><w:body>{body}</w:body></w:document>",
        "word/numbering.xml": f"<w:numbering {space}>{NUMBERING}</w:numbering>",
        "word/styles.xml": f"<w:styles {space}>{STYLES}</w:styles>",
        "word/footnotes.xml": f"<w:footnotes {space}>{note}</w:footnotes>",
    }
    packed(path, files)


def changed(path, name, change):
    """An archive with one member changed."""
    with zipfile.ZipFile(path) as archive:
        files = {one: archive.read(one).decode() for one in archive.namelist()}
    packed(path, files | {name: change(files.get(name, ""))})


def write_sheet(path, cells, formats):
    write_xlsx(path)
    space = f'xmlns="{OFFICE}/spreadsheetml/2006/main"'
    sheet = f"<worksheet {space}><sheetData>{cells}</sheetData></worksheet>"
    changed(path, "xl/worksheets/sheet1.xml", lambda _: sheet)
    codes = "".join(f'<xf numFmtId="{one}" fontId="0"/>' for one in formats)
    fill = "<fills><fill><patternFill/></fill></fills>"
    parts = f"<fonts><font/></fonts>{fill}<borders><border/></borders>"
    styles = f"<styleSheet {space}>{parts}<cellStyleXfs><xf/></cellStyleXfs>\
<cellXfs>{codes}</cellXfs></styleSheet>"
    changed(path, "xl/styles.xml", lambda _: styles)
    both = rels(("worksheet", "worksheets/sheet1.xml"), ("styles", "styles.xml"))
    changed(path, "xl/_rels/workbook.xml.rels", lambda _: both)
    kind = f'<Override PartName="/xl/styles.xml" ContentType="{BOOK}.styles+xml"/></Types>'
    changed(path, "[Content_Types].xml", lambda _: BOOK_TYPES.replace("</Types>", kind))


def write_book(path, body):
    write_epub(path)
    page = f'<html xmlns="http://www.w3.org/1999/xhtml"><body>{body}</body></html>'
    changed(path, "c.xhtml", lambda _: page)


def write_slide(path, shapes):
    write_pptx(path)
    spaces = f'xmlns:p="{OFFICE}/presentationml/2006/main" xmlns:a="{OFFICE}/drawingml/2006/main"'
    slide = f"<p:sld {spaces}><p:cSld><p:spTree>{shapes}</p:spTree></p:cSld></p:sld>"
    changed(path, "ppt/slides/slide1.xml", lambda _: slide)


def slide_line(text, properties=""):
    return f"<a:p><a:pPr>{properties}</a:pPr><a:r><a:t>{text}</a:t></a:r></a:p>"


def shape(*lines, place=""):
    kind = f'<p:nvSpPr><p:nvPr><p:ph type="{place}"/></p:nvPr></p:nvSpPr>'
    return f"<p:sp>{kind * bool(place)}<p:txBody>{''.join(lines)}</p:txBody></p:sp>"


NUMBER = '<a:buAutoNum type="arabicPeriod" startAt="5"/>'
SLIDE_TABLE = "<a:tbl><a:tr>" + "".join(
    f"<a:tc><a:txBody>{slide_line(cell)}</a:txBody></a:tc>" for cell in ("1", "", "3")
)
SLIDE = (
    shape(slide_line("Title"), place="title")
    + shape(slide_line("Close", NUMBER), slide_line("Turn", NUMBER), slide_line("x", "<a:buChar/>"))
    + shape("<a:p><a:r><a:t>10</a:t></a:r><a:r><a:rPr baseline='30000'/><a:t>6</a:t></a:r></a:p>")
    + f"<p:graphicFrame>{SLIDE_TABLE}</a:tr></a:tbl></p:graphicFrame>"
    + '<p:sp><p:nvSpPr><p:cNvPr hidden="1"/></p:nvSpPr>'
    + f"<p:txBody>{slide_line('X')}</p:txBody></p:sp>"
)
CELLS = '<row r="1"><c r="A1" t="inlineStr"><is><t>share</t></is></c><c r="B1" t="inlineStr"><is>\
<t>day</t></is></c><c r="C1" t="inlineStr"><is><t>price</t></is></c></row><row r="2"><c r="A2" \
s="1"><v>0.125</v></c><c r="B2" s="2"><v>45000</v></c><c r="C2" s="3"><v>1234567.5</v></c></row>\
<row r="3"><c r="A3" s="1"><v>0.5</v></c><c r="D3"><v>7</v></c></row>'
SHEET = "Metals\n\nRow 1:\n  share: 12.50%\n  day: 2023-03-15\n  price: 1,234,567.50\n\n\
Row 2:\n  share: 50.00%\n  7"
ITEM = "<text:list-item><text:p>{}</text:p></text:list-item>"
ODT = (
    "<office:text><text:h text:outline-level='1'>Head</text:h>"
    f"<text:list text:style-name='N'>{ITEM.format('Close')}</text:list><text:p>mid</text:p>"
    f"<text:list text:style-name='N' text:continue-numbering='true'>{ITEM.format('Turn')}"
    "</text:list><table:table><table:table-row><table:table-cell><text:p>1</text:p>"
    "</table:table-cell><table:table-cell/><table:table-cell><text:p>3</text:p>"
    "</table:table-cell></table:table-row></table:table><text:p>a<text:s text:c='3'/>b"
    "<text:line-break/>c</text:p><text:p>d<text:note><text:note-citation>1</text:note-citation>"
    "<text:note-body><text:p>Note.</text:p></text:note-body></text:note></text:p>"
    "<text:section text:display='none'><text:p>X</text:p></text:section>"
    "<text:p>X<text:hidden-paragraph text:is-hidden='true'/></text:p>"
    "<text:p>e<text:hidden-paragraph text:is-hidden='false'/></text:p>"
    "<text:p text:style-name='Y'>X</text:p><text:p text:style-name='Z'>10<text:span "
    "text:style-name='R'>6</text:span></text:p></office:text>"
)
SPACES = "".join(
    f" xmlns:{name}='urn:oasis:names:tc:opendocument:xmlns:{name}:1.0'"
    for name in ("style", "presentation", "drawing")
)
STYLED = (
    f"<office:automatic-styles{SPACES}><text:list-style style:name='N'>"
    "<text:list-level-style-number text:level='1' style:num-format='1'/></text:list-style>"
    "<style:style style:name='X'><style:text-properties text:display='none'/></style:style>"
    "<style:style style:name='Y' style:parent-style-name='X'/>"
    "<style:style style:name='Z' style:parent-style-name='X'><style:text-properties "
    "text:display='true'/></style:style><style:style style:name='S'><style:drawing-page-properties "
    "presentation:visibility='hidden'/></style:style><style:style style:name='R'>"
    "<style:text-properties style:text-position='super 58%'/></style:style>"
    "</office:automatic-styles>"
)
SLIDES = (
    f"<office:presentation{SPACES}><drawing:page><text:p>a</text:p></drawing:page>"
    "<drawing:page drawing:style-name='S'><text:p>X</text:p></drawing:page></office:presentation>"
)
ODS = (
    "<office:spreadsheet><table:table table:name='M'><table:table-row><table:table-cell>"
    "<text:p>a</text:p></table:table-cell><table:table-cell><text:p>b</text:p></table:table-cell>"
    "</table:table-row><table:table-row><table:table-cell table:number-columns-repeated='1'/>"
    "<table:table-cell><text:p>12.5%<text:tab/>x<text:s text:c='2'/>y<text:line-break/>z</text:p>"
    "</table:table-cell></table:table-row></table:table>"
    "</office:spreadsheet>"
)


def write_styled(path, kind, body):
    open_document(kind, body)(path)
    before = "<office:body>"
    changed(path, "content.xml", lambda text: text.replace(before, STYLED + before))


def write_equation(path):
    """One that is an object of its own, beside a chart."""
    links = ("./Object 1", "Object 2", "../gone")
    frames = "".join(f"<d:object xmlns:x='x' x:href='{link}'/>" for link in links)
    said = f"<text:p xmlns:d='draw'>With {frames} it holds.</text:p>"
    open_document("text", f"<office:text>{said}</office:text>")(path)
    space = "<math xmlns='http://www.w3.org/1998/Math/MathML'>"
    changed(path, "Object 1/content.xml", lambda _: MATH.replace("<math>", space))
    changed(path, "Object 2/content.xml", lambda _: "<chart>X</chart>")


def write_notebook(path):
    cells = [
        {"cell_type": "markdown", "source": ["5. Close\n", "6. Turn\n"]},
        {"cell_type": "code", "source": "f(\n  1)", "outputs": [{"text": ["x\n", "y"]}]},
        {"cell_type": "code", "source": "2", "outputs": [{"data": {"text/plain": "2.0"}}]},
    ]
    path.write_text(json.dumps(NOTEBOOK | {"cells": cells}))


PAGE = "<ol start='5'><li>Close</li></ol><dl><dt>P</dt><dd>6</dd></dl>\
<table><tr><td>1</td><td/><td>3</td></tr></table><p hidden='hidden'>X</p><pre>a\n  b</pre>"
ARCHIVES = {
    "a.epub": (
        lambda path: write_book(path, PAGE),
        "Title: On Metals\n\n5. Close\n\nP\n  6\n\n1 | | 3\n\na\n  b",
    ),
    "a.pptx": (
        lambda path: write_slide(path, SLIDE),
        "Title\n\n5. Close\n6. Turn\n- x\n10^6\n\n1 | | 3",
    ),
    "a.xlsx": (lambda path: write_sheet(path, CELLS, (0, 10, 14, 4)), SHEET),
    "a.odt": (
        lambda path: write_styled(path, "text", ODT),
        "Head\n\n1. Close\n\nmid\n\n2. Turn\n\n1 | | 3\n\na b\nc\n\nd [1]\n\nNote.\n\ne\n\n10^6",
    ),
    "equation.odt": (write_equation, "With x=\u221a2 it holds."),
    "a.odp": (lambda path: write_styled(path, "presentation", SLIDES), "a"),
    "a.ods": (open_document("spreadsheet", ODS), "M\n\na\n\nRow 1:\n  b: 12.5% x y z"),
    "a.ipynb": (write_notebook, "5. Close\n6. Turn\n\nf(\n  1)\n\nx\ny\n\n2\n\n2.0"),
}


def written(text):
    return lambda path: path.write_text(text, encoding="utf-8")


def in_word(body):
    return lambda path: write_word(path, body)


CONSTRUCTS = {
    **{name: (written(source), wanted) for name, (source, wanted) in MARKUP.items()},
    **{f"{name}.docx": (in_word(body), wanted) for name, (body, wanted) in WORD.items()},
    **ARCHIVES,
}


def test_values_behind_many_empty_cells_stand_under_their_columns(tmp_path):
    def cell(said, count=1):
        repeated = f"table:number-columns-repeated='{count}'"
        return f"<table:table-cell {repeated}><text:p>{said}</text:p></table:table-cell>"

    names = "".join(cell(f"col{n}") for n in range(80))
    row = cell("one") + cell("", 69) + cell("two") + cell("", 16_313)
    rows = "".join(f"<table:table-row>{cells}</table:table-row>" for cells in (names, row))
    table = f"<table:table>{rows}</table:table>"
    write = open_document("spreadsheet", f"<office:spreadsheet>{table}</office:spreadsheet>")
    write(tmp_path / "a.ods")
    found = load_document(tmp_path / "a.ods").text
    assert found.endswith("Row 1:\n  col0: one\n  col70: two")


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_each_construct_becomes_the_text_that_a_reader_sees(tmp_path, name):
    write, wanted = CONSTRUCTS[name]
    write(tmp_path / name)
    assert load_document(tmp_path / name).text == wanted


@pytest.mark.parametrize(
    ("number", "code", "wanted"),
    [
        (0.125, "0%", "13%"),
        (-5, "#,##0;(#,##0)", "(5)"),
        (-1234.5, '#,##0.00" kg"', "-1,234.50 kg"),
        (2.0, "0.0##", "2.0"),
        (2.25, "0.0##", "2.25"),
        (3, "0.##", "3"),
        (1500, "#,###", "1,500"),
        (42, "00000", "00042"),
        (5, "[$€-407] #,##0", "€ 5"),
        (1234567, '0.0,,"M"', "1234567"),
        (5551234, "###-####", "555-1234"),
        (123456789, "000-00-0000", "123-45-6789"),
        (12345678, "000\\-00\\-0000", "012-34-5678"),
        (2125551234, "[<=9999999]###-####;(###) ###-####", "(212) 555-1234"),
        (5, "[>=100]0;[<100]0.0", "5.0"),
        (-5, '[<0]"("0")";0', "(5)"),
        (0, '0.00;-0.00;"-"', "-"),
        (0, '_-* #,##0.00_-;\\-* #,##0.00_-;_-* "-"??_-;_-@_-', "-"),
        (0.5, ".00", ".50"),
        (5, '"A1-0"0', "A1-05"),
        (5, '0" ;x"', "5"),
        (0.1 + 0.2, "General", "0.3"),
        (1.5, "# ?/?", "1.5"),
        (12.5, '0.0"%"', "12.5%"),
        (-0.5, "0%;[Red](0%)", "(50%)"),
    ],
)
def test_numbers_are_as_a_sheet_shows_them(number, code, wanted):
    assert formatted(number, code) == wanted


@pytest.mark.parametrize(
    ("page", "wanted"),
    [
        ("The pro-\ncedure", "The procedure"),
        ("known as well, a well-\nknown valve", "known as well, a well-known valve"),
        ("as is known-good and known-\ngood", "as is known-good and known-good"),
        ("pressure, relief: a pressure-\nrelief", "pressure, relief: a pressure-relief"),
        ("part V-\n10, 2-\n3", "part V-10, 2-3"),
        ("low-\nand high", "low- and high"),
        ("a list\n- of\n- two", "a list\n- of\n- two"),
    ],
)
def test_words_that_a_line_end_divides_are_whole(page, wanted):
    assert joined([page]) == [wanted]


def test_search_does_not_see_what_nobody_sees():
    assert searchable("re\u00adlief\u200b va\u2060lve o\ufb03ce") == "relief valve office"


def test_a_pdf_has_letters_for_ligatures_and_whole_words(tmp_path):
    """Glyphs of several letters, and words cut at line ends; a hyphen that words have stays."""
    lines = [rb"The o\002ce has a pro-", b"cedure that is well-", rb"known. A well-known \001le."]
    shown = b"14 TL " + b" ".join(b"(%s) Tj T*" % line for line in lines)
    named = b"/Encoding<</Type/Encoding/Differences[1/fi/ffi]>>"
    data = PDF.replace(b"(Copper turns green) Tj", shown).replace(
        b"/Helvetica", b"/Helvetica" + named
    )
    (tmp_path / "a.pdf").write_bytes(data.replace(b"/Length 47", b"/Length %d" % (30 + len(shown))))
    expected = "The office has a procedure that is well-known. A well-known file."
    assert load_document(tmp_path / "a.pdf").text == expected
