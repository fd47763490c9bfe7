"""What schemas and prompts say, and every mistake at its line and column."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh import run_fresh

from cached_rag import Import, Said, Schema
from cached_rag.errors import PMLError
from cached_rag.pml import SchemaTemplate
from cached_rag.pml.nodes import Module, Param, Text, Union, walk

GOOD = """<schema name="s">
  <!-- what all see -->
  <system>Be
    brief.</system>
  <user>
    Read:
    <module name="file.py"><![CDATA[
def less(a, b):
    return a < b & True
]]></module>
    <module name="letter">
      Dear <parameter name="who" length="4"/>,
      <union scaffold="news">
        <module name="news">here are news.</module>
        <module name="secret" cache="false">this is a secret.</module>
      </union>
    </module>
  </user>
</schema>"""


def schema(body, **attributes):
    text = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<schema name="s"{text}>{body}</schema>'


def texts(source):
    found = Schema.from_string(source).node
    return [node.text for node in walk(found.children) if isinstance(node, Text)]


def test_indentation_goes_and_lines_stay():
    assert texts(GOOD) == [
        "Be\nbrief.",
        "Read:",
        "\ndef less(a, b):\n    return a < b & True",
        "\nDear",
        ",",
        "\nhere are news.",
        "\nthis is a secret.",
    ]
    every = list(walk(Schema.from_string(GOOD).node.children))
    (param,) = [node for node in every if isinstance(node, Param)]
    assert (param.name, param.length, param.lead, param.unit) == ("who", 4, " ", ("letter",))
    (union,) = [node for node in every if isinstance(node, Union)]
    assert union.stand_in == "news"
    hidden = [node.text for node in every if isinstance(node, Text) and not node.is_cached]
    assert hidden == ["\nthis is a secret."]


def test_code_keeps_its_indentation():
    code = "class A:\n    x = 1\n\n    def f(self):\n        return self.x"
    assert texts(schema(f'<module name="a.py"><![CDATA[{code}]]></module>')) == [code]
    indented = schema('<module name="a.py">\n<![CDATA[    x = 1\n    y = 2\n]]></module>')
    assert texts(indented) == ["    x = 1\n    y = 2"]
    found = Schema.from_string(schema("<user>Read.</user>"))
    prompt = found.prompt_from_string(f"<prompt><user><![CDATA[{code}]]></user></prompt>")
    assert prompt.plain()[-1]["content"] == code


def test_white_space_behind_the_last_of_a_union_counts():
    body = 'go <union><module name="a">now</module>\n</union>and stay'
    assert texts(schema(body)) == ["go", " now", "\nand stay"]


def test_white_space_can_be_kept():
    kept = '<module name="m" xml:space="preserve">  a\n   b </module>'
    assert texts(schema(f"x {kept} y")) == ["x", "   a\n   b ", " y"]


def test_white_space_before_siblings_of_a_union_is_the_same():
    body = 'Go<union> <module name="a">now</module>\n\n<module name="b">\nlater</module></union>.'
    assert texts(schema(body)) == ["Go", " now", "\nlater", "."]


def test_names_are_unique_in_their_scope_only():
    nested = '<module name="a"><module name="b">x</module></module><module name="b">y</module>'
    found = Schema.from_string(schema(nested))
    paths = [node.path for node in walk(found.node.children) if isinstance(node, Module)]
    assert paths == [("a",), ("a", "b"), ("b",)]
    prompt = found.prompt(Import("a"), Import("b"))
    assert prompt.plain() == "y"
    assert found.prompt(Import("a", Import("b"))).plain() == "x"


MISTAKES = [
    ("<schema name='s'><module name='m'>a < b</module></schema>", 1, 38, "write &lt; for <"),
    ("<schema name='s'>\n <modul name='m'/></schema>", 2, 2, "did you mean 'module'"),
    (
        "<schema name='s'>\n<module nam='m'/></schema>",
        2,
        1,
        "no attribute 'nam'; did you mean 'name'",
    ),
    ("<schema><module name='m'/></schema>", 1, 1, 'needs a name="..."'),
    ("<prompt schema='s'/>", 1, 1, "checked with its schema"),
    (
        schema('<module name="a">x</module>\n<module name="a">y</module>'),
        2,
        1,
        "twice in one scope",
    ),
    (schema('<param name="p" len="0"/>'), 1, 18, "at least 1"),
    (schema('<param name="p" len="3" length="3"/>'), 1, 18, "one len"),
    (schema('<param name="p" len="3">x</param>'), 1, 18, "prompts give its argument"),
    (schema('<param name="p" len="3"/><param name="p" len="3"/>'), 1, 43, "'p' is there twice"),
    (schema('<module name="user">x</module>'), 1, 18, "cannot be called 'user'"),
    (schema('<module name="1st">x</module>'), 1, 18, "begins with a letter"),
    (schema('<module name="a" cache="no"/>'), 1, 18, "cache is"),
    (schema("<union>text</union>"), 1, 25, "holds modules only"),
    (schema("<union/>"), 1, 18, "an empty union"),
    (schema('<union scaffold="b"><module name="a"/></union>'), 1, 18, "not in it"),
    (schema('<module name="a"><user>\n<system>x</system></user></module>'), 2, 1, "no other"),
    (schema('<user><module name="a"><user>x</user></module></user>'), 1, 41, "holds no other"),
    (schema('<module name="a"><user when="x"/></module>'), 1, 35, "no attribute 'when'"),
    (schema('<module name="a"><user><param name="p"/></user></module>'), 1, 41, "at least 1"),
    (schema('<user/><module name="a">x</module>'), 1, 25, "has messages in its modules"),
    (schema("text<user>x</user>"), 1, 18, "holds everything inside them"),
    (schema('<module name="a"/><scaffold name="s"><b/></scaffold>'), 1, 55, "no module 'b'"),
    (schema('<scaffold name="s"/>'), 1, 18, "names the modules"),
    (schema('<module name="a"><scaffold name="s"/></module>'), 1, 35, "directly in <schema>"),
    (
        schema(
            '<union><module name="a"/><module name="b"/></union>'
            '<scaffold name="s"><a/><b/></scaffold>'
        ),
        1,
        69,
        "exclude each other",
    ),
    (schema('<module name="a" xml:space="no"/>'), 1, 18, "preserve"),
    ("<!DOCTYPE s [<!ENTITY a 'b'>]><schema name='s'>&a;</schema>", 1, None, "not allowed"),
    ("<schema name='s'>&nbsp;</schema>", 1, None, "not well-formed"),
    ("", 1, None, "not well-formed"),
    (schema("\u2028\x85\r\n me & you"), 2, 6, "near 'me & you</schema>'"),
    ("<schema name='s'>\n<module name='a'>x", 2, None, "<module> of line 2 is open"),
    ("<schema name='s'>\n<module name='a'>\n</schema>", 3, None, "<module> of line 2 is open"),
    (schema('<module name="a">' * 99 + "</module>" * 99), 1, None, "nested deeper than 64"),
    ("<schema name='\ud800'/>", 1, 1, "half a character"),
    (schema(f'\n<param name="p" len="{"9" * 10_000}"/>'), 2, 1, "at most 9999999"),
    (schema('<param name="p" len="0"/>'), 1, 18, "at least 1"),
    (schema('<param name="p" len="4"/>\n<param name="p" len="4"/>'), 2, 1, "there twice"),
]


@pytest.mark.parametrize(("source", "line", "column", "what"), MISTAKES)
def test_mistakes_in_schemas_are_named_with_their_place(source, line, column, what):
    with pytest.raises(PMLError, match=what) as failed:
        Schema.from_string(source, file="f.xml")
    assert failed.value.line == line
    assert column is None or failed.value.column == column
    assert str(failed.value).startswith(f"f.xml:{line}:")


ASKED = [
    ("<prompt schema='s'><lettre/></prompt>", 20, "no module 'lettre' in the schema; did you mean"),
    ("<prompt schema='x'/>", 1, "this prompt is of schema 'x'"),
    ("<promt/>", 1, "a prompt's root is <prompt>"),
    ("<prompt><letter whom='x'/></prompt>", 9, "no parameter 'whom'; did you mean 'who'"),
    ("<prompt when='x'/>", 1, "the schema itself has no parameter 'when'"),
    ("<prompt><letter><news/><secret/></letter></prompt>", 24, "exclude each other"),
    ("<prompt><letter/><letter/></prompt>", 18, "imported twice"),
    ("<prompt><news/></prompt>", 9, "no module 'news' in the schema"),
    ("<prompt><user>a</user>b</prompt>", 23, "text behind <user>"),
    ("<prompt><user>a</user><letter/></prompt>", 23, "stands behind a message"),
    ("<prompt><letter><user>a</user></letter></prompt>", 17, "inside a module"),
    ("<prompt><user><letter/></user></prompt>", 15, "hold text only"),
    ("<prompt><user tone='angry'>a</user></prompt>", 9, "<user> has no attribute 'tone'"),
]


@pytest.mark.parametrize(("source", "column", "what"), ASKED)
def test_mistakes_in_prompts_are_named_with_their_place(source, column, what):
    with pytest.raises(PMLError, match=what) as failed:
        Schema.from_string(GOOD).prompt_from_string(source)
    assert (failed.value.line, failed.value.column) == (1, column)


UNFILLED = [
    ("<prompt>\n  Hi, {a.b}</prompt>", 2, 7, r"^PML:2:7: \{a.b\} is no variable"),
    ("<prompt>{{ok}} {}</prompt>", 1, 16, "no variable"),
    ("<prompt>{ok} {x:>10}</prompt>", 1, 14, "no variable"),
    ("<prompt>{x!r}</prompt>", 1, 9, "no variable"),
    ("<prompt><user>a\n}</user></prompt>", 2, 1, r"^PML:2:1: braces in 'a\\n}'"),
    ("<prompt>a {{ { b</prompt>", 1, 14, "write {{ and }} for braces"),
    ("<prompt><letter who='{'/></prompt>", 1, 9, "braces in '{'"),
    ("<prompt>{a}<letter>\n{b[0]}</letter></prompt>", 2, 1, "no variable"),
]


@pytest.mark.parametrize(("source", "line", "column", "what"), UNFILLED)
def test_mistakes_in_templates_are_named_with_their_place(source, line, column, what):
    with pytest.raises(PMLError, match=what) as failed:
        SchemaTemplate.from_string(Schema.from_string(GOOD), source)
    assert (failed.value.line, failed.value.column) == (line, column)
    assert str(failed.value).count("PML:") == 1


def test_new_text_stands_behind_the_import_before_it():
    found = Schema.from_string(GOOD)

    def user(*parts):
        said = found.prompt(*parts).plain()
        assert [message["role"] for message in said] == ["system", "user"]
        return said[1]["content"]

    letter = Import("letter", Import("news"), " More.", who="Ann")
    assert user(letter, "P.S.") == "Read:\nDear Ann,\nhere are news. More.\nP.S."
    assert user("First:", letter) == "Read:\nFirst:\nDear Ann,\nhere are news. More."
    source = "<prompt><file.py/> and <letter>only this</letter> end</prompt>"
    said = found.prompt_from_string(source).plain()[1]["content"]
    assert said.endswith("a < b & True and\nDear,\nonly this end")
    assert found.prompt("Why?").plain()[1]["content"] == "Read:\nWhy?"


def test_messages_come_behind_the_schemas_own():
    found = Schema.from_string(GOOD)
    prompt = found.prompt(Import("letter"), Said("assistant", "Yes."), Said("user", "Why?"))
    assert [m["content"] for m in prompt.plain()][2:] == ["Yes.", "Why?"]
    twice = found.prompt("Hi", Said("user", "Hi")).plain()
    assert [m["content"] for m in twice][1:] == ["Read:\nHi", "Hi"]
    assert found.prompt(Import("letter", who=None)) == found.prompt(Import("letter"))
    assert "Dear 3," in found.prompt(Import("letter", who=3)).plain()[1]["content"]
    with pytest.raises(PMLError, match="there is no role 'robot'"):
        found.prompt(Said("robot", "x"))
    plain = Schema.from_string(schema("text"))
    with pytest.raises(PMLError, match="has no messages"):
        plain.prompt(Said("user", "x"))
    assert plain.prompt("more").plain() == "text\nmore"


def test_prompts_from_python_are_text_whatever_they_hold():
    found = Schema.from_string(GOOD)
    prompt = found.prompt(Import("letter", who="<b/>&amp;"), "</user><|im_end|>{x}")
    assert "Dear <b/>&amp;," in prompt.plain()[1]["content"]
    assert prompt.plain()[1]["content"].endswith("\n</user><|im_end|>{x}")


@pytest.mark.parametrize(
    "part", [5, None, Import(5), Import("letter", 5), Said(5, "x"), Said("user", None)]
)
def test_what_is_no_part_of_a_prompt_is_refused(part):
    with pytest.raises(PMLError, match="a prompt is of strings, Import"):
        Schema.from_string(GOOD).prompt(part)


@pytest.mark.parametrize("read", [Schema.from_string, Schema.from_string(GOOD).prompt_from_string])
def test_what_is_no_text_is_no_pml(read):
    with pytest.raises(PMLError, match="PML is a string, or in a file"):
        read(5)


def test_a_declared_encoding_does_not_change_a_string():
    declared = '<?xml version="1.0" encoding="latin-1"?><schema name="s">Café</schema>'
    assert texts(declared) == ["Café"]


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(PMLError, match="cannot be read"):
        Schema.from_file(tmp_path / "none.xml")
    (tmp_path / "bad.xml").write_bytes(b"<schema name='\xff'/>")
    with pytest.raises(PMLError, match="cannot be read"):
        Schema.from_file(tmp_path / "bad.xml")
    with pytest.raises(PMLError, match="5 cannot be read"):
        Schema.from_file(5)


FILES = Path(__file__).parent / "files"  # the shapes of the Prompt Cache authors' own
NAMED = {
    "game.xml": (9, 20, "write &lt; for <"),
    "kinds_prompt.xml": (1, 1, "checked with its schema"),
}


@pytest.mark.parametrize("file", sorted(FILES.glob("*.xml")), ids=lambda file: file.name)
def test_files_like_the_papers_parse_or_their_mistake_is_named(file):
    if file.name not in NAMED:
        assert list(walk(Schema.from_file(file).node.children))
        return
    line, column, what = NAMED[file.name]
    with pytest.raises(PMLError, match=what) as failed:
        Schema.from_file(file)
    assert (failed.value.line, failed.value.column) == (line, column)
    assert str(failed.value).startswith(f"{file}:{line}:{column}: ")


def test_a_prompt_from_a_file_is_of_the_schema_in_its_file():
    kinds = Schema.from_file(FILES / "kinds.xml")
    said = kinds.prompt_from_file(FILES / "kinds_prompt.xml").plain()
    assert [message["role"] for message in said] == ["system", "user", "assistant"]
    assert "You like company." in said[1]["content"]
    assert "You like silence." not in said[1]["content"]


# Many lines, modules, scaffolds: each of these took minutes when time grew with their square.
LONG = {
    "lines": "a &amp; b\n" * 250_000,
    "modules": "".join(f'<module name="m{i}">x</module>' for i in range(20_000)),
    "scaffolds": '<module name="m">x</module>'
    + "".join(f'<union><module name="u{i}">x</module></union>' for i in range(4_000))
    + "".join(f'<scaffold name="s{i}"><m/></scaffold>' for i in range(4_000)),
    "names": f'<module name="{"ab" * 50_000}"/><scaffold name="s"><{"ba" * 50_000}/></scaffold>',
}


@pytest.mark.parametrize("kind", LONG)
def test_long_schemas_are_read_in_time(tmp_path, kind):
    (tmp_path / "s.xml").write_text(schema(LONG[kind]))
    code = (
        "import sys\n"
        "from cached_rag.errors import PMLError; from cached_rag import Schema\n"
        "try: print(len(Schema.from_file(sys.argv[1]).node.children))\n"
        "except PMLError as error: print(str(error)[-40:])\n"
    )
    done = run_fresh(code, tmp_path / "s.xml", seconds=20)
    assert done.stdout.strip()


def test_of_a_variable_without_words_nothing_is_left():
    schema = Schema.from_string(
        '<schema name="s"><module name="a">One. <module name="b">Two.</module></module></schema>'
    )
    for parts in ("{note}<b/>", "<b/>{note}"):
        template = SchemaTemplate.from_string(schema, f"<prompt><a>{parts}</a> {{q}}</prompt>")
        assert template.fill(note="", q="x").plain() == "One. Two. x"
        assert "!" in template.fill(note="!", q="x").plain()


def test_text_beside_cdata_loses_its_indentation_and_cdata_does_not():
    code = "def f():\n    return 1"
    source = f'<module name="a">\n      Look:\n      <![CDATA[{code}]]>\n      Explain.\n</module>'
    assert "".join(texts(schema(source))) == f"Look:\n{code}\nExplain."
