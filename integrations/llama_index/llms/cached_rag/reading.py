"""Nodes on their way to a prompt, made known to the model that will read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.llms.cached_rag.base import CachedRAGLLM
from llama_index.llms.cached_rag.nodes import module_text

from cached_rag import ConfigError, encode_what_fits

Encode = Literal["eager", "background", "off"]


@dataclass(frozen=True)
class Reader:
    """A model, and what is to happen to nodes that have no KV.

    Attributes:
        encode: "eager" prefills them at once, "background" after the first answer that used them,
            "off" leaves them.
        prompt, variable: the template nodes go to, for "eager"; see `CachedRAGLLM.encode`.

    Raises:
        cached_rag.ConfigError: `encode` is none of these.
    """

    llm: CachedRAGLLM
    encode: Encode = "background"
    prompt: BasePromptTemplate | None = None
    variable: str = "context_str"

    def __post_init__(self) -> None:
        if self.encode not in get_args(Encode):
            raise ConfigError(f"encode is one of {get_args(Encode)}, not {self.encode!r}")

    def expect(self, nodes: Sequence[NodeWithScore]) -> None:
        """Nodes with metadata as synthesis shows it, and without, as citations have them."""
        shown = [module_text(node.node) for node in nodes]
        bare = [node.node.get_content(MetadataMode.NONE) for node in nodes]
        if self.encode == "eager":
            encode_what_fits(self._encode, shown)
        if self.encode != "off":
            self.llm.register([*shown, *bare])
        # The engine remembers so many: those shown come last, and are forgotten last.
        self.llm.prefetch(dict.fromkeys([*bare, *shown]))

    def _encode(self, texts: Sequence[str]) -> None:
        self.llm.encode(texts, prompt=self.prompt, variable=self.variable)
