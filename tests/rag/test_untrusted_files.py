"""Files that are swapped, endless, nested or oddly named while a folder is looked at and read."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from cached_rag.errors import DocumentError
from cached_rag.rag import document, reading_process
from cached_rag.rag.document import DocumentLimits, limited, shown
from cached_rag.rag.finding import look_at
from cached_rag.rag.readers import load_document
from cached_rag.rag.reading_process import ConfinedReader, trusted_path
from cached_rag.rag.tables import table_parts

SECRET = "KEEP-THIS-TO-YOURSELF"
FEW = DocumentLimits(max_characters=50_000)


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.txt").write_text("The valve is red.")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.txt").write_text(SECRET)
    (folder / ".env").write_text(SECRET)
    return folder


def _file_outside(docs):
    (docs / "deep" / "a.txt").unlink()
    (docs / "deep" / "a.txt").symlink_to(docs.parent / "outside" / "a.txt")


def _folder_outside(docs):
    (docs / "deep").rename(docs / "aside")
    (docs / "deep").symlink_to(docs.parent / "outside")


def _hidden_file(docs):
    (docs / "deep" / "a.txt").unlink()
    (docs / "deep" / "a.txt").symlink_to(docs / ".env")


def _process(docs):
    (docs / "deep" / "a.txt").unlink()
    (docs / "deep" / "a.txt").symlink_to("/proc/self/environ")


def _pipe(docs):
    (docs / "deep" / "a.txt").unlink()
    os.mkfifo(docs / "deep" / "a.txt")


SWAPS = [_file_outside, _folder_outside, _hidden_file, _process, _pipe]


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize("swap", SWAPS)
def test_what_is_swapped_after_it_was_found_is_not_read(docs, swap):
    with ConfinedReader(DocumentLimits(), docs) as reader:
        [file] = look_at(docs).files
        assert reader.load(file).text == "The valve is red."
        swap(docs)
        with pytest.raises(DocumentError, match=r"leads out of|is no file|cannot be read"):
            reader.load(file)


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize("has_descriptors", [True, False])
@pytest.mark.parametrize("swap", SWAPS)
def test_what_is_swapped_between_check_and_opening_is_not_read(
    docs, swap, monkeypatch, has_descriptors
):
    file, inside, resolve, swapped = docs / "deep" / "a.txt", docs.resolve(), Path.resolve, []

    def resolve_and_swap(path, strict=False):
        found = resolve(path, strict)
        if path == file and not swapped:
            swapped.append(swap(docs))
        return found

    monkeypatch.setattr(Path, "resolve", resolve_and_swap)
    if not has_descriptors:
        monkeypatch.setattr(os, "supports_dir_fd", set())
    with pytest.raises(DocumentError):
        load_document(file, inside=inside)
    assert swapped


def test_a_file_is_not_read_beyond_its_limit_if_it_grows(docs, monkeypatch):
    file = docs / "deep" / "a.txt"
    monkeypatch.setattr(document.stat, "S_ISREG", lambda _: file.write_text("x" * 1000) > 0)
    with pytest.raises(DocumentError, match="exceed 100;"):
        load_document(file, DocumentLimits(max_document_bytes=100))


def test_the_reading_process_knows_no_secret(docs, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_SIGNING_KEY", SECRET)
    with ConfinedReader(DocumentLimits(), docs) as reader:
        reader.load(docs / "deep" / "a.txt")
        known = psutil.Process(reader._process.pid).environ()
        copies = Path(known["TMPDIR"])
        assert copies.is_dir()
    assert SECRET not in known.values()
    assert not copies.exists()


@pytest.mark.parametrize("spelled", ["", ".", "{docs}", "{docs}/deep", "deep", "{docs}/.."])
def test_no_entry_of_the_path_leads_to_documents(docs, monkeypatch, spelled):
    monkeypatch.chdir(docs)
    for folder in (docs, docs / "deep"):
        for name in ("markdown_it", "lxml", "kreuzberg", "docutils", "cached_rag", "json"):
            (folder / f"{name}.py").write_text(f"open({str(docs / 'ran')!r}, 'w')")
    (docs / "a.md").write_text("The valve is red.")
    monkeypatch.setattr(sys, "path", [spelled.format(docs=docs), *sys.path])
    with ConfinedReader(DocumentLimits(), docs) as reader:
        assert reader.load(docs / "a.md").text == "The valve is red."
    assert not (docs / "ran").exists()
    assert not any(Path(entry).is_relative_to(docs) for entry in trusted_path(docs))


def test_an_interpreter_that_lies_among_the_documents_still_reads(docs, monkeypatch):
    packages = docs / "venv" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr("site.getsitepackages", lambda: [str(packages)])
    monkeypatch.setattr(sys, "path", [str(packages), str(docs)])
    assert trusted_path(docs) == [str(packages)]


# Long texts --------------------------------------------------------------------------------------


def pdf(pages, words):
    said = b"BT /F1 12 Tf 20 100 Td (" + b"hello " * words + b") Tj ET"
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[" + b"3 0 R " * pages + b"]/Count %d>>" % pages,
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R/Resources"
        b"<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(said), said),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    data, table = b"%PDF-1.4\n", b"xref\n0 6\n0000000000 65535 f \n"
    for number, one in enumerate(objects, 1):
        table += b"%010d 00000 n \n" % len(data)
        data += b"%d 0 obj%sendobj\n" % (number, one)
    end = b"trailer<</Root 1 0 R/Size 6>>\nstartxref\n%d\n%%%%EOF" % len(data)
    return data + table + end


def epub(times, words):
    """A book whose one chapter stands in its list so many times."""
    items = '<itemref idref="a"/>' * times
    files = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": (
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0">'
            '<rootfiles><rootfile full-path="c.opf" media-type="application/oebps-package+xml"/>'
            "</rootfiles></container>"
        ),
        "c.opf": (
            '<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="i">'
            '<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>T</dc:title>'
            '<dc:identifier id="i">x</dc:identifier><dc:language>en</dc:language></metadata>'
            '<manifest><item id="a" href="a.xhtml" media-type="application/xhtml+xml"/>'
            f"</manifest><spine>{items}</spine></package>"
        ),
        "a.xhtml": (
            '<html xmlns="http://www.w3.org/1999/xhtml"><head><title>t</title></head>'
            f"<body><p>{'word ' * words}</p></body></html>"
        ),
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made.getvalue()


BOMBS = {
    "a.csv": f"a,{'n' * 1000}\n" + "1,2\n" * 1000,
    "a.tsv": f"a\t{'n' * 1000}\n" + "1\t2\n" * 1000,
    "a.pdf": pdf(100, 200),
    "a.epub": epub(1, 20_000),
    "headings.md": "# " + "h" * 90 + "".join(f"\n\n## {n} {'h' * 80}\n\nt" for n in range(500)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_of_a_very_long_text_is_refused_and_the_next_one_read(docs, name):
    data = BOMBS[name]
    (docs / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert (docs / name).stat().st_size < 60_000
    with ConfinedReader(FEW, docs) as reader:
        with pytest.raises(DocumentError, match="more than 50000 characters") as refused:
            reader.load(docs / name)
        assert str(refused.value).startswith(str(docs / name))
        assert reader.load(docs / "deep" / "a.txt").text == "The valve is red."


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.md", f"| {'n' * 1000} | b |\n|---|---|\n" + "| a | b |\n" * 1000),
        ("a.html", f"<table><tr><td>{'n' * 1000}<td>b</tr>{'<tr><td>a<td>b</tr>' * 999}</table>"),
        (
            "a.rst",
            f".. list-table::\n\n   * - {'x' * 999}\n     - b\n" + "   * - a\n     - b\n" * 99,
        ),
        ("a.epub", epub(100, 200)),  # its one chapter counts once
    ],
)
def test_markup_makes_no_text_longer_than_itself(docs, name, data):
    (docs / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert len(load_document(docs / name).text) <= max(len(data), 2000)


def test_a_table_is_not_written_out_beyond_the_limit():
    rows = [f"a,{'n' * 1000}", *("1,2" for _ in range(1000))]
    parts = limited(table_parts("\n".join(rows)), 5000)
    assert len(list(itertools.islice(parts, 5))) == 5
    with pytest.raises(DocumentError, match="more than 5000 characters"):
        next(parts)


def test_a_reader_that_dies_costs_its_document_alone(docs, monkeypatch):
    with ConfinedReader(FEW, docs) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(
                reading_process, "_CODE", "import os, sys; sys.stdin.readline(); os._exit(3)"
            )
            with pytest.raises(DocumentError, match=r"what reads it has died \(3\)"):
                reader.load(docs / "deep" / "a.txt")
        assert reader.load(docs / "deep" / "a.txt").text == "The valve is red."


def test_no_answer_without_end_is_read(docs, monkeypatch):
    endless = "import sys\nsys.stdin.readline()\nwhile True: sys.stdout.write('x' * 65536)"
    monkeypatch.setattr(reading_process, "_CODE", endless)
    monkeypatch.setattr(reading_process, "_ANSWER_BYTES", 1000)
    with ConfinedReader(FEW, docs) as reader:
        with pytest.raises(DocumentError, match="more than 50000 characters"):
            reader.load(docs / "deep" / "a.txt")
        assert reader._process is None


# Folders and names -------------------------------------------------------------------------------


@contextlib.contextmanager
def nested(folder, name, depth):
    """The descriptor of the deepest of so many folders. They are gone at the end.

    pytest would remove them later, by calls that are nested as deeply, and warn in another test.
    """
    open_ones = [os.open(folder, os.O_RDONLY)]
    for _ in range(depth):
        os.mkdir(name, dir_fd=open_ones[-1])
        open_ones.append(os.open(name, os.O_RDONLY, dir_fd=open_ones[-1]))
        if len(open_ones) > 2:
            os.close(open_ones.pop(0))
    yield open_ones[-1]
    for one in open_ones:
        os.close(one)
    subprocess.run(["rm", "-rf", str(folder / name)], check=True)


def test_folders_nested_more_deeply_than_calls_are_looked_through(tmp_path):
    with nested(tmp_path, "d", sys.getrecursionlimit() + 100) as here:
        _looks_through(tmp_path, here)


def _looks_through(tmp_path, here):
    with open(os.open("a.txt", os.O_WRONLY | os.O_CREAT, dir_fd=here), "w") as file:
        file.write("The valve is red.")
    (tmp_path / "b.txt").write_text("b")
    found = look_at(tmp_path)
    [deep] = [file for file in found.files if file.name == "a.txt"]
    assert load_document(deep).text == "The valve is red."
    assert len(found.files) == 2


def test_a_path_that_is_too_long_is_named_and_the_rest_found(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    with nested(tmp_path, "d" * 200, 25):  # longer together than a path may be
        found = look_at(tmp_path)
    assert [file.name for file in found.files] == ["b.txt"]
    [(_, reason)] = found.unreadable
    assert len(reason) < 600


def test_a_name_is_shown_on_one_line():
    assert shown("a\nb\x1b[2J\u202e\udcff.md") == "a\\nb\\x1b[2J\\u202e\\udcff.md"
    assert len(shown("x" * 10_000)) < 500


def test_what_is_said_of_an_oddly_named_file_is_one_line(tmp_path):
    names = ("a\nok 12 documents.txt", "b\nc.zzz", "d\ne.pdf")
    for name in names:
        (tmp_path / name).write_text("")
        with pytest.raises(DocumentError) as refused:
            load_document(tmp_path / name)
        assert "\n" not in str(refused.value)
    (tmp_path / "f\ng.csv").write_text("a,b\n1,2\n")
    assert "\n" not in load_document(tmp_path / "f\ng.csv").title


def test_thousands_of_odd_suffixes_are_counted_and_not_named(tmp_path):
    for number in range(300):
        (tmp_path / f"a.{number}{'x' * 200}").touch()
        (tmp_path / f"a.{number}").touch()
    (tmp_path / "a.log").touch()
    (tmp_path / "b.log").touch()
    counts = dict(look_at(tmp_path).passed_over)
    assert sum(counts.values()) == 602
    assert counts[".log"] == 2
    assert len(counts) <= 21


def test_what_programs_keep_beside_documents_is_passed_over_in_silence(tmp_path):
    for name in ("~$x.docx", ".DS_Store", "Thumbs.db", "desktop.ini", ".~lock.x.odt#", "~WRL0.tmp"):
        (tmp_path / name).write_bytes(b"\x00")
    (tmp_path / "a.txt").write_text("a")
    found = look_at(tmp_path)
    assert [file.name for file in found.files] == ["a.txt"]
    assert found.passed_over == ()
