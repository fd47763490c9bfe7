"""Prompt Markup Language: prompts made of named modules that are prefilled once (Prompt Cache).

The files, in the order in which they build on each other:

- `markup`, `nodes`, `parse`: a schema, from XML to a checked tree;
- `prompt`: a prompt, and what it takes from its schema;
- `layout`: tokens and positions of a schema and of a prompt;
- `units`, `planner`: which KV is made, kept and reused;
- `program`: a Python function read as a schema;
- `schema`, `template`: what users import.
"""

from cached_rag.pml.program import MaxTokens
from cached_rag.pml.prompt import Import, Said
from cached_rag.pml.schema import Schema, SchemaPrompt
from cached_rag.pml.template import (
    Fillable,
    PromptFunction,
    SchemaTemplate,
    assistant,
    prompt_function,
    sent,
    system,
    user,
)

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
    "sent",
    "system",
    "user",
]
