"""Structured output: the form of an answer, and the object that is made of it.

Knows messages and schemas; knows no model.
"""

from __future__ import annotations

from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import (
    BaseCumulativeTransformOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_cached_rag.forms import json_schema

Parser = BaseCumulativeTransformOutputParser[Any]


class Whole(Parser):
    """Parses what another parser does, and refuses what `max_tokens` cut off.

    LangChain's parsers close the strings and braces that a cut answer leaves open, and leave out
    calls that are not whole: what remains may fit the schema, and is not what was to be said.
    """

    inside: Parser

    @property
    def _type(self) -> str:
        return "whole"

    @property
    def OutputType(self) -> Any:  # noqa: N802  # LangChain's name
        """That of the parser inside."""
        return self.inside.OutputType

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """What the parser inside makes of an answer.

        Raises:
            OutputParserException: it was cut off, or does not fit the schema.
        """
        for answer in result:
            if isinstance(answer, ChatGeneration) and _is_cut(answer.message):
                raise OutputParserException(
                    "max_tokens cut the answer off before its object was whole; raise max_tokens, "
                    "or ask for a smaller object",
                    llm_output=answer.text,
                )
        return self.inside.parse_result(result, partial=partial)

    def parse(self, text: str) -> Any:
        """What the parser inside makes of a text."""
        return self.inside.parse(text)

    def get_format_instructions(self) -> str:
        """Those of the parser inside."""
        return self.inside.get_format_instructions()


def _is_cut(message: Any) -> bool:
    reason = message.response_metadata.get("finish_reason")
    return isinstance(message, AIMessage) and reason == "length"


def response_format(schema: Any) -> dict[str, Any]:
    """OpenAI's response format for a pydantic class, TypedDict or JSON schema."""
    found = json_schema(schema)
    name = str(found.get("title", "answer"))
    return {"type": "json_schema", "json_schema": {"name": name, "schema": found}}


def parser(schema: Any) -> Whole:
    """What makes an object of a structured answer; a dict for all but pydantic classes."""
    if is_basemodel_subclass(schema):
        return Whole(inside=PydanticOutputParser(pydantic_object=schema))
    return Whole(inside=JsonOutputParser())


def call_parser(schema: Any) -> Whole:
    """As `parser`, of the arguments that the tool of that schema was called with."""
    if is_basemodel_subclass(schema):
        return Whole(inside=PydanticToolsParser(tools=[schema], first_tool_only=True))
    name = convert_to_openai_tool(schema)["function"]["name"]
    return Whole(inside=JsonOutputKeyToolsParser(key_name=name, first_tool_only=True))
