"""A prompt template that is a schema's: modules for CachedRAGLLM, plain text for any other model.

Knows templates; a prompt finds its way to the model by its text (`SchemaPrompt.sent`).
"""

from __future__ import annotations

from copy import copy
from typing import Any

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field
from llama_index.core.prompts import BasePromptTemplate

from cached_rag.pml import Fillable, Schema, SchemaPrompt, SchemaTemplate


class PMLPromptTemplate(BasePromptTemplate):
    """Renders prompts of a schema.

    `CachedRAGLLM` takes the KV of the schema's modules; other models get the same text. A chat
    model wants a schema with messages, a completing model one without.

    Example:
        template = PMLPromptTemplate.from_schema(
            Schema.from_file("manual.xml"),
            '<prompt schema="manual"><rules/>{context_str}<user>{query_str}</user></prompt>',
        )
        index.as_query_engine(text_qa_template=template)
    """

    source: Any = Field(exclude=True, repr=False)

    @classmethod
    def from_schema(cls, schema: Schema, prompt: str) -> PMLPromptTemplate:
        """A <prompt> with {variables} in its texts and arguments.

        Raises:
            cached_rag.errors.PMLError: it is wrong, or not of this schema.
        """
        return cls.from_function(SchemaTemplate.from_string(schema, prompt))

    @classmethod
    def from_function(cls, function: Fillable) -> PMLPromptTemplate:
        """A prompt function, whose parameters are the variables."""
        names = [*function.variables, *function.optional]
        return cls(source=function, metadata={}, template_vars=names, kwargs={}, output_parser=None)

    def partial_format(self, **kwargs: Any) -> PMLPromptTemplate:
        """The template with some values filled in."""
        filled = copy(self)
        filled.kwargs = {**self.kwargs, **kwargs}
        return filled

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        """The prompt as a string."""
        plain = self._plain(kwargs)
        return plain if isinstance(plain, str) else messages_to_prompt(_messages(plain))

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """The prompt as messages; of a schema without messages, one of the user's."""
        plain = self._plain(kwargs)
        said = [{"role": "user", "content": plain}] if isinstance(plain, str) else plain
        return _messages(said)

    def get_template(self, llm: BaseLLM | None = None) -> str:
        """The prompt with its variables' names in braces."""
        return self.format(llm, **{name: f"{{{name}}}" for name in self.template_vars})

    def _plain(self, values: dict[str, Any]) -> str | list[dict[str, str]]:
        known = self._map_all_vars({**self.kwargs, **values})
        given = {name: known[name] for name in self.template_vars if name in known}
        prompt: SchemaPrompt = self.source.fill(**given)
        return prompt.sent()


def _messages(plain: list[dict[str, str]]) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole(said["role"]), content=said["content"]) for said in plain]
