"""Prompt templates: what stands before their documents. Knows templates; knows no node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.prompts import BasePromptTemplate

if TYPE_CHECKING:
    from llama_index.llms.cached_rag.base import CachedRAGLLM

Prompt = str | list[dict[str, str]]


def head_of(llm: CachedRAGLLM, template: BasePromptTemplate, variable: str) -> Any:
    """What every prompt of a template says before the documents, as a prefix for `encode`.

    Raises:
        ValueError: the template has no such variable, or another one stands before it.
    """
    if variable not in template.template_vars:
        names = sorted(template.template_vars)
        raise ValueError(f"the prompt has no variable {variable!r}; it has {names}")
    marks = {name: f"[the value of {name}]" for name in template.template_vars}
    if llm.metadata.is_chat_model:
        messages = llm._extend_messages(template.format_messages(llm=llm, **marks))
        prompt = llm.chat_prompt(messages)
    else:
        prompt = llm._extend_prompt(template.format(llm=llm, **marks))
    before = marks.pop(variable)
    if isinstance(prompt, str):
        head: Any = prompt[: prompt.index(before)]
        text = head
    else:
        head = llm.loaded_engine().head(prompt, before)
        text = head.text
    for name, mark in marks.items():
        if mark in text:
            raise ValueError(
                f"{{{name}}} stands before {{{variable}}} in the prompt, so that prompts have no "
                f"common beginning to encode documents behind; put {{{variable}}} first, or leave "
                "the prompt out"
            )
    return head
