"""A string model over `cached_rag.Engine`, for chains whose prompts are plain text."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import PrivateAttr

from cached_rag.spi import CALL_SETTINGS, GENERATION_SETTINGS, SchemaPrompt, Stream, call_options
from cached_rag.spi import Generation as Answer
from langchain_cached_rag.messages import Prompt, usage
from langchain_cached_rag.settings import AsyncRun, EngineSettings, Pieces, Run, Stop, their_errors

_OF_A_CALL = {*GENERATION_SETTINGS, *CALL_SETTINGS, "top_logprobs", "model"} - {"stop"}


class CachedRAGLLM(EngineSettings, BaseLLM):  # type: ignore[misc]  # names of arguments
    """A local model that completes strings and does not prefill text again whose KV it holds.

    `batch` is one call: the prompts' tokens are computed together. An instruction-tuned model wants
    its chat template: `ChatCachedRAG` takes strings, too, and `| StrOutputParser()` gives strings.

    Example:
        llm = CachedRAGLLM(model="HuggingFaceTB/SmolLM2-135M", store="kv", max_tokens=32)
        (PromptTemplate.from_template("{context}\\n\\nQ: {question}\\nA:") | llm).invoke(...)
    """

    if TYPE_CHECKING:  # most fields are made while this is imported

        def __init__(self, **settings: Any) -> None: ...

    # Settings of the call that this object is a copy for.
    _of_call: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "cached-rag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, **self._of_call}

    def _prompt(self, value: Any) -> Prompt:
        return value if isinstance(value, str) else value.to_string()

    def _asked(self, text: str) -> Prompt | SchemaPrompt:
        """What a string stands for: a schema's prompt, if a template has just made it from one."""
        return SchemaPrompt.receive(text) or text

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """As `BaseLLM.generate`; a call's settings count as this model's own in response caches."""
        with their_errors():
            return super(CachedRAGLLM, self._asked_so(kwargs)).generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """As `generate`."""
        own = self._asked_so(kwargs)
        with their_errors():
            return await super(CachedRAGLLM, own).agenerate(prompts, *args, **kwargs)

    def _asked_so(self, options: dict[str, Any]) -> CachedRAGLLM:
        """A copy that has a call's settings among what its answers depend on."""
        copied = self.model_copy()
        copied._of_call = {n: v for n, v in call_options(options).items() if n in _OF_A_CALL}
        return copied

    def _generate(
        self, prompts: list[str], stop: Stop = None, run_manager: Run = None, **kwargs: Any
    ) -> LLMResult:
        model = kwargs.pop("model", None)
        engine, config = self.loaded_engine(model), self._config(stop, kwargs)
        answers = engine.generate_batch([self._asked(prompt) for prompt in prompts], config)
        return self._result(answers, model)

    async def _agenerate(
        self, prompts: list[str], stop: Stop = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> LLMResult:
        streams = [await asyncio.to_thread(self._start, p, stop, kwargs) for p in prompts]
        try:
            await asyncio.gather(*(stream.atext() for stream in streams))
        finally:  # one has failed, or nobody wants the others any more
            for stream in streams:
                stream.cancel()
        return self._result([stream.generation for stream in streams], kwargs.get("model"))

    def _result(self, answers: list[Answer], model: str | None) -> LLMResult:
        generations = [
            [Generation(text=one.text, generation_info=self._told(one, model))] for one in answers
        ]
        read = sum(one.report.prompt_tokens for one in answers)
        made = sum(one.report.output_tokens for one in answers)
        counts = {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}
        output = {"model_name": model or self._model, "token_usage": counts}
        return LLMResult(generations=generations, llm_output=output)

    def _start(self, prompt: str, stop: Stop, options: dict[str, Any]) -> Stream:
        options = dict(options)
        engine = self.loaded_engine(options.pop("model", None))
        return engine.stream(self._asked(prompt), self._config(stop, options))

    def _streamed(self, asked: Any, stop: Stop, options: dict[str, Any]) -> Pieces:
        stream = self._start(asked, stop, options)
        last = partial(self._last_chunk, stream, options)
        return stream, lambda piece: [GenerationChunk(text=piece)], last

    def _last_chunk(self, stream: Stream, options: dict[str, Any]) -> list[GenerationChunk]:
        info = self._told(stream, options.get("model"))
        return [GenerationChunk(text="", generation_info=info)]

    def _told(self, answer: Answer | Stream, model: str | None) -> dict[str, Any]:
        return {**self._about(answer, model), "usage_metadata": usage(answer.report)}
