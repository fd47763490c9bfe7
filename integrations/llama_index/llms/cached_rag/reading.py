"""Nodes on their way to a prompt, made known to the model that will read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llama_index.core.schema import NodeWithScore
from llama_index.llms.cached_rag.nodes import bare_text, module_text

from cached_rag.spi import Learner


class Reader(Learner):
    """A model that will read nodes, and what is to happen to those that have no KV."""

    def expect(self, nodes: Sequence[NodeWithScore]) -> None:
        """Nodes with metadata as synthesis shows it, and without, as citations have them."""
        shown = [module_text(node.node) for node in nodes]
        bare = [bare_text(node.node) for node in nodes]
        self.learn(shown)
        if self.encode != "off":
            replace(self, encode="background").learn(bare)
        # The engine remembers so many: those shown come last, and are forgotten last.
        self.llm.prefetch(dict.fromkeys([*bare, *shown]))
