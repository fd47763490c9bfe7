"""An LLM over `cached_rag.Engine`: chat and completion, with known chunks found in any prompt.

Uses public names of `cached_rag` only; knows no tensor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from itertools import groupby
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.schema import BaseNode
from llama_index.core.tools.types import BaseTool
from llama_index.llms.cached_rag.growing import apieces, growing_chat, pieces
from llama_index.llms.cached_rag.messages import (
    OwnTemplate,
    Prompt,
    chat_response,
    completion_response,
    plain,
)
from llama_index.llms.cached_rag.nodes import module_text
from llama_index.llms.cached_rag.prompting import PromptingLLM
from llama_index.llms.cached_rag.structured import astream_objects, stream_objects
from llama_index.llms.cached_rag.tools import (
    blocks,
    check_whole,
    offered,
    selections,
    taken,
)

from cached_rag import CachedRAG, ConfigError, Engine, Tools
from cached_rag.spi import EncodeSummary, SchemaPrompt, Stream, template_head, unknown_settings


class CachedRAGLLM(PromptingLLM):
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

    def __init__(self, *, engine: Engine | CachedRAG | None = None, **data: Any) -> None:
        """Settings are fields; `engine` is one to share (or a `CachedRAG`) instead of loading.

        Raises:
            ConfigError: an unknown setting. A `ValueError`, as what a bad one raises.
        """
        if isinstance(engine, CachedRAG):
            data.setdefault("model", engine.settings["model"])
        elif engine is not None:
            data.setdefault("model", engine.model.name)
            # Saved and pickled, too: who loads by these settings is no other tenant.
            data["namespace"] = data.get("namespace") or engine.library.namespace
        if unknown := data.keys() - type(self).model_fields.keys():
            raise ConfigError(unknown_settings(sorted(unknown), type(self).model_fields))
        super().__init__(**data)
        self.loaded_with()
        if engine is not None:
            given = [name for name in self.changed_settings() if name != "namespace"]
            if given:
                raise ConfigError(
                    f"{', '.join(given)}: the engine that was given is loaded, and has a store of "
                    "its own; give these to Engine.load, or leave engine= out"
                )
            self._give(engine)
        if data.get("messages_to_prompt") is None:
            self.messages_to_prompt = OwnTemplate(self)
        self._config({})

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CachedRAGLLM"

    # Chunks ----------------------------------------------------------------------------------

    def encode(
        self,
        texts: Iterable[str | Sequence[str]],
        *,
        prompt: BasePromptTemplate | None = None,
        variable: str = "context_str",
    ) -> EncodeSummary:
        """Prefill texts once and keep their KV; what is there already costs nothing.

        Args:
            texts: a list among them has the chunks of one document in their order; see
                `cached_rag.Engine.encode`.
            prompt: the template they will be used in. What it says before `variable` is then
                reused without loss, and the texts are encoded behind it. Without it, that is
                learned from use.

        Raises:
            ValueError: the prompt has no such variable, or another one stands before it.
        """
        engine = self.loaded_engine()
        if prompt is None:
            return engine.encode(list(texts))
        given = prompt._map_template_vars(prompt.kwargs)  # by partial_format: no variables now
        names = [name for name in prompt.template_vars if name not in given]
        head = template_head(engine, names, variable, lambda values: self._filled(prompt, values))
        return engine.encode(list(texts), head)

    def encode_nodes(self, nodes: Iterable[BaseNode], **kwargs: Any) -> EncodeSummary:
        """As `encode`, for nodes: with their metadata, as response synthesis shows them.

        For a docstore, `marked(docstore.docs.values())`; see `MarkModules`.
        """
        documents = groupby(nodes, key=lambda node: node.ref_doc_id or node.node_id)
        texts = ([module_text(node) for node in group] for _, group in documents)
        return self.encode(texts, **kwargs)

    # Answers ---------------------------------------------------------------------------------

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
        return pieces(self, stream, growing_chat(tools))

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
        return pieces(self, stream, completion_response)

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
        return apieces(self, stream, growing_chat(tools))

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
        return apieces(self, stream, completion_response)

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
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        return stream_objects(self, output_cls, prompt, llm_kwargs or {}, prompt_args)

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        return astream_objects(self, output_cls, prompt, llm_kwargs or {}, prompt_args)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **_: Any
    ) -> list[ToolSelection]:
        """The calls in an answer; while it grows, with the arguments so far.

        Raises:
            ValueError: there are none.
            CutOffError: the answer ended within one, or before it.
        """
        check_whole(response, must_call=error_on_no_tool_call)
        return selections(response.message)
