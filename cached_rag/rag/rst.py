"""Turns reStructuredText into HTML and opens no file. Knows docutils; knows no other format.

Markup can name files in many ways, and docutils learns new ones. So only the directives that are
listed here are run, those for pictures do not get the pictures' names, and pictures are left out
of the HTML. Of directives that docutils does not have, such as Sphinx's, argument and content are
text; what docutils cannot read stays as it is written.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Any, ClassVar

from docutils import nodes
from docutils.core import publish_parts
from docutils.parsers.rst import Directive, Parser, directives, states
from docutils.parsers.rst.directives import body, images, parts, tables, unchanged
from docutils.utils import Reporter
from docutils.writers import html5_polyglot

_SETTINGS = {
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "report_level": 5,
    "halt_level": 6,
    "_disable_config": True,
    "syntax_highlight": "none",
    "math_output": "LaTeX",
    "input_encoding": "unicode",
    "output_encoding": "unicode",
    "stylesheet_path": None,
    "toc_backlinks": False,
    "sectnum_xform": False,
}
# Python's documents use Sphinx roles, which docutils alone would print as errors.
_ROLE = re.compile(r":(?:\w+:)?([a-z]+):`([^`]+)`")
_FIELD = re.compile(r"[A-Z][\w-]*:")
# From each of these characters docutils searches for the end of inline markup, which takes time
# quadratic in the paragraph's length. Limits, in characters, on what may get that far.
_MARKS = "*`|_:@"
_MOST_WORK = 10_000_000
_LONGEST_WORD = 2000
# Most characters that substitutions may add, and most tables of contents.
_MOST_GROWN = 100_000
_MOST_CONTENTS = 32


def rst_to_html(source: str) -> tuple[str, str]:
    """A document's header lines ("Name: value") as they are, and the rest as HTML.

    Python Enhancement Proposals begin with such lines, which markup would join into one.
    """
    header, rest = _split_header(source)
    rest = _ROLE.sub(_spell_role, rest)
    parser, writer = _RstParser(inliner=_inliner()), html5_polyglot.Writer()
    writer.translator_class = _Translator
    found = publish_parts(rest, parser=parser, writer=writer, settings_overrides=_SETTINGS)
    return header, found["html_body"]


def _split_header(source: str) -> tuple[str, str]:
    """A header of two fields or more, with the blank line behind it, and the rest of the text."""
    fields, end, line = 0, 0, ""
    for line in io.StringIO(source):
        end += len(line)
        if _FIELD.match(line):
            fields += 1
        elif not (fields and line[0] in " \t" and len(line) > 2):
            break
    if fields < 2 or line != "\n":
        return "", source
    return source[:end], source[end:]


def _spell_role(match: re.Match[str]) -> str:
    role, content = match.groups()
    label, _, target = content.partition("<")
    if label.strip() and target.endswith(">") and target.count(">") == 1:
        return f"``{label.rstrip()}``"
    text = content[1:] if content[0] in "~!" and len(content) > 1 else content
    return f"{role.upper()} {text}" if role in ("pep", "rfc") else f"``{text}``"


class _Any(dict[str, Any]):
    """Options of a directive, among which any name is one."""

    def __missing__(self, name: str) -> Any:
        return unchanged


class _Code(body.CodeBlock):
    option_spec: ClassVar[dict[str, Any]] = _Any(body.CodeBlock.option_spec)  # Sphinx has more


class _Unknown(Directive):
    """A directive that docutils does not have: its name and argument, before its content."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = _Any(name=unchanged)

    def run(self) -> Sequence[nodes.Node]:
        content = nodes.Element()
        self.state.nested_parse(self.content, self.content_offset, content)
        if not self.arguments:
            return content.children
        said = f"{self.name.rpartition(':')[2]}: {self.arguments[0]}"  # "deprecated: 3.5"
        argument, messages = self.state.inline_text(said, self.lineno)
        return [nodes.paragraph("", "", *argument), *messages, *content.children]


class _Unseen(images.Image):
    """A picture's directive, run without its file's name and its options."""

    def run(self) -> Sequence[nodes.Node]:
        self.arguments, self.options = ["data:,"], {}
        return super().run()


class _Figure(_Unseen, images.Figure):
    pass


class _Table(tables.CSVTable):
    option_spec: ClassVar[dict[str, Any]] = {
        name: check
        for name, check in tables.CSVTable.option_spec.items()
        if name not in ("file", "url", "encoding")
    }


class _Contents(parts.Contents):
    """A table of contents. Each repeats all titles, so a document may have only so many."""

    def run(self) -> Sequence[nodes.Node]:
        document: Any = self.state.document
        document.tables_of_contents = getattr(document, "tables_of_contents", 0) + 1
        return super().run() if document.tables_of_contents <= _MOST_CONTENTS else []


