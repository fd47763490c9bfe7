"""Documents made to read other files, to hang, or to break what reads them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from docutils import nodes
from docutils.parsers.rst import Directive, directives

from cached_rag.errors import DocumentError
from cached_rag.rag.finding import look_at
from cached_rag.rag.readers import load_document

SECRET = "KEEP-THIS-TO-YOURSELF"
SVG = f'<svg xmlns="http://www.w3.org/2000/svg"><text>{SECRET}</text></svg>'
OPENED: list[object] = []
REACHES = ("open", "urllib.Request", "socket.connect", "subprocess.Popen", "os.system")


def _audit(event, arguments):
    if event in REACHES:
        OPENED.append(arguments[0])


@pytest.fixture(scope="module", autouse=True)
def _audited():
    sys.addaudithook(_audit)  # for good: a hook cannot be removed


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "elsewhere" / "secret.svg"
    path.parent.mkdir()
    path.write_text(SVG)
    return path


def read(path, data):
    """A document's text, and what was opened below its folder besides itself."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    OPENED.clear()
    text = load_document(path).text
    opened, folder = [str(file) for file in OPENED], str(path.parent)
    assert path.name in opened  # the audit sees what is opened, by its name in its folder
    return text, [file for file in opened if file != folder and folder in file]


OPTIONS = (
    "",
    ":file: {0}",
    ":url: file://{0}",
    ":loading: embed\n   :scale: 50",
    ":figwidth: image",
    ":scale: 50\n   :target: {0}",
    ":literal:\n   :encoding: utf-8",
    ":parser: rst",
    ":stylesheet: {0}",
)


@pytest.mark.parametrize("name", sorted(directives._directive_registry))
def test_no_directive_opens_a_file(tmp_path, secret, name):
    blocks = [
        f".. {name}:: {argument}\n   {option}\n{body}"
        for argument in ("", str(secret), f"file://{secret}", f"html {secret}")
        for option in (option.format(secret) for option in OPTIONS)
        for body in ("", "\n   body\n")  # some take none, some need one
    ]
    some = blocks[::7]  # each argument, each option, and with and without a body
    inside = [f"* item\n\n  {block}".replace("\n", "\n  ").rstrip() + "\n" for block in some]
    named = [f".. |s{i}| {block.removeprefix('.. ')}\n|s{i}|\n" for i, block in enumerate(some)]
    source = "Text\n\n" + "\n".join((*blocks, *inside, *named)) + "\nharmless end\n"
    text, opened = read(tmp_path / "a.rst", source)
    assert "harmless end" in text
    assert SECRET not in text
    assert opened == []


def test_an_application_s_own_directives_are_unknown_to_documents(tmp_path, secret):
    class Reading(Directive):
        required_arguments = 1

        def run(self):
            return [nodes.paragraph("", open(self.arguments[0]).read())]

    directives.register_directive("reading", Reading)
    try:
        text, opened = read(tmp_path / "a.rst", f"harmless\n\n.. reading:: {secret}\n")
    finally:
        del directives._directives["reading"]
    assert text.split() == ["harmless", "reading:", str(secret)]
    assert opened == []


