"""Chat messages as a prompt's text. Knows a model's template; knows no token.

What spells a control token in a message, a tool or another value stays text: the template writes a
mark before it, by which it is found again in the prompt, whatever the template has done to the text
around it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import accumulate, count, groupby, pairwise
from typing import Any

from jinja2 import Environment, TemplateError

from cached_rag.backends.prompt_text import Backends, Message, Rendered, Spans
from cached_rag.backends.resolve import plain_json
from cached_rag.backends.untrusted import bounded
from cached_rag.errors import ConfigError
from cached_rag.grammar.call_form import CallForm, Tool
from cached_rag.grammar.thought import ThoughtForm
from cached_rag.grammar.tools import check_text, checked, is_about_tools, mapped_texts, told

# Arguments of `apply_chat_template` that are not the user's to give.
_OURS = {
    *("conversation", "messages", "tools", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "return_tensors", "return_dict", "chat_template"),
}
# Most characters of a prompt; no model reads as many.
_MOST_CHARACTERS = 1 << 26
# Most sets of values, of single requests, with which a template is kept.
_MOST_OTHERS = 16
# Most digits of a number in a template.
_MOST_DIGITS = 6


class ChatTemplate:
    """A tokenizer's chat template, if it has one."""

    def __init__(self, tokenizer: Any, backends: Backends, kwargs: Mapping[str, Any]) -> None:
        """Look at a tokenizer.

        Args:
            backends: the tokenizer's, which find control tokens.
            kwargs: what the template is given besides the messages.

        Raises:
            ConfigError: one of them is this library's to give.
        """
        self.kwargs = dict(kwargs)
        if taken := sorted(self.kwargs.keys() & _OURS):
            raise ConfigError(
                f"chat_template_kwargs has {taken}, which this library gives the template itself; "
                "leave it out"
            )
        self._others: dict[str, ChatTemplate] = {}
        self._tokenizer = tokenizer
        self._backends = backends

    @cached_property
    def call_form(self) -> CallForm:
        """How the model writes calls of tools."""
        return CallForm.of(self._templated, self._backends.controls)

    @cached_property
    def thought_form(self) -> ThoughtForm | None:
        """Where the model thinks before it answers; None for a model that does not."""
        return ThoughtForm.of(self._templated, "\n".join(self._sources)) if self._sources else None

    @property
    def _sources(self) -> list[str]:
        """The template, or all of a model that has several; empty if there is none."""
        known = getattr(self._tokenizer, "chat_template", None) or {}
        return list(known.values()) if isinstance(known, dict) else [known]

    def render(
        self,
        prompt: str | Sequence[Message],
        *,
        open_answer: bool = True,
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """A prompt string as it is, or chat messages through the model's template.

        Messages may have OpenAI's `tool_calls`, and the role "tool" for a call's result. Where the
        template knows neither, they are told to the model as text. Where it has no place for a
        system message, that is the beginning of the user's next one; where it wants turns that
        alternate, neighbours of one role are one message.

        Args:
            open_answer: end with the template's header of the assistant's answer.
            tools: that the model may call, in OpenAI's form; only with messages.
            kwargs: what the template is given for this prompt, instead of or besides what it is
                given for all.

        Raises:
            ConfigError: malformed messages; or the model has no chat template, or its template
                refuses the messages; or tools are given with a string.
        """
        if isinstance(prompt, str):
            if tools:
                raise ConfigError("tools are listed by the chat template: give messages, no string")
            return Rendered(prompt)
        if kwargs:
            return self._with(kwargs).render(prompt, open_answer=open_answer, tools=tools)
        if not hasattr(prompt, "__iter__"):
            raise ConfigError(f"a prompt is a string, or a list of messages, not {prompt!r}")
        messages = [checked(message) for message in prompt]
        # A mark is put before each control token, and the template sees the content otherwise
        # unchanged. It is random, so no document can contain it; and of digits, so that no template
        # changes it.
        mark = f"{secrets.randbits(128):039}"

        def change(text: str) -> str:
            return self._marked(text, mark)

        marked = mapped_texts(messages, change)
        listed = mapped_texts([dict(tool) for tool in tools], change)
        has_tools = bool(tools) or any(map(is_about_tools, messages))
        if has_tools:
            marked, listed = told(marked, listed, self.call_form)
        values, template = mapped_texts(self.kwargs, change), self
        if values != self.kwargs:  # else it keeps what it found out of itself
            template = ChatTemplate(self._tokenizer, self._backends, values)
        return self._unmarked(template._apply_template(marked, listed, open_answer), mark)

    def _with(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """The template with further values; a few are kept, for what they found out of themselves.

        Raises:
            ConfigError: one of the values is this library's to give, no JSON or too deep.
        """
        name = plain_json("chat_template_kwargs", kwargs)
        found = self._others.get(name)
        if found is None:
            check_text(kwargs)
            found = ChatTemplate(self._tokenizer, self._backends, {**self.kwargs, **kwargs})
            if len(self._others) >= _MOST_OTHERS:
                self._others.clear()
            self._others[name] = found
        return found

    def _marked(self, content: str, mark: str) -> str:
        """The content with a mark before each control token."""
        begins = [control.core[0] for control in self._backends.find(content)]
        cuts = [0, *begins, len(content)]
        return mark.join(content[begin:end] for begin, end in pairwise(cuts)) if begins else content

    def _unmarked(self, text: str, mark: str) -> Rendered:
        """The text without marks; the control tokens that follow them become literal spans."""
        first, *others = text.split(mark)
        if not others:
            return Rendered(text, is_chat=True)
        places = [*accumulate(map(len, others[:-1]), initial=len(first))]
        marked, text = Spans([(place, place + 1) for place in places]), "".join([first, *others])
        cores = (control.core for control in self._backends.find(text))
        return Rendered(text, tuple(core for core in cores if marked.touch(*core)), is_chat=True)

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool], open_answer: bool
    ) -> str:
        if not self._sources:
            raise ConfigError(
                "this model has no chat template; give the prompt as one string, or use an "
                "instruction-tuned model"
            )
        refusals = []
        for attempt in self._attempts(messages):
            try:
                return self._templated(attempt, tools, open_answer)
            except TemplateError as error:
                refusals.append(error)
        raise ConfigError(
            f"the model's chat template refuses the messages: {refusals[0]}"
        ) from refusals[0]

    def _attempts(self, messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The messages, and what says the same to templates that refuse them."""
        folded = _merged(_as_users(messages))
        if any(message["role"] == "system" for message in messages) and not self._takes_system:
            return [folded]
        merged = _merged(messages)
        later = _merged([*merged[:1], *_as_users(merged[1:])])
        attempts = [messages, merged, later, folded]
        return [one for at, one in enumerate(attempts) if one not in attempts[:at]]

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template writes what a system message says."""
        mark = str(secrets.randbits(64))
        said = [{"role": "system", "content": mark}, {"role": "user", "content": "qx"}]
        try:
            return mark in self._templated(said, (), True)
        except TemplateError:
            return False

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template takes the content of a message as a list of parts only.

        Raises:
            ConfigError: it writes no content, whether text or parts.
        """
        mark = str(secrets.randbits(64))
        shown = {}
        for content in (mark, _parts(mark)):
            with suppress(TemplateError):
                text = self._run([{"role": "user", "content": content}], (), True)
                if mark in text:
                    return content is not mark
                shown[type(content)] = text
        if str in shown:
            raise ConfigError(
                "the model's chat template leaves out what messages say, as text and as parts; "
                "give the prompt as one string, or use another template or model"
            )
        return False  # it wants other messages than one of the user

    def _templated(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool], open_answer: bool
    ) -> str:
        if self._takes_parts:
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        return self._run(messages, tools, open_answer)

    def _run(self, messages: list[dict[str, Any]], tools: Sequence[Tool], open_answer: bool) -> str:
        """What the template makes of messages.

        Raises:
            TemplateError: it refuses them.
            ConfigError: it fails, or not within bounds.
        """
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": open_answer}
        options |= self.kwargs
        if tools:
            options["tools"] = [dict(tool) for tool in tools]
        for source in self._sources:
            _check_numbers(source)
        try:
            text = bounded(
                "the model's chat template",
                lambda: str(self._tokenizer.apply_chat_template(messages, **options)),
            )
        except (TemplateError, ConfigError):
            raise
        except Exception as error:  # whatever a template does with odd messages, or by itself
            raise ConfigError(
                "the model's chat template fails on this prompt "
                f"({type(error).__name__}: {error}); give the prompt as one string, or use another "
                "template or model"
            ) from error
        if len(text) > _MOST_CHARACTERS:
            raise ConfigError(
                f"the model's chat template makes {len(text)} characters of this prompt, more than "
                f"{_MOST_CHARACTERS}; ask with less text, or use another template or model"
            )
        return text


def _parts(content: str) -> list[dict[str, str]]:
    """A content as templates of models for pictures and text take it."""
    return [{"type": "text", "text": content}]


@lru_cache
def _check_numbers(source: str) -> None:
    """Refuse what takes long in a single step, which cannot be stopped: powers, huge texts."""
    for line, kind, word in Environment().lex(source):
        if (kind, word) == ("operator", "**") or (kind == "integer" and len(word) > _MOST_DIGITS):
            raise ConfigError(
                f"the model's chat template computes with huge numbers (line {line}: {word}), "
                "which no template needs; use another template or model"
            )


def _as_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [m | {"role": "user"} if m["role"] == "system" else m for m in messages]


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with neighbours of one role joined by a blank line.

    Some templates accept only turns that alternate between roles.
    """
    numbers = count()
    turns = [
        list(turn)
        for _, turn in groupby(
            messages, lambda message: next(numbers) if is_about_tools(message) else message["role"]
        )
    ]
    return [
        {**turn[0], "content": "\n\n".join(m["content"] for m in turn if m["content"])}
        for turn in turns
    ]
