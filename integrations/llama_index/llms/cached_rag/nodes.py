"""Nodes as chunks: what text they become, and a mark that survives any pipeline.

An `IngestionPipeline` skips a transformation when its cache has the result, and runs it in other
processes if told to. So a transformation only marks nodes; what is marked is encoded where the
model is, from the pipeline's result or its docstore.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent

MARK = "cached_rag"


def module_text(node: BaseNode) -> str:
    """A node's text as response synthesis puts it in a prompt."""
    return str(node.get_content(metadata_mode=MetadataMode.LLM))


def bare_text(node: BaseNode) -> str:
    """A node's text without metadata, as citations put it in a prompt."""
    return str(node.get_content(metadata_mode=MetadataMode.NONE))


class MarkModules(TransformComponent):
    """Marks nodes for `CachedRAGLLM.encode_nodes`. Holds no model: cheap to copy and to pickle.

    The mark is metadata that neither the model nor the embedding sees.
    """

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same nodes, marked."""
        for node in nodes:
            node.metadata[MARK] = True
            for excluded in (node.excluded_llm_metadata_keys, node.excluded_embed_metadata_keys):
                if MARK not in excluded:
                    excluded.append(MARK)
        return nodes


def marked(nodes: Iterable[BaseNode]) -> list[BaseNode]:
    """The nodes that carry the mark."""
    return [node for node in nodes if node.metadata.get(MARK)]
