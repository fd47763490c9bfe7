"""A prompt template that is a schema's: modules for ChatCachedRAG, plain text for any other model.

Knows templates; a prompt finds its way to the model by its text (`SchemaPrompt.sent`).
"""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate
from pydantic import ConfigDict, Field

from cached_rag.pml import Fillable, Schema, SchemaTemplate

_MESSAGES = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}


class PMLPromptTemplate(BasePromptTemplate[Any]):
    """Renders prompts of a schema.

    `ChatCachedRAG` (for schemas with messages) and `CachedRAGLLM` (for those without) take the KV
    of the schema's modules; other models get the same text.

    Example:
        template = PMLPromptTemplate.from_schema(
            Schema.from_file("trip.xml"),
            '<prompt schema="trip"><plan days="{days}"/><user>{question}</user></prompt>',
        )
        chain = template | ChatCachedRAG()
        chain.invoke({"days": "a week", "question": "Where to?"})
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    source: Any = Field(exclude=True, repr=False)
    """A `SchemaTemplate` or a prompt function."""

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
        return cls(
            source=function,
            input_variables=list(function.variables),
            optional_variables=list(function.optional),
        )

    @property
    def _prompt_type(self) -> str:
        return "pml"

    def format_prompt(self, **kwargs: Any) -> PromptValue:
        """The prompt as messages, or, of a schema without messages, as a string."""
        given = self._merge_partial_and_user_variables(**kwargs)
        known = (*self.source.variables, *self.source.optional)
        plain = self.source.fill(**{name: given[name] for name in known if name in given}).sent()
        if isinstance(plain, str):
            return StringPromptValue(text=plain)
        return ChatPromptValue(messages=[_message(said) for said in plain])

    async def aformat_prompt(self, **kwargs: Any) -> PromptValue:
        """As `format_prompt`."""
        return self.format_prompt(**kwargs)

    def format(self, **kwargs: Any) -> str:
        """The prompt as a string."""
        return self.format_prompt(**kwargs).to_string()

    async def aformat(self, **kwargs: Any) -> str:
        """As `format`."""
        return self.format(**kwargs)


def _message(said: dict[str, str]) -> BaseMessage:
    message: BaseMessage = _MESSAGES[said["role"]](content=said["content"])
    return message
