"""What all prompts of a template begin with. Knows no framework's templates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from cached_rag.backends.tokenizer import Message, Rendered
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError


def template_head(
    engine: Engine,
    variables: Iterable[str],
    variable: str,
    fill: Callable[[Mapping[str, str]], str | Sequence[Message]],
) -> str | Rendered:
    """What every prompt of a template says before its chunks, as a prefix for `Engine.encode`.

    Args:
        variables: the template's.
        variable: the one that chunks go to.
        fill: the template's prompt with these values: a string, or messages.

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
