"""Formats, bad files, hostile files, splitting, and the index."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
from pypdf import PdfWriter
from pypdf.errors import DependencyError

from cached_rag import ConfigError
from cached_rag.cli.bench import CORPUS
from cached_rag.errors import DocumentError
from cached_rag.rag.chunks import Chunk, Splitter
from cached_rag.rag.document import Document, DocumentLimits
from cached_rag.rag.finding import look_at
from cached_rag.rag.index import DocumentIndex
from cached_rag.rag.readers import load_document

PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents 4 0 R
/Resources<</Font<</F1 5 0 R>>>>>>endobj
4 0 obj<</Length 47>>stream
BT /F1 12 Tf 20 100 Td (Copper turns green) Tj ET
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R>>
startxref
0
%%EOF
"""
FILES = {
    "a.txt": ("Copper turns green", "Copper turns green"),
    "b.md": ("# Copper\n\nIt *turns* [green](http://x.y).", "It turns green."),
    "c.rst": ("Copper\n======\n\nSee :pep:`8`. It ``turns`` green.", "See PEP 8. It turns green."),
    "d.html": ("<h1>Copper</h1><script>evil()</script><p>turns &amp; green</p>", "turns & green"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_becomes_its_text(tmp_path, name):
    source, expected = FILES[name]
    (tmp_path / name).write_text(source)
    document = load_document(tmp_path / name)
    assert expected in document.text
    assert document.title.startswith("Copper")
    assert "evil" not in document.text


def test_pdf_becomes_its_text(tmp_path, caplog):
    (tmp_path / "e.pdf").write_bytes(PDF)
    assert load_document(tmp_path / "e.pdf").text == "Copper turns green"


def test_old_encodings_are_recognised(tmp_path):
    text = "Der Leuchtturmwärter zündete jeden Abend die Lampe an, für über dreißig Jahre. " * 4
    (tmp_path / "l.txt").write_bytes(text.encode("cp1252"))
    assert load_document(tmp_path / "l.txt").text == text.strip()


POLISH = (
    "Spółka ogłosiła wczoraj wyniki: zyski spadły o trzy procent, a zarząd już wie, że sytuacja "
    "jest trudna."
)
LITHUANIAN = (
    "Įmonė vakar paskelbė rezultatus: pelnas sumažėjo trimis procentais, o vadovybė jau žino, kad "
    "padėtis sunki."
)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Où est la bibliothèque ? Près de l'hôtel de ville, au cœur du vieux Besançon."),
        ("cp1252", "A reunião de ontem não correu bem: as ações caíram três por cento."),
        ("cp1252", "På mødet blev det besluttet, at børnene får gratis frokost; lærerne tøver."),
        ("cp1252", "På måndagen började mötet om åtgärder, och många ställde frågor om lönerna."),
        ("cp1250", "Děkuji za zprávu, bohužel se k ní dostávám až dnes; přílohu jsem si přečetl."),
        ("cp1250", "A társaság közölte az eredményeket: a dolgozók dühösek, de őszintén bíznak."),
        ("cp1250", POLISH),
        ("cp1257", LITHUANIAN),
        ("cp1252", "Þetta er íslenskur texti: ég held að það sé gott veður í dag."),
        ("cp1252", "The relief valve opens at 20 °C, so keep it closed before the test begins."),
        ("cp1252", "Press “open”; 5 µm."),
    ],
)
def test_languages_of_one_alphabet_are_told_apart(tmp_path, encoding, text):
    (tmp_path / "l.txt").write_bytes(text.encode(encoding))
    assert load_document(tmp_path / "l.txt").text == text


GERMAN = "Die Prüfung der Ventile erfolgt jährlich. Für größere Anlagen gelten Übergangsregeln. "


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ((GERMAN * 20).encode() + "ü".encode()[:1], GERMAN * 20 + "\ufffd"),
        (GERMAN.encode() + b"\xe9" + GERMAN.encode(), GERMAN + "\ufffd" + GERMAN.strip()),
        (b"\xef\xbb\xbfplain \xe9 text", "plain \ufffd text"),
        (b"first one \0 second \0" * 9 + b"end", "first one  second " * 9 + "end"),
    ],
)
def test_a_bad_byte_costs_no_other_character(tmp_path, data, expected):
    (tmp_path / "l.txt").write_bytes(data)
    assert load_document(tmp_path / "l.txt").text == expected


