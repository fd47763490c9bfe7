"""Prompt Markup Language: prompts made of modules that are prefilled once (Prompt Cache).

`nodes`, `markup`, `parse`, `prompt` know texts; `layout`, `assembly` tokens; `units`, `encode`,
`planner` KV; `syntax` and `program` Python; `schema` and `function` are what users see.
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
