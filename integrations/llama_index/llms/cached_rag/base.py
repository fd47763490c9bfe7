"""An LLM over `cached_rag.Engine`: chat and completion, with known chunks found in any prompt.

Uses public names of `cached_rag` only; knows no tensor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.llms import ChatMessage, ChatResponse, ChatResponseAsyncGen, ChatResponseGen
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.schema import BaseNode
from llama_index.core.tools.types import BaseTool
from llama_index.llms.cached_rag.messages import GrowingChat, apieces, completion, pieces, plain
from llama_index.llms.cached_rag.nodes import module_text
from llama_index.llms.cached_rag.tools import CALLING, GrowingObject, offered, selections, taken
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import Self

from cached_rag import CachedRAG, Engine, Tools, spi

_log = logging.getLogger(__name__)
Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True, eq=False, repr=False)
class OwnTemplate:
    """A model's own chat template, for those who ask for a prompt as a string.

    Its repr holds no model's, which would hold this, and so on without end.
    """

    llm: CachedRAGLLM

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnTemplate:
        """The copy's, where the LLM is copied, too."""
        return OwnTemplate(memo.get(id(self.llm), self.llm))

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt."""
        return self.llm.loaded_engine().tokenization.template.render(plain(messages)).text


class CachedRAGLLM(spi.FrameworkModel, FunctionCallingLLM):
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

    model_config = ConfigDict(extra="forbid")

    model: str = Field(default=spi.DEFAULT_MODEL, description="Alias, hub id, folder or GGUF file.")
    context_window: int | None = Field(default=None, description="Less than the model's own.")

    def __init__(self, *, engine: Engine | CachedRAG | None = None, **data: Any) -> None:
        """Settings are fields; `engine` is one to share (or a `CachedRAG`) instead of loading.

        Raises:
            ConfigError: see `cached_rag.spi.FrameworkModel`.
        """
        super().__init__(engine=engine, **data)
        self.model = self._model
        if data.get("messages_to_prompt") is None:
            self.messages_to_prompt = OwnTemplate(self)

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CachedRAGLLM"

    @property
    def _named(self) -> str:
        return self.model

    def __copy__(self) -> Self:
        """A copy may get another model, so its own template is not the original's."""
        copied = super().__copy__()
        if not copied._has_template:
            copied.messages_to_prompt = OwnTemplate(copied)
        return copied

    def _without_engine(self) -> Self:
        """For pickling: LlamaIndex takes what cannot be pickled off the object itself."""
        if self.engine is not None:
            _log.warning("an engine is not pickled: elsewhere %r is loaded by name", self.model)
        bare = super()._without_engine()
        if not self._has_template:
            del bare.__dict__["messages_to_prompt"]
        return bare

    @property
    def metadata(self) -> LLMMetadata:
        """The model's own limits, less what its chat template adds: LlamaIndex cannot count it."""
        own = self.loaded_engine().model.context_length - self._around()
        return LLMMetadata(
            context_window=min(self.context_window or own, own),
            num_output=self.max_tokens,
            is_chat_model=self._is_chat,
            # Calls need a package of the extra "tools".
            is_function_calling_model=self._is_chat and find_spec("llguidance") is not None,
            model_name=self.model,
        )

    @property
    def _has_template(self) -> bool:
        return not isinstance(self.messages_to_prompt, OwnTemplate)

    @property
    def _is_chat(self) -> bool:
        return bool(getattr(self.loaded_engine().model.tokenizer, "chat_template", None))

    def _around(self) -> int:
        """Tokens of a prompt besides what it says and the system prompt, which are counted."""
        prompt = (
            self.chat_prompt(self._extend_messages([ChatMessage(content="x")]))
            if self._is_chat
            else self.completion_prompt("x", formatted=False)
        )
        counted = sum(len(self.token_ids(text)) for text in ("x", self.system_prompt or ""))
        return max(0, self.loaded_engine().count_tokens(prompt) - counted)

    # Prompts ---------------------------------------------------------------------------------

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Messages as the engine takes them: in the model's own template, unless one was given."""
        if self._has_template and self.messages_to_prompt is not None:
            return str(self.messages_to_prompt(messages))
        return plain(messages)

    def completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        """A string as the engine takes it: as it is if formatted, else as a user's message.

        A model without chat template gets it as `predict` would write it.
        """
        if formatted:
            return prompt
        assert self.completion_to_prompt is not None
        if not self._is_chat:
            return self._extend_prompt(self.completion_to_prompt(prompt))
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        content = str(self.completion_to_prompt(prompt))
        return [*system, {"role": "user", "content": content}]

    def _filled(self, template: BasePromptTemplate, values: Mapping[str, str]) -> Prompt:
        """A template's prompt, as `predict` would ask it."""
        if self._is_chat:
            return self.chat_prompt(self._get_messages(template, **values))
        return self._get_prompt(template, **values)

    # Chunks ----------------------------------------------------------------------------------

    def encode(
        self,
        texts: Iterable[str | Sequence[str]],
        *,
        prompt: BasePromptTemplate | None = None,
        variable: str = "context_str",
    ) -> spi.EncodeSummary:
        """Prefill texts once and keep their KV; what is there already costs nothing.

        Args:
            texts: a list among them has the chunks of one document in their order; see
                `cached_rag.Engine.encode`.
            prompt: the template they will be used in. What it says before `variable` is then
                reused without loss, and the texts are encoded behind it. Without it, that is
                learned from use.

        Raises:
            ConfigError: `texts` is a single string; or the prompt has no such variable, or another
                one stands before it. A `ValueError`.
        """
        engine = self.loaded_engine()
        if prompt is None:
            return engine.encode(texts)
        spi.checked(prompt, BasePromptTemplate, "is no prompt template")
        given = prompt._map_template_vars(prompt.kwargs)  # by partial_format: no variables now
        names = [name for name in prompt.template_vars if name not in given]
        variable = (prompt.template_var_mappings or {}).get(variable, variable)
        head = spi.template_head(engine, names, variable, partial(self._filled, prompt))
        return engine.encode(texts, head)

    def encode_nodes(self, nodes: Iterable[BaseNode], **kwargs: Any) -> spi.EncodeSummary:
        """As `encode`, for nodes: with their metadata, as response synthesis shows them.

        They may be what an `IngestionPipeline` returns, or a docstore's.

        Raises:
            ConfigError: one is no node; or as `encode`.
        """
        said = "is no node; for texts use encode"
        those = (spi.checked(node, BaseNode, said) for node in nodes)
        documents = groupby(those, key=lambda node: node.ref_doc_id or node.node_id)
        texts = ([module_text(node) for node in group] for _, group in documents)
        return self.encode(texts, **kwargs)

    # Answers ---------------------------------------------------------------------------------

    def _start(
        self, prompt: Prompt, tools: Tools, options: dict[str, Any]
    ) -> tuple[spi.Stream, Tools]:
        if isinstance(prompt, str):  # its answer is read as it is, too
            tools = replace(tools, parts_thoughts=False)
        asked = spi.SchemaPrompt.receive(prompt) or prompt
        config = tools.settings(self.answer_config(options))
        return self.loaded_engine().stream(asked, config), tools

    def _start_string(
        self, prompt: str, formatted: bool, options: dict[str, Any]
    ) -> tuple[spi.Stream, Tools]:
        tools = taken(self.loaded_engine(), {"grammar": options.get("grammar")})
        return self._start(self.completion_prompt(prompt, formatted), tools, options)

    def _start_chat(
        self, messages: Sequence[ChatMessage], options: dict[str, Any]
    ) -> tuple[spi.Stream, Tools]:
        options = dict(options)
        tools = taken(self.loaded_engine(), options)
        if not tools.is_offered:
            return self._start(self.chat_prompt(messages), tools, options)
        if self._has_template:
            raise ValueError("messages_to_prompt lists no tools; leave it out to call tools")
        config = tools.settings(self.answer_config(options))
        return self.loaded_engine().stream(tools.prompt(plain(messages)), config), tools

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """One answer to chat messages; `kwargs` are `GenerationConfig`'s."""
        stream, tools = self._start_chat(messages, kwargs)
        return GrowingChat(self, stream, tools).response("".join(stream))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """An answer piece by piece."""
        stream, tools = self._start_chat(messages, kwargs)
        return pieces(stream, GrowingChat(self, stream, tools).response)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """One answer to a string; put in a user's message unless it is formatted already."""
        stream, tools = self._start_string(prompt, formatted, kwargs)
        return completion(self, stream, tools, "".join(stream))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """An answer to a string, piece by piece."""
        stream, tools = self._start_string(prompt, formatted, kwargs)
        return pieces(stream, partial(completion, self, stream, tools))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, off the event loop; a cancelled task stops the generation."""
        stream, tools = await asyncio.to_thread(self._start_chat, messages, kwargs)
        return GrowingChat(self, stream, tools).response(await stream.atext())

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """As `stream_chat`, off the event loop."""
        stream, tools = await asyncio.to_thread(self._start_chat, messages, kwargs)
        return apieces(stream, GrowingChat(self, stream, tools).response)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """As `complete`, off the event loop."""
        stream, tools = await asyncio.to_thread(self._start_string, prompt, formatted, kwargs)
        return completion(self, stream, tools, await stream.atext())

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        """As `stream_complete`, off the event loop."""
        stream, tools = await asyncio.to_thread(self._start_string, prompt, formatted, kwargs)
        return apieces(stream, partial(completion, self, stream, tools))

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
        if not self._gives_objects():
            return super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        return GrowingObject(self, output_cls, prompt, llm_kwargs or {}, prompt_args).stream()

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if not self._gives_objects():
            own = super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return await own
        return GrowingObject(self, output_cls, prompt, llm_kwargs or {}, prompt_args).astream()

    def _gives_objects(self) -> bool:
        """Whether objects are the arguments of a call."""
        return self.metadata.is_function_calling_model and self.pydantic_program_mode in CALLING

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **_: Any
    ) -> list[ToolSelection]:
        """The calls in an answer; while it grows, with the arguments so far.

        Raises:
            ValueError: there are none.
            CutOffError: the answer ended within one, or before it.
        """
        return selections(response, must_call=error_on_no_tool_call)


def unwrapped(llm: LLM) -> CachedRAGLLM:
    """The model whose engine reads what an LLM is asked.

    Args:
        llm: a `CachedRAGLLM`, or what `as_structured_llm` made of one.

    Raises:
        ConfigError: it is neither.
    """
    inside = llm.llm if isinstance(llm, StructuredLLM) else llm
    said = "keeps no KV; give the CachedRAGLLM that answers, which will read the nodes"
    found: CachedRAGLLM = spi.checked(inside, CachedRAGLLM, said)
    return found