# Directives that are run as they are, and those that are run as others, by docutils' classes.
_PLAIN = (
    *("Admonition", "Attention", "Caution", "Danger", "Error", "Hint", "Important", "Note", "Tip"),
    *("Warning", "Compound", "Container", "Epigraph", "Highlights", "LineBlock", "MathBlock"),
    *("ParsedLiteral", "PullQuote", "Rubric", "Sidebar", "Topic", "Class", "Date", "DefaultRole"),
    *("Replace", "Role", "Title", "Unicode", "Footer", "Header", "ListTable", "RSTTable"),
)
_CHANGED: dict[str, type[Directive]] = {
    "CodeBlock": _Code,
    "CSVTable": _Table,
    "Contents": _Contents,
    "Image": _Unseen,
    "Figure": _Figure,
}


class _KnownNames(states.RSTState):
    """A state of docutils' parser; those of its directives that are not listed are nothing here."""

    nested_sm_cache: ClassVar[list[Any]] = []  # type: ignore[misc]  # apart from other parsers'

    def __init__(self, state_machine: Any, debug: bool = False) -> None:
        super().__init__(state_machine, debug)
        self.nested_sm_kwargs = {"state_classes": _STATES, "initial_state": "Body"}

    def directive(self, match: Any, **presets: Any) -> Any:
        this: Any = self  # docutils calls this of states that can parse directives
        name = match.group(1)
        found, _ = directives.directive(name, this.memo.language, this.document)
        if found is None or not found.__module__.startswith("docutils."):
            return this.run_directive(_Unknown, match, name, presets)
        plain = found if found.__name__ in _PLAIN else None
        known = _CHANGED.get(found.__name__, plain)
        if known is None:
            return [], this.unknown_directive(name)[1]
        return this.run_directive(known, match, name, presets)


# docutils finds the directives' construct here, by the function.
_KnownNames.explicit = copy(states.Body.explicit)  # type: ignore[attr-defined]
_KnownNames.explicit.constructs = [  # type: ignore[attr-defined]
    (_KnownNames.directive if read is states.Body.directive else read, pattern)
    for read, pattern in states.Body.explicit.constructs
]
_STATES = tuple(type(state.__name__, (_KnownNames, state), {}) for state in states.state_classes)


def _inliner() -> states.Inliner:
    """A parser of inline markup that leaves a paragraph as it is if it would take too long."""
    inliner = states.Inliner()
    find = inliner.parse

    def parse(text: str, lineno: int, memo: Any, parent: Any) -> Any:
        work = len(text) * sum(map(text.count, _MARKS))
        if work <= _MOST_WORK and all(len(word) <= _LONGEST_WORD for word in text.split()):
            with suppress(RecursionError):  # of a paragraph with very many addresses
                return find(text, lineno, memo, parent)
        return [nodes.Text(text)], []

    # Not a subclass: docutils looks some things up in the class itself.
    inliner.parse = parse  # type: ignore[method-assign]
    return inliner


class _RstParser(Parser):
    """Reads lines of any length, with the states from above."""

    def parse(self, inputstring: str, document: nodes.document) -> None:
        self.state_classes = _STATES
        document.settings.line_length_limit = len(inputstring)
        super().parse(inputstring, document)
        _spell_errors(document)
        _bound_substitutions(document, _MOST_GROWN + len(inputstring))


def _spell_errors(document: nodes.document) -> None:
    """Put in the place of an error, which nobody would see, the block that it is about."""
    for message in list(document.findall(nodes.system_message)):
        blocks = list(message.findall(nodes.literal_block))  # of what is inline the text stays
        if blocks and message["level"] >= Reporter.ERROR_LEVEL:
            message.replace_self(blocks)


def _bound_substitutions(document: nodes.document, most: int) -> None:
    """Let substitutions grow a document by no more than `most` characters.

    Inside of definitions, which could expand each other without end, names of substitutions become
    plain text; everywhere, if all that they stand for has more characters.
    """
    for definition in document.substitution_defs.values():
        _leave(list(definition.findall(nodes.substitution_reference)))
    sizes = {name.lower(): len(d.astext()) for name, d in document.substitution_defs.items()}
    references = list(document.findall(nodes.substitution_reference))
    if sum(sizes.get(reference["refname"].lower(), 0) for reference in references) > most:
        _leave(references)


def _leave(references: list[nodes.substitution_reference]) -> None:
    for reference in references:
        reference.replace_self(nodes.Text(reference.astext()))


class _Translator(html5_polyglot.HTMLTranslator):
    def visit_image(self, node: nodes.image) -> None:
        raise nodes.SkipNode

    def visit_raw(self, node: nodes.raw) -> None:
        raise nodes.SkipNode
