"""Chat messages as a prompt's text. Knows a model's template; knows no token.

What spells a control token in a message stays text: the template writes a mark before it, by which
it is found again in the prompt, whatever the template has done to the message around it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, count, groupby, pairwise
from typing import Any

from jinja2 import TemplateError

from cached_rag.backends.controls import Backends
from cached_rag.backends.prompt_text import Message, Rendered, Spans
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
        # unchanged. It is random, so no document can contain it; and of digits, so that no template
        # changes it.
        mark = f"{secrets.randbits(128):039}"

        def change(text: str) -> str:
            return self._marked(text, mark)

        check_text([dict(tool) for tool in tools])
        marked = [mapped(message, change) for message in messages]
        listed = mapped_texts([dict(tool) for tool in tools], change)
        has_tools = bool(tools) or any(map(is_about_tools, messages))
        if has_tools and not self.call_form.is_native:
            marked, listed = told(marked, listed), []
        return self._unmarked(self._apply_template(marked, listed, open_answer), mark)

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
