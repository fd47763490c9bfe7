"""reStructuredText to HTML, without a file being opened. Knows docutils; knows no other format.

Markup names files in many ways, and docutils learns new ones. So of directives only those listed
here are run, those about pictures never learn which picture, and what is written of a picture is
nothing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from docutils import nodes
from docutils.core import publish_string
from docutils.parsers.rst import Directive, Parser, states
from docutils.parsers.rst.directives import (
    admonitions,
    body,
    images,
    misc,
    parts,
    tables,
)
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
# docutils looks for the end of inline markup from each place where some begins.
_MARKS = "*`|_:@"
_MOST_WORK = 10_000_000
_LONGEST_WORD = 2000
_MOST_GROWN = 100_000
_MOST_CONTENTS = 32


def rst_to_html(source: str) -> tuple[str, str]:
    """A document's mail-style header as it is, and the rest as HTML.

    Such lines open a Python Enhancement Proposal; as markup they would run together.
    """
    header, rest = _split_header(source)
    rest = _ROLE.sub(_spell_role, rest)
    parser, writer = _Parser(inliner=_inliner()), _Writer()
    return header, publish_string(rest, parser=parser, writer=writer, settings_overrides=_SETTINGS)


def _split_header(source: str) -> tuple[str, str]:
    """Two fields or more, with their continuation lines and the blank line behind; and the rest."""
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


class _Unseen(images.Image):
    """A picture, or what stands around it, without its file's name and without options."""

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
    """A table of contents, which repeats all titles: not as often as a document wants."""

    def run(self) -> Sequence[nodes.Node]:
        document: Any = self.state.document
        document.tables_of_contents = getattr(document, "tables_of_contents", 0) + 1
        return super().run() if document.tables_of_contents <= _MOST_CONTENTS else []


_DIRECTIVES: dict[type[Directive], type[Directive]] = {
    **{
        directive: directive
        for directive in (
            admonitions.Admonition,
            admonitions.Attention,
            admonitions.Caution,
            admonitions.Danger,
            admonitions.Error,
            admonitions.Hint,
            admonitions.Important,
            admonitions.Note,
            admonitions.Tip,
            admonitions.Warning,
            body.CodeBlock,
            body.Compound,
            body.Container,
            body.Epigraph,
            body.Highlights,
            body.LineBlock,
            body.MathBlock,
            body.ParsedLiteral,
            body.PullQuote,
            body.Rubric,
            body.Sidebar,
            body.Topic,
            misc.Class,
            misc.Date,
            misc.DefaultRole,
            misc.Replace,
            misc.Role,
            misc.Title,
            misc.Unicode,
            parts.Footer,
            parts.Header,
            tables.ListTable,
            tables.RSTTable,
        )
    },
    tables.CSVTable: _Table,
    parts.Contents: _Contents,
    images.Image: _Unseen,
    images.Figure: _Figure,
}


class _Known(states.RSTState):
    """A state of docutils' parser, to which directives that are not listed are unknown."""

    nested_sm_cache: ClassVar[list[Any]] = []  # type: ignore[misc]  # not those of other parsers

    def __init__(self, state_machine: Any, debug: bool = False) -> None:
        super().__init__(state_machine, debug)
        self.nested_sm_kwargs = {"state_classes": _STATES, "initial_state": "Body"}

    def run_directive(self, directive: Any, match: Any, type_name: str, presets: Any) -> Any:
        this: Any = self  # only those among the states that parse directives are asked
        known = _DIRECTIVES.get(directive)
        if known is None:
            return this.unknown_directive(type_name)
        run: Any = states.Body.run_directive
        return run(this, known, match, type_name, presets)


_STATES = tuple(type(state.__name__, (_Known, state), {}) for state in states.state_classes)


def _inliner() -> states.Inliner:
    """Takes a paragraph as it stands where finding its markup would take too long."""
    inliner = states.Inliner()
    find = inliner.parse

    def parse(text: str, lineno: int, memo: Any, parent: Any) -> Any:
        work = len(text) * sum(map(text.count, _MARKS))
        if work <= _MOST_WORK and all(len(word) <= _LONGEST_WORD for word in text.split()):
            with suppress(RecursionError):  # of very many addresses
                return find(text, lineno, memo, parent)
        return [nodes.Text(text)], []

    # A subclass would miss what docutils reads from its class's own names.
    inliner.parse = parse  # type: ignore[method-assign]
    return inliner


class _Parser(Parser):
    """Reads lines of any length, and knows what may be in a document."""

    def parse(self, inputstring: str, document: nodes.document) -> None:
        self.state_classes = _STATES
        document.settings.line_length_limit = len(inputstring)
        super().parse(inputstring, document)
        _bound_substitutions(document, _MOST_GROWN + len(inputstring))


def _bound_substitutions(document: nodes.document, most: int) -> None:
    """Leave names as they stand in definitions, which docutils would expand without end.

    And everywhere, if what they stand for has more than `most` characters in all.
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


class _Writer(html5_polyglot.Writer):
    """Writes the document's body alone, with no template and no style sheet around it."""

    def translate(self) -> None:
        assert self.document is not None
        visitor = _Translator(self.document)
        self.document.walkabout(visitor)
        self.output = "".join(visitor.html_body)

    def assemble_parts(self) -> None:
        """Nothing: there is one part."""
