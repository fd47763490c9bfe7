"""Prompt Markup Language: prompts made of modules that are prefilled once (Prompt Cache).

In the order in which they build on each other: `nodes`, `markup`, `whitespace` and `parse` know
schemas; `prompt` and `parse_prompt` what a prompt takes of one; `frames`, `layout` and `assembly`
tokens; `units`, `recipes`, `encode`, `planner` and `known` KV; `syntax` and `program` Python.
`schema`, `function` and `template` are what users see, `outline` what they are shown.
"""

from cached_rag.pml.function import PromptFunction, assistant, prompt_function, system, user
from cached_rag.pml.program import MaxTokens
from cached_rag.pml.prompt import Import, Said
from cached_rag.pml.schema import Schema, SchemaPrompt
from cached_rag.pml.template import Fillable, SchemaTemplate

__all__ = [
    "Fillable",
    "Import",
    "MaxTokens",
    "PromptFunction",
    "Said",
    "Schema",
    "SchemaPrompt",
    "SchemaTemplate",
    "assistant",
    "prompt_function",
    "system",
    "user",
]
