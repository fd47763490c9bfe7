"""An LLM's prompts as its engine takes them, and what is left of the context for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.bridge.pydantic import ConfigDict
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.llms.cached_rag.messages import OwnTemplate, Prompt, plain
from llama_index.llms.cached_rag.settings import EngineSettings
from llama_index.llms.cached_rag.tools import can_call
from typing_extensions import Self

_log = logging.getLogger(__name__)


class PromptingLLM(EngineSettings, FunctionCallingLLM):
    """Settings and prompts; answers are `CachedRAGLLM`'s."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    def __copy__(self) -> Self:
        """A copy may get another model, so its own template is not the original's."""
        copied = super().__copy__()
        if not copied._has_template:
            copied.messages_to_prompt = OwnTemplate(copied)
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Settings, of a copy: LlamaIndex takes what cannot be pickled off the object itself."""
        bare = self.model_copy()
        if not self._has_template:
            del bare.__dict__["messages_to_prompt"]
        if self._held is not None and self._held.is_given:
            _log.warning("an engine is not pickled: elsewhere %r is loaded by name", self.model)
        bare._held = None
        return super(PromptingLLM, bare).__getstate__()

    @property
    def metadata(self) -> LLMMetadata:
        """The model's own limits, less what its chat template adds: LlamaIndex cannot count it."""
        own = self.loaded_engine().model.context_length - self._around()
        return LLMMetadata(
            context_window=min(self.context_window or own, own),
            num_output=self.max_tokens,
            is_chat_model=self._is_chat,
            is_function_calling_model=self._is_chat and can_call(),
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
