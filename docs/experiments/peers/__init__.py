"""Who is compared in `answers`, `memory` and `peers`: a file a peer, and who is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from cached_rag.config import StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import CachedRAGError, ConfigError
from docs.experiments.answers import Peer, Question, Sample, Transformers
from docs.experiments.peers.kvboost import KVBoost
from docs.experiments.peers.llama_cpp import LlamaCpp, gguf_file
from docs.experiments.peers.llama_server import LlamaServer
from docs.experiments.peers.own import OwnEngine, TransformersPrefix
from docs.experiments.peers.vllm import Vllm

__all__ = ["DEFAULT", "EVERYBODY", "OTHERS", "Means", "Peer", "Question", "Sample", "open_peers"]
DEFAULT = ("transformers", "llama.cpp", "vllm", "full", "auto")
# Modules that import a framework.
_FRAMEWORKS = {
    "langchain-huggingface": "docs.experiments.peers.langchain",
    "llama-index-llms-huggingface": "docs.experiments.peers.llama_index",
}
# Other programs, and methods of this library, which llama.cpp may run.
OTHERS = (
    *("transformers", "transformers-prefix", "langchain-huggingface"),
    *("llama-index-llms-huggingface", "kvboost", "llama.cpp", "llama-server", "vllm"),
)
EVERYBODY = (*OTHERS, "full", "auto", "auto@llama.cpp")


@dataclass(frozen=True)
class Means:
    """What peers are made of.

    Attributes:
        engine: has the model, and encodes the chunks. It is this library's side.
        model: the name it was loaded by.
        context: most tokens of a prompt and its answer.
        gguf: the file that llama.cpp reads; None for the one behind `model`.
        vllm: address of a vLLM server; None for none.
        apart: each method of this library has an engine of its own, which keeps what it keeps by
            default; else all have `engine`.
    """

    engine: Engine
    model: str
    context: int
    gguf: Path | None = None
    vllm: str | None = None
    apart: bool = False

    def make(self, name: str) -> Peer:
        """The peer of that name. A name that is no other program's is a method of this library.

        Raises:
            CachedRAGError: it is not there, or cannot be had with these means.
        """
        if name in ("llama.cpp", "llama-server"):
            kind = LlamaCpp if name == "llama.cpp" else LlamaServer
            gguf = self.gguf or gguf_file(self.model)
            return kind(gguf, self.context, torch.get_num_threads())
        if name in ("transformers", "transformers-prefix"):
            own = Transformers if name == "transformers" else TransformersPrefix
            return own(self.engine)
        if name == "kvboost":
            return KVBoost(self.engine)
        if name == "vllm":
            return Vllm(self._server(self.engine))
        if name in _FRAMEWORKS:
            return self._framework(_FRAMEWORKS[name])
        return self._own(self.engine, *name.split("@", 1))

    def _own(self, engine: Engine, method: str, backend: str = "") -> OwnEngine:
        """A method, in the engine that is there or in one of its own."""
        if backend:
            store = StoreConfig() if self.apart else engine.settings
            other = Engine.load(self.model, backend=backend, store=store)
            return OwnEngine(other, method, owns=True, plain=f"full@{backend}")
        if self.apart:
            return OwnEngine(Engine(engine.model, StoreConfig()), method, owns=True)
        return OwnEngine(engine, method)

    def _framework(self, module: str) -> Peer:
        try:
            peer: Peer = import_module(module).peer(self.engine)
            return peer
        except ImportError as error:
            raise ConfigError(f"it is not installed: {error}") from error

    def _server(self, engine: Engine) -> str:
        if self.vllm is None:
            raise ConfigError(
                "vLLM is asked over HTTP: start a server with the weights in "
                f"{engine.model.tokenizer.name_or_path} (docs/speed.md says how) and give its "
                "address: --vllm URL"
            )
        return self.vllm


def open_peers(
    means: Means, names: Sequence[str] = (), default: Sequence[str] = DEFAULT
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Make peers by name.

    Args:
        names: each of them must be there; empty for those of `default` that are.

    Returns:
        The peers, and why others of `default` are not there.

    Raises:
        CachedRAGError: one that was asked for by name is not there.
    """
    peers: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names or default:
        try:
            peers[name] = means.make(name)
        except CachedRAGError as error:
            if names:
                for peer in peers.values():
                    peer.close()
                raise
            missing[name] = str(error)
    return peers, missing
