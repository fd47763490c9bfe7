"""A chat model over `cached_rag.Engine`: messages in, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough

from cached_rag import ConfigError, Engine, Tools
from cached_rag.spi import SchemaPrompt, Stream
from langchain_cached_rag.messages import Prompt, as_reasoning, handed_over, plain, usage
from langchain_cached_rag.settings import AsyncRun, EngineSettings, Pieces, Run, Stop, their_errors
from langchain_cached_rag.tools import GrowingChunks, answer_form, as_calls, bound, parser, taken

Messages = list[BaseMessage]


class ChatCachedRAG(EngineSettings, BaseChatModel):  # type: ignore[misc]  # names of arguments
    """A local chat model that does not prefill text again whose KV it holds.

    Whatever its engine has encoded is found in any prompt by its text, so chains, templates and
    retrievers stay as they are. Put `CachedRetriever` around the retriever, or
    `CachedRAGVectorStore` around the vector store, or encode texts yourself.

    Setup:
        `pip install -e ".[langchain]"` in a checkout of Cached RAG

    Instantiate:
        llm = ChatCachedRAG(model="HuggingFaceTB/SmolLM2-135M-Instruct", store="kv")

    Invoke:
        answer = llm.invoke([("system", "Be brief."), ("human", "Why is copper green?")])
        answer.usage_metadata["input_token_details"]["cache_read"]
        answer.response_metadata["cached_rag"]

    Stream:
        for chunk in llm.stream("Why is copper green?"):
            print(chunk.text, end="")

    Tools and structured output (`pip install -e ".[tools]"`):
        llm.bind_tools([get_weather]).invoke("Is it warm in Rome?").tool_calls
        llm.with_structured_output(Person).invoke("Ada Lovelace, born 1815")

    Chain:
        documents = CachedRetriever(retriever=retriever, llm=llm)
        chain = {"context": documents | join, "question": RunnablePassthrough()} | prompt | llm
    """

    streaming: bool = False
    """Stream also where an application calls `invoke`."""

    if TYPE_CHECKING:  # most fields are made while this is imported

        def __init__(self, **settings: Any) -> None: ...

    @property
    def _llm_type(self) -> str:
        return "cached-rag-chat"

    def _start(
        self, messages: Sequence[BaseMessage], stop: Stop, options: dict[str, Any]
    ) -> tuple[Stream, Tools]:
        options = dict(options)
        engine = self._called(options.pop("model", None))
        tools = taken(engine, options)
        if chunks := handed_over(messages):
            engine.register(chunks)
        plain_messages = plain(messages)
        prompt = SchemaPrompt.receive(plain_messages)
        if prompt is not None and tools.is_offered:
            raise ValueError("a schema's prompt lists no tools; put them into the schema's text")
        config = tools.settings(self._config(stop, options))
        return engine.stream(prompt or tools.prompt(plain_messages), config), tools

    def _called(self, model: str | None) -> Engine:
        """The engine of a call; the profile can be completed once there is one."""
        engine = self.loaded_engine(model)
        profile: Any = getattr(self, "profile", None)
        if model is None and profile is not None:
            if profile.get("name", self._model) != self._model:  # this is a copy of another model
                profile = self._resolve_model_profile()
            known: Any = {"max_input_tokens": engine.model.context_length, **profile}
            self.profile = known
        return engine

    def _streamed(self, asked: Any, stop: Stop, options: dict[str, Any]) -> Pieces:
        stream, tools = self._start(asked, stop, options)
        growing = GrowingChunks(tools)
        return stream, growing.push, partial(self._rest, stream, growing, options)

    def _generate(
        self, messages: Messages, stop: Stop = None, run_manager: Run = None, **kwargs: Any
    ) -> ChatResult:
        with their_errors():
            stream, tools = self._start(messages, stop, kwargs)
            text = "".join(stream)
        return self._result(text, stream, tools, kwargs)

    async def _agenerate(
        self, messages: Messages, stop: Stop = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> ChatResult:
        with their_errors():
            stream, tools = await asyncio.to_thread(self._start, messages, stop, kwargs)
            text = await stream.atext()
        return self._result(text, stream, tools, kwargs)

    def _result(
        self, text: str, stream: Stream, tools: Tools, options: dict[str, Any]
    ) -> ChatResult:
        thought, said, calls = tools.parts(text)
        good, bad = as_calls(calls)
        about = self._about(stream, options.get("model"), has_calls=bool(good))
        message = AIMessage(
            said,
            additional_kwargs=as_reasoning(thought),
            tool_calls=good,
            invalid_tool_calls=bad,
            response_metadata=about,
            usage_metadata=usage(stream.report),
        )
        info = {"finish_reason": about["finish_reason"]}
        generation = ChatGeneration(message=message, generation_info=info)
        output = {"model_name": about["model_name"], "token_usage": dict(usage(stream.report))}
        return ChatResult(generations=[generation], llm_output=output)

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        """The tokens of a batch; an answer that is streamed, or from a cache, says none here."""
        told = [output for output in llm_outputs if output]
        if not told:
            return {}
        names = ("input_tokens", "output_tokens", "total_tokens")
        counts = {name: sum(output["token_usage"][name] for output in told) for name in names}
        return {"model_name": told[0]["model_name"], "token_usage": counts}

    def _rest(
        self, stream: Stream, growing: GrowingChunks, options: dict[str, Any]
    ) -> Iterator[ChatGenerationChunk]:
        yield from growing.end()
        about = self._about(stream, options.get("model"), has_calls=growing.has_calls)
        told: Any = {"response_metadata": about, "usage_metadata": usage(stream.report)}
        message = AIMessageChunk(content="", chunk_position="last", **told)
        info = {"finish_reason": about["finish_reason"]}
        yield ChatGenerationChunk(message=message, generation_info=info)

    def _prompt(self, value: Any) -> Prompt:
        return plain(value.to_messages())

    # What LangChain asks of a model ----------------------------------------------------------

    def _resolve_model_profile(self) -> Any:
        """What the model can do; the context length is added once it is known."""
        can = {"text_inputs": True, "text_outputs": True, "open_weights": True}
        can |= dict.fromkeys(("tool_calling", "tool_choice", "structured_output"), True)
        cannot = ("image_inputs", "audio_inputs", "video_inputs", "reasoning_output")
        known = {"name": self._model, **can, **dict.fromkeys(cannot, False)}
        if isinstance(self.engine, Engine):
            known["max_input_tokens"] = self.engine.model.context_length
            known["reasoning_output"] = Tools(self.engine.tokenization).may_think
        return known

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the messages, and of tools, in the model's own chat template; 0 of none.

        Messages that the template refuses, as an answer without its question, are counted as
        LangChain does it, one by one and without tools; so are all with `custom_get_token_ids`.
        """
        if not messages:
            return 0
        if self.custom_get_token_ids is None:
            engine = self.loaded_engine()
            offered = taken(engine, {"tools": tools})
            with suppress(ConfigError):
                return engine.count_tokens(offered.prompt(plain(messages)))
        return super().get_num_tokens_from_messages(messages)

    # Tools and structured output -------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call tools. Their arguments always fit their schemas.

        Args:
            tools: functions, pydantic classes, `BaseTool`s, or dicts in OpenAI's form.
            tool_choice: "auto", "none", "any" or "required", or a tool's name.
            strict: passed on; arguments are held to the schema in any case.
            parallel_tool_calls: whether an answer may have several calls; None if it may where it
                need not have any.
        """
        found = bound(tools, tool_choice, parallel=parallel_tool_calls, strict=strict)
        return self.bind(**found, **kwargs)

    def with_structured_output(
        self,
        schema: Any,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose answers are objects.

        Args:
            schema: a pydantic class, TypedDict or JSON schema.
            method: "json_schema" holds the answer to the schema; "function_calling" makes it the
                arguments of a tool; "json_mode" makes it any JSON object.
            include_raw: give {"raw", "parsed", "parsing_error"} instead of the object.
            strict: passed on; the schema is kept to in any case.

        An answer that `max_tokens` cuts off is an `OutputParserException`.
        """
        note = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        kwargs["ls_structured_output_format"] = note
        model: Runnable[LanguageModelInput, AIMessage]
        if method == "function_calling":
            model = self.bind_tools([schema], tool_choice="any", strict=strict, **kwargs)
            return _parsed(model, parser(schema, of_a_call=True), include_raw=include_raw)
        if method not in ("json_schema", "json_mode"):
            raise ValueError(
                f"method is json_schema, function_calling or json_mode, not {method!r}"
            )
        form = answer_form(schema) if method == "json_schema" else {"type": "json_object"}
        model = self.bind(response_format=form, **kwargs)
        return _parsed(model, parser(schema), include_raw=include_raw)


def _parsed(
    model: Runnable[LanguageModelInput, AIMessage], made: Runnable[Any, Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """A model whose answers are parsed; with `include_raw`, as LangChain has it then."""
    if not include_raw:
        return model | made
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | made, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    fallback = parsed.with_fallbacks([failed], exception_key="parsing_error")
    return RunnableMap(raw=model) | fallback
