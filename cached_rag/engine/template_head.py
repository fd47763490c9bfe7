"""Finds what all prompts of a template begin with. Works with the templates of any framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from cached_rag.backends.prompt_text import Message, Rendered
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError


def template_head(
    engine: Engine,
    variables: Iterable[str],
    variable: str,
    fill: Callable[[Mapping[str, str]], str | Sequence[Message]],
) -> str | Rendered:
    """What every prompt of a template says before its chunks, as the prefix of `Engine.encode`.

    Args:
        variables: names of all variables of the template.
        variable: the one that is filled with chunks.
        fill: makes the prompt, a string or chat messages, from a value for each variable.

    Raises:
        ConfigError: the template has no such variable, or another one stands before it.
    """
    marks = {name: f"[the value of {name}]" for name in variables}
    if variable not in marks:
        raise ConfigError(f"the prompt has no variable {variable!r}; it has {sorted(marks)}")
    prompt, before = fill(marks), marks[variable]
    if isinstance(prompt, str):
        head: str | Rendered = prompt[: prompt.index(before)]
        text = str(head)
    else:
        head = engine.head(prompt, before)
        text = head.text
    for name, mark in marks.items():
        if mark in text:
            raise ConfigError(
                f"{{{name}}} stands before {{{variable}}} in the prompt, so that prompts have no "
                f"common beginning to encode documents behind; put {{{variable}}} first, or leave "
                "the prompt out"
            )
    return head