OTHERS = {
    "a.md": "harmless ![x]({0}) [y](file://{0})\n\n<img src='{0}'><iframe src='{0}'></iframe>",
    "a.html": "<?xml-stylesheet href='{0}'?><!DOCTYPE x SYSTEM '{0}' [<!ENTITY e SYSTEM '{0}'>"
    "<!ENTITY % p SYSTEM '{0}'> %p;]><html xmlns:xi='http://www.w3.org/2001/XInclude'>"
    "<link rel=stylesheet href='{0}'><style>@import url({0})</style><p>harmless &e;"
    "<xi:include href='{0}' parse='text'/><object data='{0}'></object><embed src='{0}'>"
    "<iframe src='{0}'></iframe><img src='{0}'><base href='{0}'>",
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_markup_opens_a_file(tmp_path, secret, name):
    text, opened = read(tmp_path / name, OTHERS[name].format(secret))
    assert "harmless" in text
    assert SECRET not in text
    assert opened == []


def test_no_pdf_opens_a_file(tmp_path, secret):
    secret.write_text(f"BT /F1 12 Tf 20 100 Td ({SECRET}) Tj ET")
    pdf = f"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R/OpenAction<</S/Launch/F({secret})>>>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents[4 0 R 6 0 R]
/Resources<</Font<</F1 5 0 R>>>>>>endobj
4 0 obj<</Length 45>>stream
BT /F1 12 Tf 20 100 Td (harmless text) Tj ET
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
6 0 obj<</Length 0/F({secret})/FFilter/None>>stream

endstream endobj
trailer<</Root 1 0 R>>
startxref
0
%%EOF
"""
    text, opened = read(tmp_path / "a.pdf", pdf)
    assert "harmless text" in text
    assert SECRET not in text
    assert opened == []


# In another process, for what is tested is that it ends -------------------------------------------

HEADER = "PEP: 1\r\nAuthor: A <a@b.c>,\r\n{}Status: Final\r\n\r\nTitle\r\n=====\r\n\r\nText.\r\n"
HANGING = {
    "header.rst": (HEADER.format("        B <b@c.d>,\r\n" * 40), "PEP: 1\nAuthor: A <a@b.c>,\n"),
    "spaces.rst": ("A: b\n" + "                    \n" * 40 + "text", "text"),
    "roles.rst": (":a:`" + "x " * 200_000 + " " * 200_000 + "\n\ntext", "text"),
    "scripts.html": ("<p>text</p>" + "<script " * 40_000, "text"),
    "markup.rst": ("text " + "*a " * 40_000, "text"),
    "names.rst": ("text " + "-a" * 100_000, "text"),
    "circle.rst": (
        "text |a|\n\n.. |a| replace:: |b| |b|\n.. |b| replace:: |a| |a|\n",
        "text b b",
    ),
    "lines.rst": (
        "text |x0|\n\n" + "".join(f".. |x{i}| replace:: {f'|x{i + 1}| ' * 10}\n" for i in range(9)),
        "text x1 x1",
    ),
    "addresses.rst": ("text " + "http://a.b " * 3_000, "http://a.b"),
    "nested.rst": ("text\n\n" + "- " * 2_000 + "x", "text"),
    "templates.html": ("<p>text</p>" + "<template/" * 40_000, "text"),
}


READER = """
import json, sys
from cached_rag.rag.readers import load_document
for path in sys.argv[1:]:
    print(json.dumps(load_document(path).text), flush=True)
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The documents' texts, by name, as far as another process came with them in two minutes."""
    folder = tmp_path_factory.mktemp("hanging")
    for name, (source, _) in HANGING.items():
        (folder / name).write_bytes(source.encode())
    command = [sys.executable, "-W", "ignore", "-c", READER, *(folder / name for name in HANGING)]
    try:
        said = subprocess.run(command, stdout=subprocess.PIPE, timeout=120).stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
    return dict(zip(HANGING, map(json.loads, said.splitlines()), strict=False))


@pytest.mark.parametrize("name", HANGING)
def test_no_document_hangs_its_reader(texts, name):
    assert HANGING[name][1] in texts[name]


def test_a_header_with_line_ends_of_windows_is_kept_as_it_is(tmp_path):
    (tmp_path / "a.rst").write_bytes(HEADER.format("        B <b@c.d>,\r\n").encode())
    text = load_document(tmp_path / "a.rst").text
    assert text.startswith("PEP: 1\nAuthor: A <a@b.c>,\n        B <b@c.d>,\nStatus: Final\n\n")


def test_scripts_styles_and_templates_are_not_text(tmp_path):
    source = (
        "<p>a<script>x < y; '<p>no</p>'</script>b<STYLE>no{}</STYLE >c"
        "<template><p>no</p></template>d<script>no"
    )
    (tmp_path / "a.html").write_text(source)
    assert load_document(tmp_path / "a.html").text == "abcd"


def test_text_that_docutils_refuses_is_there_with_its_markup(tmp_path):
    long = "words " * 2_000 + "are *many*"
    (tmp_path / "long.rst").write_text(f"{long}\n\n*short*\n")
    assert load_document(tmp_path / "long.rst").text == f"{long}\n\nshort"
    deep = "text\n\n" + "- " * 2_000 + "x"
    (tmp_path / "deep.rst").write_text(deep)
    assert load_document(tmp_path / "deep.rst").text == deep


def test_what_docutils_does_not_know_is_text(tmp_path):
    lines = [
        ".. py:function:: spam(eggs, *ham*)\n   :noindex:\n\n   Spam the *eggs*.\n",
        "   .. deprecated:: 3.5\n      Use :func:`eat`.\n",
        "   .. code-block:: python\n      :caption: ex.py\n\n      x = 1\n",
        "====  ====\nbad   table\n===\n",
        ".. note::\n   :wrong: x\n\n   kept\n",
        "A :No-Role:`x`, *that* is |nothing|.\n",
        ".. raw:: html\n\n   <b>gone</b>\n",
        ".. include:: gone.txt\n",
    ]
    (tmp_path / "a.rst").write_text("\n".join(lines))
    text = load_document(tmp_path / "a.rst").text
    known = "function: spam(eggs, ham) Spam the eggs. deprecated: 3.5 Use eat. x = 1"
    left = "==== ==== bad table === .. note:: :wrong: x kept A :No-Role:`x`, that is |nothing|."
    assert " ".join(text.split()) == f"{known} {left}"


def test_what_substitutions_multiply_is_refused(tmp_path):
    source = "text\n\n" + "|a|\n\n" * 5_000 + ".. |a| replace:: " + "more " * 1_000
    (tmp_path / "a.rst").write_text(source)
    with pytest.raises(DocumentError, match="more than 10000000 characters"):
        load_document(tmp_path / "a.rst")


def test_substitutions_and_contents_stay(tmp_path):
    source = "A |b| c\n\n.. |b| replace:: big *bad*\n\n.. contents:: Parts\n\nOne\n===\n\nTwo\n==="
    (tmp_path / "a.rst").write_text(source)
    text = load_document(tmp_path / "a.rst").text
    assert text.split() == ["A", "big", "bad", "c", "Parts", "-", "One", "-", "Two", "One", "Two"]


WIDE = "x" * 20_000
TABLES = {
    "wide": f"<table><tr><td>{WIDE}</td></tr>" + "<tr><td>y</td></tr>" * 20_000 + "</table>",
    "tall": f"<table><tr><td>{'x<br>' * 20_000}</td>{'<td>y</td>' * 20_000}</tr></table>",
    "many": f"<table><tr><td>{WIDE}<tr><td>{'y<br>' * 400}</table>" * 20,
    "nested": "<table><tr><td>x<td>" * 20 + WIDE + "<br>y" * 400,
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_have_about_as_much_text_as_markup(tmp_path, kind):
    (tmp_path / "a.html").write_text(TABLES[kind])
    assert len(load_document(tmp_path / "a.html").text) < len(TABLES[kind])


def test_styles_move_text_by_little(tmp_path):
    style = "padding-left: 90000em; margin-top: 90000em; margin-bottom: 90000em"
    (tmp_path / "a.html").write_text(f"<p style='{style}'>a<p style='{style}'>b" * 100)
    assert len(load_document(tmp_path / "a.html").text) < 10_000


def test_what_ends_a_line_or_a_page_parts_words(tmp_path):
    (tmp_path / "a.txt").write_text("last\fFirst\vnext\x1done\x1f\r\ntwo")
    assert load_document(tmp_path / "a.txt").text == "last\nFirst\nnext\none\n\ntwo"


def test_half_characters_are_dropped(tmp_path, monkeypatch):
    from cached_rag.rag import readers

    monkeypatch.setitem(readers.READERS, ".txt", lambda path: "te\ud800xt \U0001f600\udfff")
    (tmp_path / "a.txt").write_text("")
    assert load_document(tmp_path / "a.txt").text == "text \U0001f600"


# Links -------------------------------------------------------------------------------------------


def test_links_below_a_folder_lead_nowhere_else(tmp_path):
    root, outside = tmp_path / "docs", tmp_path / "outside"
    for folder in (root, outside, root / "deep", root / ".data"):
        folder.mkdir()
    (root / "a.md").write_text("a")
    (root / ".data" / "mounted.md").write_text("as in a mounted configuration")
    (outside / "secret.md").write_text(SECRET)
    (root / "key.txt.d").write_text(SECRET)
    links = {
        "out.md": outside / "secret.md",
        "twice.md": root / "a.md",
        "mounted.md": root / ".data" / "mounted.md",
        "key.txt": root / "key.txt.d",
        "broken.md": root / "nothing.md",
        "folder": outside,
        "deep/up.md": root / ".." / "outside" / "secret.md",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    found = look_at(root)
    assert [file.name for file in found.files] == ["a.md", "mounted.md"]
    assert dict(found.passed_over) == {"links": 4, ".txt": 1, ".d": 1}


def test_what_is_asked_for_by_name_may_be_a_link(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("a")
    (tmp_path / "file.md").symlink_to(tmp_path / "docs" / "a.md")
    (tmp_path / "folder").symlink_to(tmp_path / "docs")
    assert look_at(tmp_path / "file.md").files == (tmp_path / "file.md",)
    assert look_at(tmp_path / "folder").files == (tmp_path / "folder" / "a.md",)
