"""What a peer is, something that answers the benchmark's prompts; this library and transformers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.transformers.packing import densify
from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ModelError, ModelNotFoundError


@dataclass(frozen=True)
class Question:
    """A prompt, the same one for all peers.

    Attributes:
        prompt: as text, in which this library finds its chunks.
        ids: its tokens, which all others are given.
    """

    prompt: Rendered
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
        ttft_ms, total_ms: milliseconds from asking to the first token, and to the last.
        token_ids: the answer's tokens.
        gaps_ms: milliseconds between its pieces, as they came; empty if they came as one.
    """

    ttft_ms: float
    total_ms: float
    token_ids: tuple[int, ...]
    gaps_ms: tuple[float, ...] = ()

    @property
    def token_ms(self) -> float:
        """Milliseconds of one token after the first; 0 if there is none."""
        return (self.total_ms - self.ttft_ms) / max(1, len(self.token_ids) - 1)


class Peer(ABC):
    """A program, or a way of this library, that answers prompts one after another.

    Attributes:
        about: what it is: version, weights, settings.
        plain: name of the peer that does the same without what this one learns; empty for none.
    """

    about: str
    plain: str = ""

    @abstractmethod
    def answer(self, question: Question, max_tokens: int) -> Sample:
        """Answer greedily with exactly so many tokens, and go on where the model would end."""

    def learn(self, texts: Sequence[str], head: Rendered) -> None:
        """Read what prompts will have behind their head, if it can before they come."""
        return

    def settle(self) -> None:
        """Finish what an answer left for later, so that it does not disturb the next peer."""
        return

    def close(self) -> None:
        """Free its memory. It is not asked again."""
        return


class Stopwatch:
    """Times one answer; it is started when it is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._came_ms: list[float] = []
        self._token_ids: list[int] = []

    def add(self, *token_ids: int) -> None:
        """Take note of tokens, in the moment when they are there."""
        if token_ids:
            self._came_ms.append(self._passed_ms())
        self._token_ids += token_ids

    def sample(self) -> Sample:
        """The answer, in the moment when it is complete."""
        passed, came = self._passed_ms(), self._came_ms
        gaps = tuple(later - earlier for earlier, later in pairwise(came))
        return Sample(came[0] if came else passed, passed, tuple(self._token_ids), gaps)

    def _passed_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000


class Own(Peer):
    """A method of this library."""

    def __init__(self, engine: Engine, method: str) -> None:
        """Name the method.

        Raises:
            ConfigError: there is no such method.
        """
        GenerationConfig(method=method)
        self.engine, self.method = engine, method
        self.about = f"Cached RAG, method {method}, {engine.model.name}, no drafts"

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`.

        Raises:
            ModelError: the engine read the prompt as other tokens than the other peers have.
        """
        config = GenerationConfig(
            method=self.method,
            max_tokens=max_tokens,
            ignore_eos=True,
            repetition_penalty=1.0,
            drafts=False,
        )
        answer = self.engine.generate(question.prompt, config)
        report = answer.report
        if report.prompt_tokens != len(question.ids):
            raise ModelError(
                f"{self.method} read {report.prompt_tokens} tokens where the others are given "
                f"{len(question.ids)}, so their times cannot be compared; a chunk of the texts "
                "spells a control token: take other texts"
            )
        return Sample(report.ttft_ms, report.total_ms, tuple(answer.token_ids))

    def settle(self) -> None:
        """Encode now what the prompt missed."""
        if self.engine.write_back is not None:
            self.engine.write_back.drain()


def load_again(engine: Engine) -> Any:
    """The engine's weights once more, in the same dtype and on the same device.

    Raises:
        ModelNotFoundError: the engine's model was not loaded from files.
    """
    shapes, folder = engine.model.shapes, engine.model.tokenizer.name_or_path
    if not folder:
        raise ModelNotFoundError(
            f"{engine.model.name} is in memory only, so transformers cannot load it again; "
            "save it to a folder and load it from there"
        )

    def load() -> Any:
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=shapes.dtype)
        except (OSError, ValueError) as error:  # such as a GGUF that llama.cpp runs
            raise ModelNotFoundError(
                f"transformers finds no weights in {folder}: {error}"
            ) from error
        densify(model, shapes.dtype)  # a GGUF's few bits are this library's affair
        model.generation_config = transformers.GenerationConfig()  # greedy, no penalty, no end
        return model.eval().to(shapes.device)

    # In the thread where the engine computes: a second one slows both down.
    return on_model_thread(load)


class Transformers(Peer):
    """`generate` on a copy of the engine's model."""

    def __init__(self, engine: Engine) -> None:
        """Load the copy.

        Raises:
            ModelNotFoundError: the engine's model was not loaded from files.
        """
        self._model = load_again(engine)
        self._device = engine.model.shapes.device
        kernel, dtype = self._model.config._attn_implementation, engine.model.shapes.dtype
        self.about = f"transformers {transformers.__version__}, generate, {dtype}, {kernel}"

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`."""
        return on_model_thread(partial(self._answer, question, max_tokens))

    def _answer(self, question: Question, max_tokens: int, **how: Any) -> Sample:
        streamer = _Streamer()
        ids = torch.tensor([question.ids], device=self._device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            streamer=streamer,
            **how,
        )
        return streamer.watch.sample()

    def close(self) -> None:
        """See `Peer`."""
        self._model = None


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Is given the prompt first, then each token as soon as it is there."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.watch.add(*value.tolist())
        self._has_prompt = True

    def end(self) -> None:
        pass
