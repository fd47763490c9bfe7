"""The form of answers as OpenAI's protocol asks for it: tools, their choice, response formats.

Knows JSON; knows no engine.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    field_validator,
    model_validator,
)

_MOST_TOOLS = 128  # as OpenAI's
_MOST_ARGUMENTS = 100_000
_MOST_FIELDS = 100
_Word = Literal["none", "auto", "required"]


class Strict(BaseModel):
    """A part of a body, whose unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _few_fields(cls, data: Any, read: ModelWrapValidatorHandler[Any]) -> Any:
        """A body has room for a million unknown fields, each of which would be an error."""
        if isinstance(data, dict) and len(data) > _MOST_FIELDS:
            raise ValueError(f"more than {_MOST_FIELDS} fields")
        return read(data)


def without_neutral(
    data: Any, ignored: Collection[str], neutral: Mapping[str, tuple[Any, ...]], refusal: str
) -> Any:
    """A body without settings that change nothing.

    Args:
        ignored: settings that never do.
        neutral: those that do not at these values.
        refusal: what is said of others: "this server cannot do".

    Raises:
        ValueError: one of `neutral` has another value.
    """
    if not isinstance(data, dict):
        return data
    kept = {name: value for name, value in data.items() if name not in ignored}
    for name, values in neutral.items():
        if name in kept and (value := kept.pop(name)) not in values:
            raise ValueError(f"{refusal} {name}={reprlib.repr(value)}")
    return kept


class Function(Strict):
    """A function that may be called. Its arguments are held to the schema, strict or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        found = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in found.items() if value is not None}


class Tool(Strict):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"type": "function", "function": self.function.plain()}


class _Named(Strict):
    name: str

    @field_validator("name")
    @classmethod
    def _is_no_choice(cls, name: str) -> str:
        """Refuses a name that would be read as a choice of OpenAI's, and not as the tool's."""
        if name in get_args(_Word):
            raise ValueError(f"a tool cannot be forced that is called {name!r}; rename it")
        return name


class NamedChoice(Strict):
    """The choice of one tool."""

    type: Literal["function"]
    function: _Named


class _KnownForm(Strict):
    name: str


class _OfTheTools(Strict):
    type: Literal["function"]
    function: _KnownForm


class _Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_OfTheTools], Field(max_length=_MOST_TOOLS)]


class AllowedChoice(Strict):
    """The choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed

    def names(self) -> set[str]:
        """The names of those that may be called."""
        return {tool.function.name for tool in self.allowed_tools.tools}


class CalledFunction(Strict):
    """A function that was called."""

    name: Annotated[str, Field(max_length=256)]
    arguments: Annotated[str, Field(max_length=_MOST_ARGUMENTS)]

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_parsed(cls, data: Any) -> Any:
        """Leaves out the arguments once more, which OpenAI's `parse()` adds."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name != "parsed_arguments"}


class CalledTool(Strict):
    """A call in a message of the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class _Schema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of an answer that calls no tool."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="after")
    def _has_what_it_says(self) -> ResponseFormat:
        """Refuses a schema that is missing, or that would be passed over."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for the type 'json_schema', which needs one")
        return self

    def schema_wanted(self) -> dict[str, Any] | bool | None:
        """The JSON schema; True for any object, None for text."""
        if self.type == "text":
            return None
        given = self.json_schema.schema_ if self.json_schema else None
        return True if self.type == "json_object" or given is None else given


def _kind_of_choice(data: Any) -> str:
    """The class that a choice is read as, so that errors are those of this one only."""
    given = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return "AllowedChoice" if given == "allowed_tools" else "NamedChoice"


Tools = Annotated[list[Tool], Field(max_length=_MOST_TOOLS)]
Choice = (
    _Word
    | Annotated[
        Annotated[NamedChoice, Tag("NamedChoice")] | Annotated[AllowedChoice, Tag("AllowedChoice")],
        Discriminator(_kind_of_choice),
    ]
)


def chosen(tools: list[Tool], choice: Choice) -> tuple[list[Tool], str]:
    """The tools that may be called, and the choice among them as an engine's `Tools` takes it.

    Raises:
        ValueError: the choice allows a tool that there is not.
    """
    if isinstance(choice, str):
        return tools, choice
    if isinstance(choice, NamedChoice):
        return tools, choice.function.name
    names = choice.names()
    if unknown := names - {tool.function.name for tool in tools}:
        raise ValueError(f"allowed_tools names {reprlib.repr(min(unknown))}, which is no tool")
    kept = [tool for tool in tools if tool.function.name in names]
    return kept, choice.allowed_tools.mode
