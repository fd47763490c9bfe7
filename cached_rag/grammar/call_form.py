"""How a model writes calls of tools, found out from its chat template.

A template that knows tools lists them for the model, and writes the calls of earlier turns as the
model learned them. So made-up calls are rendered; what stands around their names and values is the
form. A form is taken if it reads from the template's text the calls that were given to it. Knows
templates; knows no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from cached_rag.errors import ConfigError
from cached_rag.grammar.arguments import JsonArguments, NamedArguments
from cached_rag.grammar.grammar import Json

Message = dict[str, Any]
Tool = Mapping[str, Any]
Call = tuple[str, Mapping[str, Any]]  # a tool's name and its arguments
# Renders messages with tools, with or without the header of an answer at the end.
Apply = Callable[[list[Message], Sequence[Tool], bool], str]

_NAME, _SAID = "qx_name", "qx said"
_JSON = JsonArguments()
_KEYS, _TEXTS, _NUMBERS = ("qxa", "qxb"), ("qxtext1", "qxtext2"), (77001, 77002)
_ID = "qxcall000"  # Mistral's templates want nine letters and digits
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "qx",
        "parameters": {"type": "object", "properties": {key: {} for key in _KEYS}, "required": []},
    },
}
_USER = {"role": "user", "content": "qx"}
# Turns from which a form must read these calls, if it is to be taken, and taken for several calls.
_CALL: Sequence[Call] = [("qx_other", {"qxa": "v", "qxb": 7, "qxc": [1, {"d": "e"}], "qxd": True})]
_TWO_CALLS: Sequence[Call] = [("qx_name", {"qxa": "v"}), ("qx_other", {"qxb": "w"})]
# A mark that is one token in most tokenizers, or a character.
_PIECE = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]|.", re.DOTALL)
_MARKS = re.compile(r"(<[^<>\s]+>|\s)*")
_LAST_MARK = re.compile(r"\s*<[^<>\s]+>\s*\Z")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: as JSON; what there is of it, if the answer was cut off.
        is_complete: whether it is all there.
    """

    name: str
    arguments: str
    is_complete: bool = True


@dataclass(frozen=True)
class CallForm:
    """The text around calls: open, then for each call begin name middle arguments end, then close.

    Attributes:
        separator: between two calls; None if a turn has one call at most.
        arguments: how they are written.
        lists: the template lists the tools; else a system message does.
        writes: the template writes calls; else they stand in the messages' text.
        in_channels: all that is said stands between marks of its own, as calls do.
    """

    opening: str
    begin: str
    middle: str
    end: str
    separator: str | None
    close: str
    arguments: JsonArguments | NamedArguments = _JSON
    lists: bool = True
    writes: bool = True
    in_channels: bool = False

    @classmethod
    def of(cls, apply: Apply, controls: Collection[str] = ()) -> CallForm:
        """The form that a template writes or a vocabulary tells of, or else that of Hermes' models.

        Args:
            apply: renders messages.
            controls: the control tokens' texts.
        """
        lists = False
        with suppress(TemplateError, ConfigError, TypeError, ValueError):
            lists = _NAME in apply([_USER], [_TOOL], True)
            if form := _Discovery(apply).form():
                return replace(form, lists=lists)
        return _LFM2 if lists and "<|tool_call_start|>" in controls else HERMES

    @property
    def start(self) -> str:
        """What the first call of an answer begins with."""
        return self.opening + self.begin

    def alone(self) -> CallForm:
        """The form of turns that have one call at most."""
        begin, end = self.start, self.end + self.close
        return replace(self, opening="", begin=begin, end=end, separator=None, close="")

    def read(self, rest: str, schemas: Mapping[str, Json]) -> list[ToolCall]:
        """The calls in a text that goes on behind what begins the first one.

        Args:
            schemas: the parameters of each tool.
        """
        calls: list[ToolCall] = []
        while True:
            leads = self.arguments.leads(self.end)
            places = [at for lead in leads if (at := rest.find(self.middle + lead)) >= 0]
            if not places:
                return calls
            name, rest = rest[: min(places)], rest[min(places) + len(self.middle) :]
            given, end = self.arguments.read(rest, schemas.get(name, {}), self.end)
            calls.append(ToolCall(name, given, is_complete=end is not None))
            next_one = self.end + (self.separator or "") + self.begin
            if end is None or self.separator is None or not rest.startswith(next_one, end):
                return calls
            rest = rest[end + len(next_one) :]

    def written(self, calls: Sequence[Call]) -> str:
        """Calls, each a name and its arguments, as the model is to write them."""
        texts = [
            f"{self.begin}{name}{self.middle}{self.arguments.written(arguments)}{self.end}"
            for name, arguments in calls
        ]
        return self.opening + (self.separator or "").join(texts) + self.close


HERMES = CallForm(
    *("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", ""),
    lists=False,
    writes=False,
)
# LFM2's templates list tools, and leave it to the messages how they are called.
_LFM2 = CallForm(
    *("<|tool_call_start|>[", "", "(", ")", ", ", "]<|tool_call_end|>"),
    arguments=NamedArguments("", ("='", "="), ("'", ""), ", "),
    writes=False,
)
# What gpt-oss writes itself, where its template has the tool's name in the turn's header.
_HARMONY: dict[str, Any] = {
    "begin": "<|channel|>commentary to=functions.",
    "middle": " <|constrain|>json<|message|>",
    "in_channels": True,
}


_UNKNOWN = "the template writes calls in no form that is known here"


