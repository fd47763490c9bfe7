"""A document beyond its limits, or that breaks its parser, is skipped; the rest is ingested."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile

import psutil
import pytest
from conftest import NEW_PROMPTS, tiny_model
from indexes import WordEmbedding
from typer.testing import CliRunner

from cached_rag import CachedRAG, ConfigError, Engine
from cached_rag.cli.main import app
from cached_rag.cli.terminal import visible
from cached_rag.errors import DocumentError
from cached_rag.rag import reading_process
from cached_rag.rag.document import DocumentLimits
from cached_rag.rag.readers import READERS, load_document
from cached_rag.rag.reading_process import ConfinedReader

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
OFFICE = "urn:oasis:names:tc:opendocument:xmlns:office:1.0"
TEXT = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"


def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/"), content)
    return buffer.getvalue()


def paragraphs(count):
    """A small .docx with very many paragraphs."""
    body = "<w:p><w:r><w:t>x</w:t></w:r></w:p>" * count
    document = f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    return zipped(**{"word/document.xml": document})


def nested(depth):
    """An .odt whose parser's stack overflows, which kills its process."""
    inside = "<text:p>" * depth + "</text:p>" * depth
    around = f'xmlns:office="{OFFICE}" xmlns:text="{TEXT}"><office:body><office:text>'
    content = (
        f"<office:document-content {around}{inside}"
        "</office:text></office:body></office:document-content>"
    )
    return zipped(**{"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": content})


SLOW = b"<p " + b" ".join(b"a%d=1" % n for n in range(200_000)) + b">text"  # quadratic in lxml
BAD = {
    "slow.html": (SLOW, "more than 2 s"),
    "large.docx": (paragraphs(1_000_000), "bytes of memory"),
    "deep.odt": (nested(100_000), "cannot be read"),
    "long.txt": (b"x" * 2_000_001, "exceed 2000000"),
}
LIMITS = {"max_document_bytes": 2_000_000, "parse_seconds": 2, "parse_memory_bytes": 200 << 20}


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name, (data, _) in BAD.items():
        (folder / name).write_bytes(data)
    (folder / "ok.md").write_text("# Title\n\nThe valve is red.")
    return folder


@pytest.fixture
def opened(tmp_path):
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    made = CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding(), **LIMITS)
    with engine, made as rag:
        yield rag


def processes():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_documents_beyond_limits_are_skipped_with_a_reason_and_the_rest_ingested(bad, opened):
    before = processes()
    summary = opened.ingest(bad, progress=False)
    reasons = {os.path.basename(path): reason for path, reason in summary.skipped}
    assert reasons.keys() == BAD.keys()
    for name, (_, reason) in BAD.items():
        assert reason in reasons[name]
    assert [one.source for one in opened.documents()] == [f"{bad.name}/ok.md"]
    assert processes() <= before


def test_a_document_that_was_read_before_stays_when_it_goes_beyond_limits(opened, tmp_path):
    (tmp_path / "docs").mkdir()
    file = tmp_path / "docs" / "a.txt"
    file.write_text("The valve is red.")
    opened.ingest(file, progress=False)
    file.write_bytes(BAD["long.txt"][0])
    assert opened.ingest(file, progress=False).skipped
    assert opened.index.texts("a.txt") == ["The valve is red."]


FORMS = {
    "a.md": "# One\n\ntext\n\n## Two\n\nmore \u00e9\u4e00\U0001f600",
    "a.py": "def f():\n\n    return 1\n",
    "a.csv": "a,b\n1,2\n",
    "\u00e9 \n'x.txt": "text",
}


@pytest.mark.parametrize("name", FORMS)
def test_another_process_reads_the_same(tmp_path, name):
    (tmp_path / name).write_text(FORMS[name], encoding="utf-8")
    with ConfinedReader(DocumentLimits(), tmp_path) as reader:
        assert reader.load(tmp_path / name) == load_document(tmp_path / name)
        with pytest.raises(DocumentError, match=r"no reader for \.zzz"):
            reader.load(tmp_path / "a.zzz")
        assert reader.load(str(tmp_path / name)) == load_document(tmp_path / name)


def test_a_process_that_closes_its_output_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(reading_process, "_CODE", "import os, time; os.close(1); time.sleep(600)")
    monkeypatch.setattr(reading_process, "_DYING_SECONDS", 0.1)
    with (
        ConfinedReader(DocumentLimits(), tmp_path) as reader,
        pytest.raises(DocumentError, match="has died"),
    ):
        reader.load(tmp_path / "a.txt")


def test_without_limits_no_process_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    (tmp_path / "a.txt").write_text("text")
    with ConfinedReader(
        DocumentLimits(parse_seconds=None, parse_memory_bytes=None), tmp_path
    ) as reader:
        assert reader.load(tmp_path / "a.txt").text == "text"
    with (
        ConfinedReader(DocumentLimits(), tmp_path) as reader,
        pytest.raises(ConfigError, match="no process"),
    ):
        reader.load(tmp_path / "a.txt")


