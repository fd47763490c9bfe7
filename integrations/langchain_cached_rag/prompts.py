"""Prompt templates: what stands before their documents. Knows templates; knows no message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder

from cached_rag import Engine

Prompt = str | list[dict[str, str]]


def head_of(
    engine: Engine,
    template: BasePromptTemplate[Any],
    variable: str,
    as_prompt: Callable[[Any], Prompt],
) -> Any:
    """What every prompt of a template says before the documents, as a prefix for `encode`.

    Args:
        as_prompt: turns a formatted template into what the engine takes.

    Raises:
        ValueError: the template has no such variable, or another one stands before it.
    """
    if variable not in template.input_variables:
        raise ValueError(
            f"the prompt has no variable {variable!r}; it has {sorted(template.input_variables)}"
        )
    marks = {name: f"[the value of {name}]" for name in template.input_variables}
    listed = _placeholders(template)
    values = {n: [HumanMessage(mark)] if n in listed else mark for n, mark in marks.items()}
    prompt = as_prompt(template.format_prompt(**values))
    before = marks.pop(variable)
    if isinstance(prompt, str):
        head: Any = prompt[: prompt.index(before)]
        text = head
    else:
        head = engine.head(prompt, before)
        text = head.text
    for name, mark in marks.items():
        if mark in text:
            raise ValueError(
                f"{{{name}}} stands before {{{variable}}} in the prompt, so that prompts have no "
                f"common beginning to encode documents behind; put {{{variable}}} first, or leave "
                "the prompt out"
            )
    return head


def _placeholders(template: BasePromptTemplate[Any]) -> set[str]:
    """Variables that stand for messages."""
    parts = template.messages if isinstance(template, ChatPromptTemplate) else []
    return {part.variable_name for part in parts if isinstance(part, MessagesPlaceholder)}
