"""Code and entities in marked-up documents: they come out as a reader of the page sees them."""

from __future__ import annotations

import pytest

from cached_rag.rag.readers import load_document

CODE = "services:\n  web:\n    image: nginx\n\n  db: {}"
INDENTED = CODE.replace("\n", "\n    ").replace("    \n", "\n")
BLOCKS = {
    "a.md": f"# Set-up\n\n```yaml\n{CODE}\n```\n\nDone.\n",
    "b.md": f"# Set-up\n\n    {INDENTED}\n\nDone.\n",
    "c.html": f"<p>Set-up</p><pre><code class='language-yaml'>{CODE}</code></pre>",
    "d.html": f"<p>Set-up</p><pre><samp>{CODE}</samp></pre>",
    "e.rst": f"Set-up::\n\n    {INDENTED}\n\nDone.\n",
    "f.rst": f"Set-up\n\n.. code-block:: yaml\n\n    {INDENTED}\n\nDone.\n",
    "g.html": "<p>Set-up</p><pre><code>"
    + CODE.replace("web", "<span class='k'>web</span>").replace("image", "<b>image</b>")
    + "</code></pre>",
    "h.html": "<p>Set-up</p><pre>" + CODE.replace("web", "<a href='x'>web</a>") + "</pre>",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_code_keeps_its_lines_and_indents(tmp_path, name):
    (tmp_path / name).write_text(BLOCKS[name])
    text = load_document(tmp_path / name).text
    assert CODE in text, text


def test_code_in_a_line_of_text_is_a_part_of_that_line(tmp_path):
    (tmp_path / "a.html").write_text("<p>Call <code>f(\n   x)</code> and  <b>see\n it</b>.</p>")
    assert load_document(tmp_path / "a.html").text == "Call f( x) and see it."


ENTITIES = {
    "a.html": ("<p>see ?a=1&amp;copy=2 and &amp;lt;</p>", "see ?a=1&copy=2 and &lt;"),
    "b.md": ("see `?a=1&copy=2` and `&amp;`", "see ?a=1&copy=2 and &amp;"),
    "c.md": ("```\na &amp; b &lt; c\n```", "a &amp; b &lt; c"),
    "d.html": ("<p>one<!-- x -->&amp;reg; two<b>x</b>&amp;reg;</p>", "one&reg; twox&reg;"),
    "e.html": (
        "<table><tr><td>a &amp;amp; b</td><td>c</td></tr><tr><td>&amp;lt;</td><td>d</td></tr>"
        "</table>",
        "a &amp; b | c\n&lt; | d",
    ),
    "f.html": (
        "<table><tr><td><table><tr><td>&amp;amp;copy</td></tr></table></td></tr></table>",
        "&amp;copy",
    ),
}


@pytest.mark.parametrize("name", ENTITIES)
def test_entities_are_decoded_once(tmp_path, name):
    source, expected = ENTITIES[name]
    (tmp_path / name).write_text(source)
    lines = [line.rstrip() for line in load_document(tmp_path / name).text.splitlines()]
    assert "\n".join(lines) == expected


def test_headings_stand_where_they_did_behind_entities(tmp_path):
    page = "<p>R&amp;D &amp;amp; more</p><h1>A &amp;lt; B</h1><p>text</p>"
    (tmp_path / "a.html").write_text(page)
    document = load_document(tmp_path / "a.html")
    begin = document.text.index("A &lt; B")
    assert document.parts == ((begin, {"heading": "A &lt; B"}),)
