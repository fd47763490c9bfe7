"""Chat messages as a prompt's text. Knows a model's template; knows no token.

What spells a control token in a message stays text: the template writes a mark before it, by which
it is found again in the prompt, whatever the template has done to the message around it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count, groupby
from typing import Any

from jinja2 import TemplateError

from cached_rag.backends.controls import Backends
from cached_rag.backends.prompt_text import Message, Rendered
from cached_rag.errors import ConfigError
from cached_rag.grammar.calls import CallForm, Tool, told
from cached_rag.grammar.messages import check_text, checked, is_about_tools, mapped, mapped_texts

# Arguments of `apply_chat_template` that are not the user's to give.
_OURS = {
    *("conversation", "messages", "tools", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "return_tensors", "return_dict", "chat_template"),
}


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
        self._tokenizer = tokenizer
        self._backends = backends
        self._spelled = {token: text for text, token in backends.controls.items()}

    @cached_property
    def call_form(self) -> CallForm:
        """How the model writes calls of tools."""
        return CallForm.of(self._templated)

    def render(
        self,
        prompt: str | Sequence[Message],
        *,
        open_answer: bool = True,
        tools: Sequence[Tool] = (),
    ) -> Rendered:
        """A prompt string as it is, or chat messages through the model's template.

        Messages may have OpenAI's `tool_calls`, and the role "tool" for a call's result. Where the
        template knows neither, they are told to the model as text.

        Args:
            open_answer: end with the template's header of the assistant's answer.
            tools: that the model may call, in OpenAI's form; only with messages.

        Raises:
            ConfigError: malformed messages; or the model has no chat template, or its template
                refuses the messages; or tools are given with a string.
        """
        if isinstance(prompt, str):
            if tools:
                raise ConfigError("tools are listed by the chat template: give messages, no string")
            return Rendered(prompt)
        if not hasattr(prompt, "__iter__"):
            raise ConfigError(f"a prompt is a string, or a list of messages, not {prompt!r}")
        messages = [checked(message) for message in prompt]
        # A mark is put before each control token, and the template sees the content otherwise
        # unchanged. The mark is random, so no document can contain it.
        mark = f"\ue000{secrets.token_hex(16)}-"

        def change(text: str) -> str:
            return self._marked(text, mark)

        check_text([dict(tool) for tool in tools])
        marked = [mapped(message, change) for message in messages]
        listed = mapped_texts([dict(tool) for tool in tools], change)
        has_marks = marked != messages or listed != [*tools]
        has_tools = bool(tools) or any(map(is_about_tools, messages))
        if has_tools and not self.call_form.is_native:
            marked, listed = told(marked, listed), []
        text = self._apply_template(marked, listed, open_answer)
        return self._unmarked(text, mark) if has_marks else Rendered(text, is_chat=True)

    def _marked(self, content: str, mark: str) -> str:
        """The content with a mark and the token's id before each control token."""
        parts, done = [], 0
        for begin, end in self._backends.spelled_out(content):
            parts += [
                content[done:begin],
                f"{mark}{self._backends.controls[content[begin:end]]}\ue001",
            ]
            done = begin
        return "".join(parts) + content[done:]

    def _unmarked(self, text: str, mark: str) -> Rendered:
        """The text without marks; the control tokens that follow them become literal spans."""
        parts, literal, length, done = [], [], 0, 0
        for found in re.finditer(rf"{mark}(\d+)\ue001", text):
            parts.append(text[done : found.start()])
            length += found.start() - done
            token, done = self._spelled[int(found[1])], found.end()
            if text.startswith(token, done):
                literal.append((length, length + len(token)))
        return Rendered("".join(parts) + text[done:], tuple(literal), is_chat=True)

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool], open_answer: bool
    ) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "this model has no chat template; give the prompt as one string, or use an "
                "instruction-tuned model"
            )
        try:
            return self._templated(messages, tools, open_answer)
        except TemplateError as error:
            merged = _merged(messages)
            if len(merged) == len(messages):
                raise ConfigError(
                    f"the model's chat template refuses the messages: {error}"
                ) from error
            return self._apply_template(merged, tools, open_answer)
        except (TypeError, ValueError) as error:  # what a template does with an odd schema
            raise ConfigError(f"the model's chat template fails on this prompt: {error}") from error

    def _templated(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool], open_answer: bool
    ) -> str:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": open_answer}
        options |= self.kwargs
        if tools:
            options["tools"] = [dict(tool) for tool in tools]
        return str(self._tokenizer.apply_chat_template(messages, **options))


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
        {**turn[0], "content": "\n\n".join(message["content"] for message in turn)}
        for turn in turns
    ]
