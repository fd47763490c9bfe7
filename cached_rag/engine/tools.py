"""Tools for one answer: what the prompt says of them, what the answer may be, and its calls."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from cached_rag.backends.prompt_text import Message, Rendered
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.config import GenerationConfig
from cached_rag.errors import ConfigError
from cached_rag.grammar.call_form import ToolCall
from cached_rag.grammar.grammar import Grammar, overlap
from cached_rag.grammar.thought import ThoughtForm
from cached_rag.grammar.tools import ToolChoice, check_text, read_answer, tool_grammar


@dataclass(frozen=True)
class CallPart:
    """What a piece of an answer adds to a call.

    Attributes:
        index: which call of the answer it is.
        name: the tool's, in a call's first part; None in later ones.
        arguments: more of the JSON.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Tools:
    """Tools that a model may, or must, call in its answer.

    `engine.generate(tools.prompt(messages), tools.settings(config))` asks, and `read` takes the
    answer apart.

    Thinking models write a thought before what they say. `read` leaves it out, and `parts` has
    it, unless the answer must have another form than text or calls.

    Attributes:
        tokenization: of the engine that is asked (`Engine.tokenization`).
        tools: in OpenAI's form.
        choice: "auto", "none", "required", or the name of the tool to call.
        parallel: whether there may be several calls in one answer; None if only where the model
            is free to call none. One that must call repeats itself, if it is small.
        schema: JSON schema of answers that call no tool; True for any object, None for any text.
        template_kwargs: what the chat template is given for this prompt, such as
            {"enable_thinking": False}.
        parts_thoughts: thoughts are told apart from what is said; False for prompts that are no
            chat, and for answers in a form that `tools` and `schema` do not say.

    Raises:
        ConfigError: no such tool, or one that is malformed.
    """

    tokenization: Tokenization
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = "auto"
    parallel: bool | None = None
    schema: Mapping[str, Any] | Literal[True] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    parts_thoughts: bool = True

    def __post_init__(self) -> None:
        if not self.tools and self.choice not in ("auto", "none"):
            raise ConfigError(f"tools are to be called ({self.choice}), and there is none")
        check_text(self.tools)

    @property
    def is_offered(self) -> bool:
        """Whether the answer may call any."""
        return bool(self.tools) and self.choice != "none"

    @property
    def may_think(self) -> bool:
        """Whether the answer may begin with a thought."""
        return self._thought_form is not None

    @property
    def is_forced(self) -> bool:
        """Whether the answer can be nothing but calls."""
        return bool(self.tools) and self.choice not in ("auto", "none")

    def settings(self, config: GenerationConfig) -> GenerationConfig:
        """The settings of an answer in this form; a grammar of their own is kept.

        Stop strings are left out where a tool must be called, or the answer is JSON. They are meant
        for text, and would end it in the midst, such as at a line break; the grammar ends it.
        """
        if config.grammar is not None:
            return config
        stop = () if self.is_forced or self.schema is not None else config.stop
        return config.replace(grammar=self.grammar, stop=stop, shows_control=self._shows_control)

    def prompt(self, messages: str | Sequence[Message]) -> Rendered:
        """The prompt, in which the tools are listed as the model's template does it."""
        return self.tokenization.template.render(
            messages, tools=self.tools if self.is_offered else (), kwargs=self.template_kwargs
        )

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer may be; None for anything."""
        schema = {"type": "object"} if self.schema is True else self.schema
        check_text(schema)
        if not self.is_offered:
            return None if schema is None else Grammar.json(schema)
        return tool_grammar(
            self.tools,
            self.choice,
            self.tokenization.template.call_form,
            self.tokenization.controls,
            parallel=self.choice == "auto" if self.parallel is None else self.parallel,
            schema=schema,
            thought=self.tokenization.template.thought_form,
        )

    def read(self, text: str, *, is_over: bool = True) -> tuple[str, list[ToolCall]]:
        """What an answer says before its calls, and the calls; see `parts`."""
        _, said, calls = self.parts(text, is_over=is_over)
        return said, calls

    def parts(self, text: str, *, is_over: bool = True) -> tuple[str, str, list[ToolCall]]:
        """What an answer thinks, what it says then, and its calls.

        Args:
            text: the answer so far.
            is_over: no more of it comes.
        """
        calls: list[ToolCall] = []
        thought, said = self._parted(text, is_over=is_over)
        if self.is_offered:
            form, is_forced = self.tokenization.template.call_form, self.is_forced
            said, calls = read_answer(said, form, self.tools, is_over=is_over, is_forced=is_forced)
        if self._shows_control:
            thought, said = (self.tokenization.hidden.sub("", one) for one in (thought, said))
        return thought, said, calls

    def _parted(self, text: str, *, is_over: bool) -> tuple[str, str]:
        """The thought, and the rest."""
        form = self._thought_form
        if form is None:
            return "", text
        thought, rest = form.read(text, is_open=self._begins_thought, is_over=is_over)
        if not rest and self.is_offered:  # it may call without an end of its thought
            begin = self.tokenization.template.call_form.start
            thought, start, _ = thought.partition(begin)
            if is_over:  # a call may end with white space, which the thought has not
                rest = start and text[text.index(begin) :]
            elif not start:
                thought = thought[: len(thought) - overlap(thought, begin)]
        return thought.strip(), rest

    @cached_property
    def _thought_form(self) -> ThoughtForm | None:
        has_other_form = self.is_forced or self.schema is not None
        may_think = self.parts_thoughts and not has_other_form
        return self.tokenization.template.thought_form if may_think else None

    @cached_property
    def _begins_thought(self) -> bool:
        """Whether the prompt's last words are a thought's first ones."""
        asked = [{"role": "user", "content": "?"}]
        prompt = self.tokenization.template.render(asked, kwargs=self.template_kwargs)
        form = self._thought_form
        return form is not None and prompt.text.rstrip().endswith(form.opening)

    @cached_property
    def _shows_control(self) -> bool:
        """Whether calls, or thoughts, may stand between tokens that no text shows."""
        form = self._thought_form
        marks = f"{form.opening} {form.close} {form.lead}" if form else ""
        return self.is_offered or self.tokenization.hidden.search(marks) is not None

    def growing(self) -> GrowingAnswer:
        """Reads an answer that comes in pieces."""
        return GrowingAnswer(self)


class GrowingAnswer:
    """An answer that comes in pieces, and what each of them adds to text and calls.

    Attributes:
        new_thought: what the last piece added to the thought.
        calls: those of the answer so far.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.calls: list[ToolCall] = []
        self._answer = self._said = self._thought = self.new_thought = ""
        self._shown: list[str] = []

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called so far."""
        return bool(self._shown)

    def push(self, piece: str, *, is_over: bool = False) -> tuple[str, list[CallPart]]:
        """What is new and certain: text, and parts of calls."""
        if not (self._tools.is_offered or self._tools.may_think):
            return piece, []
        self._answer += piece
        thought, said, self.calls = self._tools.parts(self._answer, is_over=is_over)
        self.new_thought, self._thought = thought[len(self._thought) :], thought
        new, self._said = said[len(self._said) :], max(self._said, said, key=len)
        parts = []
        for index, call in enumerate(self.calls):
            is_new = index == len(self._shown)
            if is_new:
                self._shown.append("")
            added = call.arguments[len(self._shown[index]) :]
            self._shown[index] = call.arguments
            if is_new or added:
                parts.append(CallPart(index, call.name if is_new else None, added))
        return new, parts


def new_call_id() -> str:
    """A name for a call, as results of it refer to it."""
    return f"call_{uuid.uuid4().hex[:24]}"
