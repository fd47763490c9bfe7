"""Who is compared in `cached-rag bench answers`: one file per peer, and here who is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cached_rag.benchmarks.peers.base import Peer, Question, Sample
from cached_rag.benchmarks.peers.llama_cpp import LlamaCpp, gguf_file
from cached_rag.benchmarks.peers.llama_server import LlamaServer
from cached_rag.benchmarks.peers.own import Own
from cached_rag.benchmarks.peers.transformers import Transformers
from cached_rag.benchmarks.peers.vllm import Vllm
from cached_rag.engine.engine import Engine
from cached_rag.errors import CachedRAGError, ConfigError

__all__ = ["DEFAULT", "Means", "Peer", "Question", "Sample", "open_peers"]
DEFAULT = ("transformers", "llama.cpp", "vllm", "full", "auto")


@dataclass(frozen=True)
class Means:
    """What peers are made of.

    Attributes:
        engine: has the model, and encodes the chunks. It is this library's side; None if no peer
            needs it.
        model: the name it was loaded by.
        context: most tokens of a prompt and its answer.
        gguf: the file that llama.cpp reads; None for the one behind `model`.
        vllm: address of a vLLM server; None for none.
    """

    engine: Engine | None
    model: str
    context: int
    gguf: Path | None = None
    vllm: str | None = None

    def make(self, name: str) -> Peer:
        """The peer of that name. A name that is no other program's is a method of this library.

        Raises:
            CachedRAGError: it is not there, or cannot be had with these means.
        """
        if name in ("llama.cpp", "llama-server"):
            kind = LlamaCpp if name == "llama.cpp" else LlamaServer
            gguf = self.gguf or gguf_file(self.model)
            return kind(gguf, self.context, torch.get_num_threads())
        assert self.engine is not None
        if name == "transformers":
            return Transformers(self.engine)
        if name == "vllm":
            return Vllm(self._server(self.engine))
        return Own(self.engine, name)

    def _server(self, engine: Engine) -> str:
        if self.vllm is None:
            raise ConfigError(
                "vLLM is asked over HTTP: start a server with the weights in "
                f"{engine.model.tokenizer.name_or_path} (docs/speed.md says how) and give its "
                "address: --vllm URL"
            )
        return self.vllm


def open_peers(means: Means, names: Sequence[str] = ()) -> tuple[dict[str, Peer], dict[str, str]]:
    """Make peers by name.

    Args:
        names: each of them must be there; empty for those of `DEFAULT` that are.

    Returns:
        The peers, and why others of `DEFAULT` are not there.

    Raises:
        CachedRAGError: one that was asked for by name is not there.
    """
    peers: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names or DEFAULT:
        try:
            peers[name] = means.make(name)
        except CachedRAGError as error:
            if names:
                for peer in peers.values():
                    peer.close()
                raise
            missing[name] = str(error)
    return peers, missing