OTHERS = {
    "koi8-r": "Проверка клапанов проводится ежегодно, для больших установок есть правила. ",
    "cp1251": "Проверка клапанов проводится ежегодно, для больших установок есть правила. ",
    "gb18030": "阀门每年检查一次。较大的设备适用过渡规则。请在检查之前关闭所有的水管和电源。",
    "iso2022_jp": "弁は毎年点検します。\n大きな設備には経過規定があります。\n\nsee HLIB ",
    "euc_kr": "밸브는 매년 점검합니다. 더 큰 설비에는 경과 규정이 적용되니 주의하십시오. ",
    "utf-16": GERMAN,
    "utf-16-le": "Проверка клапанов проводится ежегодно, для больших установок есть правила. ",
    "utf-16-be": "वाल्व की हर साल जाँच की जाती है, और बड़े संयंत्रों के लिए नियम हैं। ",
}


@pytest.mark.parametrize("encoding", OTHERS)
def test_other_encodings_are_not_taken_for_damaged_utf8(tmp_path, encoding):
    text = OTHERS[encoding] * 5
    (tmp_path / "l.txt").write_bytes(text.encode(encoding))
    assert load_document(tmp_path / "l.txt").text == text.strip()


@pytest.mark.parametrize(
    ("named", "encoding", "text"),
    [
        ('<meta charset="iso-8859-2">', "iso-8859-2", POLISH),
        ('<?xml version="1.0" encoding="iso-8859-15"?>', "iso-8859-15", "Preis: 5 €"),
        ('<?xml\tversion="1.0"\nencoding="iso-8859-15"?>', "iso-8859-15", "Preis: 5 €"),
        ('<meta content="text/html; charset=iso-8859-1">', "cp1252", "“Größe”"),
        ('<meta charset="iso-8859-1">', "utf-8", GERMAN.strip()),
        ('<meta charset="no-such">', "cp1252", "5 µm"),
    ],
)
def test_a_page_is_in_the_encoding_that_it_names(tmp_path, named, encoding, text):
    (tmp_path / "p.html").write_bytes(f"{named}<p>{text}</p>".encode(encoding))
    assert load_document(tmp_path / "p.html").text == text


def _encrypted(path):
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.encrypt("secret")
    writer.write(path)


