"""The last of a query engine's postprocessors: the model is told of nodes as it will read them."""

from __future__ import annotations

from cached_rag.errors import needs_extra
from cached_rag.spi import Encode

with needs_extra("llama-index", "the integration with LlamaIndex"):
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.llms.llm import LLM
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.schema import NodeWithScore, QueryBundle
    from llama_index.llms.cached_rag import Reader, unwrapped

__all__ = ["CachedPostprocessor"]


class CachedPostprocessor(BaseNodePostprocessor):
    """Returns nodes as they come, and sees that the model can reuse them.

    It does for nodes what `CachedRetriever` does, behind postprocessors that give them other texts
    or bring further nodes. Put it last.

    Example:
        window = MetadataReplacementPostProcessor("window")
        index.as_query_engine(node_postprocessors=[window, CachedPostprocessor(llm)])
    """

    _reader: Reader = PrivateAttr()

    def __init__(
        self,
        llm: LLM,
        *,
        encode: Encode = "background",
        prompt: BasePromptTemplate | None = None,
        variable: str = "context_str",
    ) -> None:
        """Say who reads the nodes.

        Args:
            encode: what happens to nodes that have no KV; see `cached_rag.spi.Learner`.
            prompt, variable: the template nodes go to, for "eager"; see `CachedRAGLLM.encode`.

        Raises:
            cached_rag.ConfigError: there is no such `encode`, or `llm` is of another kind.
        """
        super().__init__()
        self._reader = Reader(unwrapped(llm), encode, {"prompt": prompt, "variable": variable})

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex serialises under."""
        return "CachedPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._reader.expect(nodes)
        return nodes
