"""Where a model thinks before it answers, found out from its chat template.

A made-up thought is rendered; what stands around it is the form. Templates that leave the thoughts
of earlier turns out name the marks all the same. Knows templates; knows no model.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from jinja2 import TemplateError

from cached_rag.errors import ConfigError
from cached_rag.grammar.call_form import Apply, common_begin
from cached_rag.grammar.grammar import overlap

_SAID, _THOUGHT = "qx said", "qx thought"
_USER = {"role": "user", "content": "qx"}
_NAMES = ("reasoning_content", "thinking", "reasoning")  # a template reads one of them
# Marks such as <think> or [THINK], which templates name that show no thought.
_MARK = re.compile(r"(<|\[)([\w:]*think[\w:]*)(>|\])", re.IGNORECASE)
# What a text ends with: such a mark, one that stands between two others, or else its last line.
_ENDS = (
    re.compile(r"[<\[][^<>\[\]\s]*think[^<>\[\]\s]*[>\]]\s*\Z", re.IGNORECASE),
    re.compile(r"<[^<>\s]+>think<[^<>\s]+>\s*\Z"),
    re.compile(r"[^\n]+\s*\Z"),
)
# Gemma 4's templates show thoughts only before calls.
_GEMMA = "<|channel>thought", "<channel|>"


@dataclass(frozen=True)
class ThoughtForm:
    """The text around a thought, without white space at its ends.

    Attributes:
        opening: before it; the header of an answer may end with it.
        close: behind it.
        lead: before what is said, whether there was a thought or not.
    """

    opening: str
    close: str
    lead: str = ""

    @classmethod
    def of(cls, apply: Apply, source: str) -> ThoughtForm | None:
        """The form that a template writes, or else the marks that it names; None for neither.

        Args:
            apply: renders messages.
            source: the template.
        """
        with suppress(TemplateError, ConfigError, TypeError, ValueError):
            if form := _written(apply):
                return form
        if all(mark in source for mark in _GEMMA):
            return cls(*_GEMMA)
        for begin, name, end in _MARK.findall(source):
            if (close := f"{begin}/{name}{end}") in source:
                return cls(f"{begin}{name}{end}", close)
        return None

    def read(self, text: str, *, is_open: bool = False, is_over: bool = True) -> tuple[str, str]:
        """The thought in an answer, and what is said; both grow with the answer.

        Args:
            is_open: the prompt ends with the opening, so the answer begins within the thought.
            is_over: no more of it comes; else an ending that may begin a mark belongs to neither.
        """
        thoughts, rest = "", text.lstrip()
        while is_open or rest.startswith(self.opening):
            one, found, behind = rest.removeprefix(self.opening).partition(self.close)
            held = 0 if found or is_over else overlap(one, self.close)
            thoughts = f"{thoughts}\n\n{one[: len(one) - held].strip()}".strip()
            rest, is_open = behind.lstrip(), False
            if not found:
                return thoughts, ""
        marks = (self.opening, self.lead)
        if not is_over and any(mark.startswith(rest) for mark in marks if mark):
            return thoughts, ""
        said = rest.removeprefix(self.lead)
        return thoughts, said if thoughts or said != rest else text


def _written(apply: Apply) -> ThoughtForm | None:
    """The form, if the template writes a thought."""
    turn = {"role": "assistant", "content": _SAID}
    header = apply([_USER], (), True)
    plain = apply([_USER, turn], (), False)
    text = apply([_USER, turn | dict.fromkeys(_NAMES, _THOUGHT)], (), False)
    at, said = text.find(_THOUGHT), text.find(_SAID)
    if not 0 <= at < said:
        return None
    plain = plain[: plain.index(_SAID)]
    before = text[:at]
    base = common_begin(common_begin(before, plain), header)
    lead = plain[len(common_begin(common_begin(plain, before), header)) :].strip()
    # A header that begins a thought may not have it in earlier turns.
    begun = header[len(base) :].strip()
    opening = before[len(base) :].strip() or (begun if begun != lead else "") or _last(before)
    between = text[at + len(_THOUGHT) : said].strip()
    close = between.removesuffix(lead).strip() or between
    if lead.startswith(opening):  # an empty thought
        lead = ""
    return ThoughtForm(opening, close, lead) if opening and close else None


def _last(text: str) -> str:
    found = next(filter(None, (end.search(text) for end in _ENDS)), None)
    return found[0].strip() if found else ""