BAD = {
    "empty.txt": (b"", "no text"),
    "blank.md": (b" \n\n ", "no text"),
    "broken.pdf": (b"%PDF-1.4 nonsense", "cannot be read|no text"),
    "binary.txt": (bytes(range(256)) * 20, "not text"),
    "table.xlsx": (b"PK", "cannot be read|no text"),
    "picture.png": (b"PNG", "no reader"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_say_what_is_wrong(tmp_path, name, caplog):
    data, reason = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DocumentError, match=reason):
        load_document(tmp_path / name)


def _lacking(*_):
    raise DependencyError("cryptography>=3.1 is required for AES algorithm")


def test_encrypted_and_huge_files_are_refused(tmp_path, monkeypatch):
    _encrypted(tmp_path / "x.pdf")
    with pytest.raises(DocumentError, match="password"):
        load_document(tmp_path / "x.pdf")
    monkeypatch.setattr("pypdf.PdfReader.decrypt", _lacking)
    with pytest.raises(DocumentError, match=r"pip install .*\[docs\]"):
        load_document(tmp_path / "x.pdf")
    (tmp_path / "y.txt").write_text("more than ten bytes")
    with pytest.raises(DocumentError, match="split the file"):
        load_document(tmp_path / "y.txt", DocumentLimits(max_document_bytes=10))


_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_O, _T = (f"urn:oasis:names:tc:opendocument:xmlns:{name}:1.0" for name in ("office", "text"))
# By suffix: a member of the archive, and what stands in it before and behind the text.
XML = {
    "docx": (
        "word/document.xml",
        f"<w:document xmlns:w='{_W}'><w:body><w:p><w:r><w:t>",
        "</w:t></w:r></w:p></w:body></w:document>",
    ),
    "odt": (
        "content.xml",
        f"<o:document xmlns:o='{_O}' xmlns:t='{_T}'><o:body><o:text><t:p>",
        "</t:p></o:text></o:body></o:document>",
    ),
}


def test_hostile_documents_reach_no_file_and_expand_nothing(tmp_path):
    (tmp_path / "secret.txt").write_text("TOP SECRET")
    hostile = {
        "a.rst": ".. include:: secret.txt\n\n.. raw:: html\n   :file: secret.txt\n\nharmless text",
        "b.html": "<!DOCTYPE x [<!ENTITY e SYSTEM 'secret.txt'>]><p>harmless text &e;</p>",
        "c.md": "harmless text ![x](secret.txt) <script src=secret.txt>TOP</script>",
    }
    for suffix, (member, before, behind) in XML.items():
        with zipfile.ZipFile(tmp_path / f"d.{suffix}", "w") as archive:
            declared = "<!DOCTYPE x [<!ENTITY t 'TOP'><!ENTITY e SYSTEM '../secret.txt'>]>"
            archive.writestr(member, f"{declared}{before}harmless text &t; &e;{behind}")
        assert load_document(tmp_path / f"d.{suffix}").text == "harmless text"
    for name, source in hostile.items():
        (tmp_path / name).write_text(source)
        text = load_document(tmp_path / name).text
        assert "harmless text" in text
        assert "SECRET" not in text
    bomb = "<!DOCTYPE l [<!ENTITY a 'lol'>" + "".join(
        f"<!ENTITY {chr(98 + i)} '{f'&{chr(97 + i)};' * 10}'>" for i in range(9)
    )
    (tmp_path / "bomb.html").write_text(bomb + "]><p>text &j;</p>")
    assert len(load_document(tmp_path / "bomb.html").text) < 5000


def test_folders_are_searched_and_hidden_files_are_not(tmp_path):
    for name in ("b.txt", "a.md", ".hidden.txt", "x.bin", "deep/c.rst", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = [str(p.relative_to(tmp_path)) for p in look_at(tmp_path).files]
    assert found == ["a.md", "b.txt", "deep/c.rst"]
    with pytest.raises(DocumentError, match="no file or folder"):
        look_at(tmp_path / "nowhere")


def test_what_no_reader_knows_is_counted_by_kind(tmp_path):
    for name in ("a.md", "x.bin", "deep/y.BIN", "z.png", "LICENSE", ".env", ".git/config.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = look_at(tmp_path)
    assert found.files == (tmp_path / "a.md",)
    assert found.passed_over[0] == (".bin", 2)
    assert sorted(found.passed_over) == [("", 1), (".bin", 2), (".png", 1)]
    assert (
        look_at(tmp_path / "x.bin").passed_over == ()
    )  # asked for by name: `load_document` says no


def test_the_demo_corpus_reads_cleanly():
    files = look_at(CORPUS).files
    assert len(files) == 60
    for file in files:
        document = load_document(file)
        assert document.text.startswith("PEP: ")
        assert not document.title.startswith("PEP:")
        for leak in ("system-message", "Unknown interpreted text role", ":pep:`"):
            assert leak not in document.text


def test_chunks_are_bounded_ordered_and_headed_by_the_title():
    text = "\n\n".join(f"Paragraph {i} says something about number {i}." for i in range(40))
    chunks = Splitter(lambda t: len(t.split()), 30).split(Document("s", "A title", text))
    bodies = [chunk.text.removeprefix("A title\n\n") for chunk in chunks]
    assert [chunk.ordinal for chunk in chunks] == list(range(len(chunks)))
    assert all(len(body.split()) <= 30 for body in bodies)
    assert "\n\n".join(bodies) == text
    with pytest.raises(ConfigError, match="chunk_tokens"):
        Splitter(len, 3)


# The index --------------------------------------------------------------------------------------


def vectors(*numbers):
    rows = np.eye(4, dtype=np.float32)
    return rows[list(numbers)]


def chunks(source, *texts):
    return [Chunk(source, "title", i, text) for i, text in enumerate(texts)]


@pytest.fixture
def index(tmp_path):
    with_files = DocumentIndex(tmp_path / "d.sqlite")
    yield with_files
    with_files.close()


def test_search_finds_the_nearest_and_other_connections_see_it(index, tmp_path):
    assert index.search(vectors(0)[0], 3) == []
    index.replace("a", "1", chunks("a", "zero", "one"), vectors(0, 1))
    other = DocumentIndex(tmp_path / "d.sqlite")
    assert [hit.text for hit in other.search(vectors(1)[0], 1)] == ["one"]
    index.replace("b", "1", chunks("b", "two"), vectors(2))
    assert other.search(vectors(2)[0], 1)[0].source == "b"
    assert len(other.search(vectors(2)[0], 99)) == 3
    only_a = other.search(vectors(2)[0], 1, where=lambda hit: hit.source == "a")
    assert only_a[0].source == "a"
    index.delete("b")
    assert other.search(vectors(2)[0], 1)[0].source == "a"
    other.close()


def test_of_chunks_that_are_equally_near_a_filter_misses_none(index):
    """FAISS may have others of one score first when it is asked for more."""
    many = [str(number) for number in range(300)]
    index.replace("a", "1", chunks("a", *many), vectors(*[0] * 300))
    for last in range(0, 300, 7):
        hits = index.search(vectors(0)[0], 1, where=lambda hit, name=str(last): hit.text == name)
        assert [hit.text for hit in hits] == [str(last)]


def test_replacing_gives_back_texts_that_nobody_has(index):
    assert index.replace("a", "1", chunks("a", "x", "y"), vectors(0, 1)) == []
    assert index.replace("b", "1", chunks("b", "y"), vectors(1)) == []
    assert index.replace("a", "2", chunks("a", "z"), vectors(2)) == ["x"]
    assert index.delete("b") == ["y"]
    assert index.digest("a") == "2"
    assert index.count() == (1, 1)


def test_documents_are_pending_until_marked(index):
    index.replace("a", "1", chunks("a", "x"), vectors(0))
    assert index.pending() == ["a"]
    index.mark_encoded("a")
    assert index.pending() == []


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("---\ntitle: 'Install guide'\ntags: [a, b]\n---\n\n# Linux\n\nRun it.\n", "Install guide"),
        ('+++\ntitle = "Install guide"\n+++\n# Linux\n\nRun it.\n', "Install guide"),
        (
            "---\n# a comment\ntitle: >\n  Install\n  guide\n...\n# Linux\n\nRun it.\n",
            "Install guide",
        ),
        ("---\r\ndate: 2026-01-01\r\n---\r\n# Linux\r\n\r\nRun it.\r\n", "Linux"),
    ],
)
def test_what_stands_before_markdown_is_no_heading(tmp_path, source, title):
    (tmp_path / "a.md").write_bytes(source.encode())
    document = load_document(tmp_path / "a.md")
    assert document.title == title
    assert "Run it." in document.text
    assert "2026-01-01" in document.text or "Install guide" in document.text
    headings = [str(known.get("heading", "")) for _, known in document.parts]
    assert "Linux" in headings
    assert not any("title" in heading or "date" in heading for heading in headings)


def test_footnotes_of_one_word_are_kept_and_links_are_named(tmp_path):
    (tmp_path / "a.md").write_text(
        "Rated 12 bar[^1], see [the list][2].\n\n[^1]: ISO-4126\n\n[2]: https://example.org\n\nEnd.\n"
    )
    text = load_document(tmp_path / "a.md").text
    assert "ISO-4126" in text
    assert "see the list." in text
    assert "example.org" not in text


def test_a_line_at_the_beginning_of_markdown_is_a_line(tmp_path):
    (tmp_path / "a.md").write_text("---\nCopper turns green.\n\n---\n\nRun it.\n")
    assert load_document(tmp_path / "a.md").text == "Copper turns green.\n\nRun it."