def test_memory_that_a_parser_keeps_is_not_the_next_document_s(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    with ConfinedReader(DocumentLimits(), tmp_path) as reader:
        reader.load(tmp_path / "a.txt")
        first = reader._process
        reader.load(tmp_path / "a.txt")
        assert reader._process is first
        monkeypatch.setattr(reading_process, "_KEPT_BYTES", 1)
        reader.load(tmp_path / "a.txt")
        assert first.poll() is not None


def test_no_module_is_imported_from_the_folder_of_the_documents(tmp_path, monkeypatch):
    trap = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()"
    for name in ("json.py", "html.py", "markdown_it.py", "sitecustomize.py", "cached_rag.py"):
        (tmp_path / name).write_text(trap)
    (tmp_path / "a.md").write_text("text")
    monkeypatch.chdir(tmp_path)
    with ConfinedReader(DocumentLimits(), tmp_path) as reader:
        assert reader.load("a.md").text == "text"
    assert list(tmp_path.glob("*.ran")) == []


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_reader_ends_with_the_process_that_asked(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    code = f"""
import os, psutil
from pathlib import Path
from cached_rag.rag.document import DocumentLimits
from cached_rag.rag.reading_process import ConfinedReader
reader = ConfinedReader(DocumentLimits(), Path({str(tmp_path)!r}))
reader.load({str(tmp_path / "a.txt")!r})
print(reader._process.pid, psutil.Process(reader._process.pid).cwd(), flush=True)
os.kill(os.getpid(), 9)
"""
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60).stdout
    pid, folder = said.decode().split()
    gone, _ = psutil.wait_procs(
        [psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else [], timeout=20
    )
    assert not psutil.pid_exists(int(pid)) or gone
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_document_bytes": 0}, {"max_document_bytes": None}, {"max_characters": None}),
        *({"parse_seconds": 0}, {"parse_seconds": float("nan")}, {"parse_seconds": -1}),
        *({"parse_memory_bytes": -1}, {"parse_memory_bytes": 1 << 70}),
        *({"parse_seconds": "a"}, {"max_document_bytes": 1.5}),
    ],
)
def test_limits_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DocumentLimits(**wrong)


def test_limits_may_be_written_with_an_exponent(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    limits = DocumentLimits(max_document_bytes=5e7, max_characters=1e7)
    with ConfinedReader(limits, tmp_path) as reader:
        assert reader.load(tmp_path / "a.txt").text == "text"


# Names -------------------------------------------------------------------------------------------


def test_a_name_that_is_no_text_is_skipped_and_the_rest_ingested(opened, tmp_path):
    folder = os.fsencode(tmp_path / "docs")
    os.mkdir(folder)
    for name in (b"a\xff.md", b"b\x1b[2J.md", b"c\n.md"):
        try:
            with open(os.path.join(folder, name), "w") as file:
                file.write("The valve is red.")
        except OSError:  # macOS has only names that are text
            pytest.skip("this file system refuses such names")
    os.mkfifo(os.path.join(folder, b"d.md"))
    summary = opened.ingest(tmp_path / "docs", progress=False)
    assert summary.added == 2
    [(_, reason)] = summary.skipped
    assert "rename it" in reason
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    with pytest.raises(ConfigError, match="rename it"):
        opened.ingest(odd, progress=False)


def test_names_and_texts_do_not_command_the_terminal():
    assert visible("a\x1b[2J\x9b\u202e\udcff\x07\r\tb\n\u00e9") == (
        "a\\x1b[2J\\x9b\\u202e\\udcff\\x07\\r\tb\n\u00e9"
    )


def test_the_command_line_takes_limits_and_prints_names_safely(tmp_path, model_folder, bad):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a\x1b[2J.txt").write_bytes(BAD["long.txt"][0])
    (docs / "deep.odt").write_bytes(BAD["deep.odt"][0])
    command = ["ingest", str(docs), "--index", str(tmp_path / "index"), "--model", model_folder]
    limits = [
        "--max-document-bytes",
        "2000000",
        "--parse-seconds",
        "2",
        "--parse-memory-bytes",
        "0",
    ]
    done = CliRunner().invoke(app, [*command, *limits])
    assert done.exit_code == 1, done.output  # nothing could be read
    assert "\x1b[2J" not in done.output
    assert "a\\x1b[2J.txt" in done.output.replace("\n", "")
    assert "exceed 2000000" in done.output.replace("\n", " ")
    done = CliRunner().invoke(app, [*command, *limits, "--json"])
    assert len(json.loads(done.stdout)["skipped"]) == 2


def test_a_reader_of_ones_own_is_called_here(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, ".own", lambda path: f"read by {os.getpid()}")
    (tmp_path / "a.own").write_text("x")
    with ConfinedReader(DocumentLimits(), tmp_path) as reader:
        assert reader.load(tmp_path / "a.own").text == f"read by {os.getpid()}"


def test_what_an_interrupt_has_closed_is_not_read_on():
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.communicate()
    answers = []
    reading_process._ask(process, b"line\n", 9, answers)  # which no thread may print a traceback of
    assert answers == []
