"""Turns reStructuredText into HTML and opens no file. Knows docutils; knows no other format.

docutils is told to insert no file and nothing raw, only its own directives are run, and pictures
are left out of the HTML, as its writer would open them. Of other directives, such as Sphinx's,
argument and content are text; what docutils cannot read stays as it is written.
"""

import re
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar

from docutils import nodes
from docutils.core import publish_parts
from docutils.parsers.rst import Directive, Parser, directives, states
from docutils.parsers.rst.directives import body, unchanged
from docutils.utils import Reporter
from docutils.writers import html5_polyglot

_SETTINGS = {
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "report_level": 5,
    "halt_level": 6,
    "_disable_config": True,
    "math_output": "LaTeX",
    "input_encoding": "unicode",
    "output_encoding": "unicode",
    "stylesheet_path": None,
    "sectnum_xform": False,
}
# Python's documents use Sphinx roles, which docutils alone would print as errors.
_ROLE = re.compile(r":(?:\w+:)?(?!sup:|superscript:)([a-z]+):`([^`]+)`")
# Two fields or more, and the blank line behind them.
_HEADER = re.compile(r"(?:[A-Z][\w-]*:.*\n(?:[ \t]+\S.*\n)*){2,}\n")
# Most characters of a paragraph in which markup is looked for, which takes time quadratic in them.
_LONGEST = 10_000


def rst_to_html(source: str) -> tuple[str, str]:
    """A document's header lines ("Name: value") as they are, and the rest as HTML.

    Python Enhancement Proposals begin with such lines, which markup would join into one.
    """
    header = _HEADER.match(source)
    rest = _ROLE.sub(_spell_role, source[header.end() :] if header else source)
    parser, writer = _RstParser(inliner=_inliner()), html5_polyglot.Writer()
    writer.translator_class = _Translator
    found = publish_parts(rest, parser=parser, writer=writer, settings_overrides=_SETTINGS)
    return header[0] if header else "", found["html_body"]


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
            found = _Unknown
        return this.run_directive(_Code if found is body.CodeBlock else found, match, name, presets)


# docutils finds the directives' construct here, by the function.
_KnownNames.explicit = copy(states.Body.explicit)  # type: ignore[attr-defined]
_KnownNames.explicit.constructs = [  # type: ignore[attr-defined]
    (_KnownNames.directive if read is states.Body.directive else read, pattern)
    for read, pattern in states.Body.explicit.constructs
]
_STATES = tuple(type(state.__name__, (_KnownNames, state), {}) for state in states.state_classes)


def _inliner() -> states.Inliner:
    """A parser of inline markup that leaves a very long paragraph as it is."""
    inliner = states.Inliner()
    find = inliner.parse

    def parse(text: str, lineno: int, memo: Any, parent: Any) -> Any:
        is_long = len(text) > _LONGEST
        return ([nodes.Text(text)], []) if is_long else find(text, lineno, memo, parent)

    # Not a subclass: docutils looks some things up in the class itself.
    inliner.parse = parse  # type: ignore[method-assign]
    return inliner


class _RstParser(Parser):
    """Reads lines of any length, with the states from above."""

    def parse(self, inputstring: str, document: nodes.document) -> None:
        self.state_classes = _STATES
        document.settings.line_length_limit = len(inputstring)
        super().parse(inputstring, document)
        document.settings.line_length_limit = _LONGEST  # of what a substitution stands for
        _spell_errors(document)
        for definition in document.substitution_defs.values():  # which could expand each other
            for reference in list(definition.findall(nodes.substitution_reference)):
                reference.replace_self(nodes.Text(reference.astext()))


def _spell_errors(document: nodes.document) -> None:
    """Put in the place of an error, which nobody would see, the block that it is about."""
    for message in list(document.findall(nodes.system_message)):
        blocks = list(message.findall(nodes.literal_block))  # of what is inline the text stays
        if blocks and message["level"] >= Reporter.ERROR_LEVEL:
            message.replace_self(blocks)


class _Translator(html5_polyglot.HTMLTranslator):
    def visit_image(self, node: nodes.image) -> None:
        raise nodes.SkipNode
