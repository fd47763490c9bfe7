"""transformers' `generate` on a model of its own, whose modules nothing was changed in."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from cached_rag.backends.thread import on_model_thread
from cached_rag.backends.transformers.inspection import CACHE
from cached_rag.backends.transformers.weights.packing import densify
from cached_rag.engine.engine import Engine
from cached_rag.errors import ModelNotFoundError
from cached_rag.evaluation.peers.base import Peer, Question, Sample, Stopwatch


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
        model.generation_config = GenerationConfig()  # greedy, no penalty, no end
        return model.eval().to(shapes.device)

    # In the thread where the engine computes: a second one slows both down.
    return on_model_thread(load)


class Transformers(Peer):
    """`generate` on a copy of the engine's model."""

    def __init__(self, engine: Engine, *, keeps: bool = False) -> None:
        """Load the copy.

        Args:
            keeps: the KV of the last prompt and its answer stays, and the tokens that the next
                prompt begins with are not computed again (transformers' documentation, "KV cache
                strategies", re-use of a prefix).

        Raises:
            ModelNotFoundError: the engine's model was not loaded from files.
        """
        self._model = load_again(engine)
        self._device, self._keeps = engine.model.shapes.device, keeps
        self._held: tuple[tuple[int, ...], DynamicCache] = ((), DynamicCache())
        kernel, dtype = self._model.config._attn_implementation, engine.model.shapes.dtype
        kept = ", last prompt kept" if keeps else ""
        self.about = f"transformers {transformers.__version__}, generate{kept}, {dtype}, {kernel}"

    def answer(self, question: Question, max_tokens: int) -> Sample:
        """See `Peer`."""
        return on_model_thread(partial(self._answer, question, max_tokens))

    def _answer(self, question: Question, max_tokens: int) -> Sample:
        streamer = _Streamer()
        ids = torch.tensor([question.ids], device=self._device)
        how = {CACHE: self._beginning(question.ids)} if self._keeps else {}
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            streamer=streamer,
            **how,
        )
        sample = streamer.watch.sample()
        if self._keeps:
            self._held = (*question.ids, *sample.token_ids[:-1]), how[CACHE]
        return sample

    def _beginning(self, ids: tuple[int, ...]) -> DynamicCache:
        """The last prompt's KV, cut to the tokens that these begin with."""
        held, cache = self._held
        pairs = zip(held, ids[:-1], strict=False)  # the last token is computed, for its logits
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not common:
            return DynamicCache()
        if common < len(held):
            cache.crop(common - len(held))  # how many less
        return cache

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