class _Discovery:
    """Finds the form in which one template writes calls."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        header = apply([_USER], [_TOOL], True)
        said = apply([_USER, {"role": "assistant", "content": _SAID}], [_TOOL], False)
        at = said.index(_SAID)
        self._base = common_begin(header, said[:at])
        # What a text or calls begin with behind that, such as an empty thought, is no mark.
        self._leads = said[len(self._base) : at], header[len(self._base) :]
        self._after = said[at + len(_SAID) :]

    def form(self) -> CallForm | None:
        """The form; None if none is found that reads what the template writes."""
        for find in (self._of_json, self._of_names):
            with suppress(TemplateError, ValueError):
                form = find()
                if form.separator is None or not self._reads(form, _TWO_CALLS):
                    form = form.alone()
                if self._reads(form, _CALL):
                    is_channel = form.begin.strip() == "to=functions."
                    return replace(form, **_HARMONY) if is_channel else form
        return None

    def _turn(self, *calls: Call) -> str:
        """What a template writes of calls, and nothing of the turn around them."""
        listed = [
            {"type": "function", "id": _ID, "function": {"name": name, "arguments": dict(given)}}
            for name, given in calls
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": listed}
        text = self._apply([_USER, turn], [_TOOL], False)
        base = common_begin(self._base, text)
        if not _MARKS.fullmatch(self._base[len(base) :]):  # such as a thought that is left out
            raise ValueError(_UNKNOWN)
        text = text[len(base) :]
        text = text.removeprefix(max(filter(text.startswith, self._leads), key=len, default=""))
        text = text.lstrip("\n")
        if not _LAST_MARK.search(self._after):
            return text.removesuffix(self._after)
        for found in re.finditer(re.escape(self._after), text):
            if _MARKS.fullmatch(text, found.end()):  # some templates begin the next turn
                return text[: found.start()]
        if _LAST_MARK.search(end := _end(text, self._after)):
            return text.removesuffix(end)
        return _LAST_MARK.sub("", text)  # calls end a turn by another mark than texts do

    def _reads(self, form: CallForm, calls: Sequence[Call]) -> bool:
        """Whether a form reads calls from what the template writes of them."""
        text = self._turn(*calls)
        found = form.read(text.removeprefix(form.start), {})
        read = [(call.name, json.loads(call.arguments)) for call in found if call.is_complete]
        return text.startswith(form.start) and read == list(calls)

    def _of_json(self) -> CallForm:
        given = {_KEYS[0]: _TEXTS[0]}
        call = (_NAME, given)
        opening, middle, last = _around_json(self._turn(call), given)
        gap = None
        with suppress(TemplateError, ValueError):  # some turns have one call at most
            gap = _around_json(_around_json(self._turn(call, call), given)[2], given)[0]
        return _assembled(opening, middle, last, gap, JsonArguments())

    def _of_names(self) -> CallForm:
        texts = dict(zip(_KEYS, _TEXTS, strict=True))
        numbers = dict(zip(_KEYS, _NUMBERS, strict=True))
        opening, first, middle, between, again, tail = _split(self._turn((_NAME, texts)), texts)
        other = _split(self._turn((_NAME, numbers)), numbers)
        before = _end(first, between)
        between = between.removesuffix(before)
        after = common_begin(between, tail)
        last = tail[len(after) :]
        if middle != again or other[2] != other[4] or not other[5].endswith(last) or not last:
            raise ValueError(_UNKNOWN)
        arguments = NamedArguments(
            before,
            (middle, other[2]),
            (after, other[5].removesuffix(last)),
            between[len(after) :],
        )
        call, gap = (_NAME, texts), None
        with suppress(TemplateError, ValueError):  # some turns have one call at most
            gap = _split(_split(self._turn(call, call), texts)[5], texts)[0][len(after) :]
        return _assembled(opening, first.removesuffix(before), last, gap, arguments)


def _split(text: str, arguments: Mapping[str, Any]) -> list[str]:
    """The pieces of a text around a call's name, and the names and values of its arguments."""
    marks = [_NAME, *(str(one) for pair in arguments.items() for one in pair)]
    any_mark = "|".join(marks)
    if re.findall(any_mark, text)[: len(marks)] != marks:
        raise ValueError(_UNKNOWN)
    return re.split(any_mark, text, maxsplit=len(marks))


def _around_json(text: str, arguments: Mapping[str, Any]) -> tuple[str, str, str]:
    """The pieces of a text before a call's name, between it and its arguments, and behind them."""
    name, key = text.index(_NAME), text.index(json.dumps(_KEYS[0]))
    begin = text.rindex("{", name, key)  # a ValueError where there is none
    found, end = json.JSONDecoder().raw_decode(text, begin)
    if found != arguments:
        raise ValueError(_UNKNOWN)
    return text[:name], text[name + len(_NAME) : begin], text[end:]


def _assembled(
    opening: str,
    middle: str,
    last: str,
    gap: str | None,
    arguments: JsonArguments | NamedArguments,
) -> CallForm:
    """A form of what stands before, within, behind and between calls."""
    if gap is None:
        return CallForm("", opening, middle, last, None, "", arguments)
    begin = _end(opening, gap)
    rest = gap.removesuffix(begin)
    end = common_begin(rest, last)
    return CallForm(
        opening.removesuffix(begin),
        begin,
        middle,
        end,
        rest[len(end) :],
        last[len(end) :],
        arguments,
    )


def common_begin(one: str, other: str) -> str:
    """The marks and characters that both texts begin with."""
    pairs = zip(_PIECE.findall(one), _PIECE.findall(other), strict=False)
    return "".join(mine for mine, its in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _end(one: str, other: str) -> str:
    """The marks and characters that both texts end with."""
    pairs = zip(reversed(_PIECE.findall(one)), reversed(_PIECE.findall(other)), strict=False)
    same = [mine for mine, its in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return "".join(reversed(same))
