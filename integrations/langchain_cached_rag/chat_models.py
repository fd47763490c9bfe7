"""A chat model over `cached_rag.Engine`: messages in, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from cached_rag import Engine, SchemaPrompt, Stream
from langchain_cached_rag.messages import Prompt, handed_over, metadata, plain, usage
from langchain_cached_rag.settings import EngineSettings


class ChatCachedRAG(EngineSettings, BaseChatModel):
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

    Chain:
        documents = CachedRetriever(retriever=retriever, llm=llm)
        chain = {"context": documents | join, "question": RunnablePassthrough()} | prompt | llm
    """

    streaming: bool = False
    """Stream also where an application calls `invoke`."""

    @property
    def _llm_type(self) -> str:
        return "cached-rag-chat"

    def _start(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> Stream:
        options = dict(options)
        engine = self._called(options.pop("model", None))
        if chunks := handed_over(messages):
            engine.register(chunks)
        prompt = plain(messages)
        return engine.stream(SchemaPrompt.receive(prompt) or prompt, self._config(stop, options))

    def _called(self, model: str | None) -> Engine:
        """The engine of a call; the profile can be completed once there is one."""
        engine = self.loaded_engine(model)
        profile = getattr(self, "profile", None)
        if model is None and profile is not None and "max_input_tokens" not in profile:
            profile["max_input_tokens"] = engine.model.context_length
        return engine

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        stream = self._start(messages, stop, kwargs)
        return self._result("".join(stream), stream, kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        stream = await asyncio.to_thread(self._start, messages, stop, kwargs)
        return self._result(await stream.atext(), stream, kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        stream = self._start(messages, stop, kwargs)
        try:
            for piece in stream:
                chunk = _chunk(piece)
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            stream.close()
        yield self._last_chunk(stream, kwargs)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        stream = await asyncio.to_thread(self._start, messages, stop, kwargs)
        async with aclosing(stream.apieces()) as taken:
            async for piece in taken:
                chunk = _chunk(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield self._last_chunk(stream, kwargs)

    def _result(self, text: str, stream: Stream, options: dict[str, Any]) -> ChatResult:
        about = self._about(stream, options)
        message = AIMessage(text, response_metadata=about, usage_metadata=usage(stream.report))
        info = {"finish_reason": stream.finish_reason}
        generation = ChatGeneration(message=message, generation_info=info)
        output = {"model_name": about["model_name"], "token_usage": dict(usage(stream.report))}
        return ChatResult(generations=[generation], llm_output=output)

    def _last_chunk(self, stream: Stream, options: dict[str, Any]) -> ChatGenerationChunk:
        message = AIMessageChunk(
            content="",
            response_metadata=self._about(stream, options),
            usage_metadata=usage(stream.report),
            chunk_position="last",
        )
        info = {"finish_reason": stream.finish_reason}
        return ChatGenerationChunk(message=message, generation_info=info)

    def _about(self, stream: Stream, options: dict[str, Any]) -> dict[str, Any]:
        model = options.get("model", self._model)
        return metadata(model, stream.report, stream.finish_reason)

    def _prompt(self, value: Any) -> Prompt:
        return plain(value.to_messages())

    # What LangChain asks of a model ----------------------------------------------------------

    def _resolve_model_profile(self) -> Any:
        """What the model can do; the context length is added once it is loaded."""
        can = {"text_inputs": True, "text_outputs": True, "open_weights": True}
        cannot = ("image_inputs", "audio_inputs", "video_inputs", "tool_calling")
        none = dict.fromkeys((*cannot, "structured_output", "reasoning_output"), False)
        return {"name": self._model, **can, **none}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        config = {"temperature": self.temperature, "max_tokens": self.max_tokens} | kwargs
        params = LangSmithParams(
            ls_provider="cached-rag",
            ls_model_type="chat",
            ls_model_name=kwargs.get("model", self._model),
            ls_temperature=config["temperature"],
            ls_max_tokens=config["max_tokens"],
        )
        if wanted := stop or self.stop:
            params["ls_stop"] = list(wanted)
        return params

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the messages in the model's own chat template.

        Raises:
            ValueError: tools are given, which the model cannot be told of.
        """
        if tools:
            raise ValueError("the model calls no tools, so they have no token count")
        return self.loaded_engine().count_tokens(plain(messages))


def _chunk(piece: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=piece))
