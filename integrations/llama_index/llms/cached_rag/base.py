"""An LLM over `cached_rag.Engine`: chat and completion, with known chunks found in any prompt.

Uses public names of `cached_rag` only; knows no tensor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    TextBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.schema import BaseNode
from llama_index.core.tools.types import BaseTool
from llama_index.llms.cached_rag.messages import (
    Prompt,
    chat_response,
    completion_response,
    plain,
)
from llama_index.llms.cached_rag.nodes import module_text
from llama_index.llms.cached_rag.settings import EngineSettings
from llama_index.llms.cached_rag.tools import (
    blocks,
    can_call,
    check_whole,
    forced_program,
    offered,
    selections,
    taken,
)

from cached_rag import (
    CachedRAG,
    EncodeSummary,
    Engine,
    SchemaPrompt,
    Stream,
    Tools,
    template_head,
)

_T = TypeVar("_T")


class CachedRAGLLM(EngineSettings, FunctionCallingLLM):
    """A local model that does not prefill text again whose KV it holds.

    Whatever its engine has encoded is found in any prompt by its text, so query engines, chat
    engines and templates stay as they are. Put `CachedRetriever` around the retriever or
    `CachedVectorStore` around the vector store, or encode nodes yourself. LLMs with the same
    settings share one engine; nothing is loaded before it is needed.

    Example:
        Settings.llm = CachedRAGLLM(model="HuggingFaceTB/SmolLM2-135M-Instruct", store="kv")
        Settings.tokenizer = Settings.llm.token_ids
        index.as_query_engine().query("...")
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    _has_template: bool = PrivateAttr(default=False)

    def __init__(self, *, engine: Engine | CachedRAG | None = None, **data: Any) -> None:
        """Settings are fields; `engine` is one to share (or a `CachedRAG`) instead of loading.

        Raises:
            ValueError: an unknown or bad setting.
        """
        if isinstance(engine, Engine):
            data.setdefault("model", engine.model.name)
        super().__init__(**data)
        self._engine = engine
        self._has_template = data.get("messages_to_prompt") is not None
        if not self._has_template:
            # Not the method itself, whose repr would hold this object's, and so on without end.
            self.messages_to_prompt = lambda messages: self._render(messages)
        self._config({})

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CachedRAGLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The model's own limits."""
        loaded = self.loaded_engine().model
        own = loaded.context_length
        is_chat = bool(getattr(loaded.tokenizer, "chat_template", None))
        return LLMMetadata(
            context_window=min(self.context_window or own, own),
            num_output=self.max_tokens,
            is_chat_model=is_chat,
            is_function_calling_model=is_chat and can_call(),
            model_name=self.model,
        )

    # Chunks ----------------------------------------------------------------------------------

    def encode(
        self,
        texts: Iterable[str],
        *,
        prompt: BasePromptTemplate | None = None,
        variable: str = "context_str",
    ) -> EncodeSummary:
        """Prefill texts once and keep their KV; what is there already costs nothing.

        Args:
            prompt: the template they will be used in. What it says before `variable` is then
                reused without loss, and the texts are encoded behind it. Without it, that is
                learned from use.

        Raises:
            ValueError: the prompt has no such variable, or another one stands before it.
        """
        engine = self.loaded_engine()
        if prompt is None:
            return engine.encode(list(texts))
        head = template_head(
            engine, prompt.template_vars, variable, lambda values: self._filled(prompt, values)
        )
        return engine.encode(list(texts), head)

    def encode_nodes(self, nodes: Iterable[BaseNode], **kwargs: Any) -> EncodeSummary:
        """As `encode`, for nodes: with their metadata, as response synthesis shows them.

        For a docstore, `marked(docstore.docs.values())`; see `MarkModules`.
        """
        return self.encode([module_text(node) for node in nodes], **kwargs)

    # Prompts ---------------------------------------------------------------------------------

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Messages as the engine takes them: in the model's own template, unless one was given."""
        if self._has_template and self.messages_to_prompt is not None:
            return str(self.messages_to_prompt(messages))
        return plain(messages)

    def completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        """A string as the engine takes it: as it is if formatted, else as a user's message."""
        if formatted or not self.metadata.is_chat_model:
            return prompt
        assert self.completion_to_prompt is not None
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        content = str(self.completion_to_prompt(prompt))
        return [*system, {"role": "user", "content": content}]

    def _filled(self, template: BasePromptTemplate, values: Mapping[str, str]) -> Prompt:
        """A template's prompt, as `predict` would ask it."""
        if self.metadata.is_chat_model:
            messages = template.format_messages(llm=self, **values)
            return self.chat_prompt(self._extend_messages(messages))
        return self._extend_prompt(template.format(llm=self, **values))

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        """The model's own chat template, for those who ask for a prompt as a string."""
        return self.loaded_engine().tokenization.render(plain(messages)).text

    def _start(self, prompt: Callable[[], Prompt], options: dict[str, Any]) -> Stream:
        asked = prompt()
        return self.loaded_engine().stream(
            SchemaPrompt.receive(asked) or asked, self._config(options)
        )

    async def _astart(self, prompt: Callable[[], Prompt], options: dict[str, Any]) -> Stream:
        return await asyncio.to_thread(self._start, prompt, options)

    def _start_chat(
        self, messages: Sequence[ChatMessage], options: dict[str, Any]
    ) -> tuple[Stream, Tools]:
        options = dict(options)
        tools = taken(self.loaded_engine(), options)
        if not tools.is_offered:
            return self._start(lambda: self.chat_prompt(messages), options), tools
        if self._has_template:
            raise ValueError("messages_to_prompt lists no tools; leave it out to call tools")
        prompt = tools.prompt(plain(messages))
        return self.loaded_engine().stream(prompt, tools.settings(self._config(options))), tools

    # Answers ---------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """One answer to chat messages; `kwargs` are `GenerationConfig`'s."""
        stream, tools = self._start_chat(messages, kwargs)
        found = blocks(tools, "".join(stream), [], is_over=True)
        return chat_response(self, found, stream)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """An answer piece by piece."""
        stream, tools = self._start_chat(messages, kwargs)
        return self._pieces(stream, self._growing_chat(tools))

    def _growing_chat(self, tools: Tools) -> Callable[..., ChatResponse]:
        ids: list[str] = []
        said = ""

        def response(llm: EngineSettings, text: str, stream: Stream, delta: str) -> ChatResponse:
            nonlocal said
            found = blocks(tools, text, ids, is_over=not delta)
            before, said = said, next((b.text for b in found if isinstance(b, TextBlock)), "")
            return chat_response(llm, found, stream, said[len(before) :], is_over=not delta)

        return response

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """One answer to a string; put in a user's message unless it is formatted already."""
        stream = self._start(lambda: self.completion_prompt(prompt, formatted), kwargs)
        return completion_response(self, "".join(stream), stream)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """An answer to a string, piece by piece."""
        stream = self._start(lambda: self.completion_prompt(prompt, formatted), kwargs)
        return self._pieces(stream, completion_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, off the event loop; a cancelled task stops the generation."""
        stream, tools = await asyncio.to_thread(self._start_chat, messages, kwargs)
        found = blocks(tools, await stream.atext(), [], is_over=True)
        return chat_response(self, found, stream)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """As `stream_chat`, off the event loop."""
        stream, tools = await asyncio.to_thread(self._start_chat, messages, kwargs)
        return self._apieces(stream, self._growing_chat(tools))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """As `complete`, off the event loop."""
        stream = await self._astart(lambda: self.completion_prompt(prompt, formatted), kwargs)
        return completion_response(self, await stream.atext(), stream)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """As `stream_complete`, off the event loop."""
        stream = await self._astart(lambda: self.completion_prompt(prompt, formatted), kwargs)
        return self._apieces(stream, completion_response)

    def _pieces(self, stream: Stream, response: Callable[..., _T]) -> Generator[_T, None, None]:
        text = ""
        for piece in stream:
            text += piece
            yield response(self, text, stream, piece)
        yield response(self, text, stream, "")  # with the finished report

    async def _apieces(
        self, stream: Stream, response: Callable[..., _T]
    ) -> AsyncGenerator[_T, None]:
        text = ""
        async for piece in stream.apieces():
            text += piece
            yield response(self, text, stream, piece)
        yield response(self, text, stream, "")

    # Tools -----------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role="user", content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        choice = tool_choice or ("required" if tool_required else "auto")
        found = offered(tools, choice, parallel=allow_parallel_tool_calls)
        return {"messages": messages, **found, **kwargs}

    def _structured_stream_call(
        self, output_cls: type[BaseModel], prompt: PromptTemplate, *args: Any, **kwargs: Any
    ) -> Generator[Any, None, None]:
        """As LlamaIndex's, which lets the model choose whether it gives the object at all."""
        yield from forced_program(self, output_cls, prompt).stream_call(*args, **kwargs)

    async def _structured_astream_call(
        self, output_cls: type[BaseModel], prompt: PromptTemplate, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        program = forced_program(self, output_cls, prompt)
        found: AsyncGenerator[Any, None] = await program.astream_call(*args, **kwargs)
        return found

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **_: Any
    ) -> list[ToolSelection]:
        """The calls in an answer; while it grows, with the arguments so far.

        Raises:
            ValueError: there are none, or `max_tokens` cut one off.
        """
        found = selections(response.message)
        check_whole(response)
        if error_on_no_tool_call and not found:
            raise ValueError(f"the answer calls no tool: {response.message.content!r}")
        return found
