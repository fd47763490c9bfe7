"""The model-facing half: prompt in, text out, with cached modules wherever they occur in it.

`Engine.prefill` is the main flow; its numbered steps are the library in one screen. Knows no
document and no framework.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cached_rag.assemble import KVBuffer, Workspace
from cached_rag.config import GenerationConfig, StoreConfig
from cached_rag.context import Context
from cached_rag.encode import EncodeSummary
from cached_rag.encoder import Encoder
from cached_rag.errors import (
    ConfigError,
    ContextOverflowError,
    CorruptBlobError,
    RelocationError,
)
from cached_rag.fuse import Prefilled, prefill_rows, prefill_selected
from cached_rag.kv import ModuleKV
from cached_rag.library import Library
from cached_rag.loading import LayerLoader
from cached_rag.model import LanguageModel, load_model
from cached_rag.plan import Missed, Plan, make_plan
from cached_rag.prompt import Message, Rendered, Tokenization, Tokens
from cached_rag.report import Report
from cached_rag.selectors import CacheBlend, Reuse, Selector
from cached_rag.sequences import EXACT, SequenceTree
from cached_rag.stream import Clock, Generation, Prefill, Stream
from cached_rag.write_back import Activity, WriteBack

_log = logging.getLogger(__name__)
Prompt = str | Sequence[Message] | Rendered


class Engine:
    """A model and its library of modules. One request runs at a time; others wait.

    Use `Engine.load`; or give a `LanguageModel` from `wrap_model`.
    """

    def __init__(self, model: LanguageModel, store: StoreConfig | None = None) -> None:
        self.model = model
        settings = store or StoreConfig()
        self.library = Library(settings, model.fingerprint)
        self.tokenization = Tokenization(model.tokenizer)
        self._encoder = Encoder(model, self.library, self.tokenization)
        self._workspace = Workspace(model.shapes)
        self.sequences = SequenceTree(settings.sequence_bytes)
        self._activity = Activity()
        self.write_back = WriteBack(self._activity) if settings.write_back else None
        self.lock = threading.Lock()

    @classmethod
    def load(
        cls,
        model: str = "smollm2-135m",
        *,
        store: StoreConfig | str | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | None = None,
    ) -> Engine:
        """Load a model by alias, hub id, folder or GGUF file; `store` is a folder or settings.

        Raises:
            ModelNotFoundError, ModelError: see `load_model`.
        """
        settings = StoreConfig(path=store) if isinstance(store, str) else store
        return cls(load_model(model, dtype, device), settings)

    def close(self) -> None:
        """Write what is pending and release files."""
        if self.write_back is not None:
            self.write_back.close()
        self.library.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Modules ---------------------------------------------------------------------------------

    def encode(
        self,
        texts: Sequence[str],
        prefix: Prompt | None = None,
        progress: Callable[[int], object] = lambda _: None,
        *,
        context: Context | None = None,
    ) -> EncodeSummary:
        """Prefill texts once and keep their KV; those that are there already cost nothing.

        Args:
            texts: each becomes a module, found later wherever a prompt contains it verbatim
                (surrounding white space aside).
            prefix: what they will stand behind (see `head`); None for BOS alone.
            progress: called with the number of modules prefilled, after each batch.
            context: what stands between prefix and text while it is prefilled; None for nothing.

        Raises:
            ContextOverflowError: a text exceeds the model's context.
            StoreFullError: no room left; what was encoded before is kept.
        """
        rendered = None if prefix is None else self._rendered(prefix)
        with self.lock:
            return self._encoder.encode(texts, rendered, context, progress)

    def forget(self, texts: Sequence[str]) -> int:
        """Drop modules and their KV; says how many KVs went."""
        found = (self.library.table.get(text.strip()) for text in texts)
        return self.library.remove([module for module in found if module is not None])

    def head(self, messages: Sequence[Message], before: str) -> Rendered:
        """What a chat prompt says before the text `before`, as a prefix for `encode`.

        Raises:
            ConfigError: `before` does not occur in the rendered messages.
        """
        rendered = self.tokenization.render(messages)
        at = rendered.text.find(before)
        if at < 0:
            raise ConfigError(f"the rendered messages do not contain {before!r}")
        literal = tuple(span for span in rendered.literal if span[1] <= at)
        return Rendered(rendered.text[:at], literal, is_chat=True)

    # Generation ------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> Generation:
        """Answer a prompt (a string, or chat messages); options override the config's settings.

        Raises:
            ConfigError: an unknown or bad setting.
            ContextOverflowError: prompt and answer do not fit the context.
            RelocationError: an explicitly chosen method needs what the model cannot do.
        """
        stream = self.stream(prompt, config, **options)
        text = "".join(stream)
        return Generation(text, tuple(stream.token_ids), stream.finish_reason, stream.report)

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> Stream:
        """The answer piece by piece, as it is made. Errors as `generate`, at the first piece."""
        config = (config or GenerationConfig()).replace(**options)
        return Stream(self.model, self.lock, lambda: self.prefill(prompt, config), config)

    def prefill(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> Prefill:
        """Everything up to the logits of the first answer token. Errors as `generate`."""
        config = (config or GenerationConfig()).replace(**options)
        report = Report(config.method_name)
        is_over = self._activity.begin()
        try:
            return self._prefill(prompt, config, report, is_over)
        except BaseException:
            is_over()
            raise

    def _prefill(
        self,
        prompt: Prompt,
        config: GenerationConfig,
        report: Report,
        is_over: Callable[[], None],
    ) -> Prefill:
        with self.lock, torch.inference_mode():
            # 1) The prompt's tokens, as plain generation would have them.
            clock = Clock()
            self.library.refresh()
            tokens, plan = self.plan(prompt, report.method, report)
            report.prompt_tokens = len(tokens)
            self._check_fits(len(tokens), config.max_tokens)
            report.match_ms = clock.lap() - report.load_ms
            # 2) Cached KV at its positions, in one buffer.
            plan, selector = self._allowed(plan, config, report)
            kind = _kind(report.method, selector)
            plan = plan.behind(self._seen(kind, tokens, plan))
            buffer = self._workspace.take(len(tokens) + config.max_tokens)
            loader = self._place(plan, buffer)
            # 3) The rows that have no KV, and those that the method repairs.
            try:
                done = self._compute(tokens, plan, selector, buffer, report, loader)
            except CorruptBlobError as error:
                assert loader is not None
                self._drop(loader.failed, error, report)
                done = None
            finally:
                if loader is not None:
                    loader.finish()
            report.fuse_ms = clock.lap()
        if done is None:  # with what was damaged gone, once more
            return self._prefill(prompt, config, report, is_over)

        def release() -> None:
            self._remember(kind, tokens, plan, buffer)
            is_over()

        return Prefill(tokens, done.logits, buffer, report, release, done.rows)

    def _place(self, plan: Plan, buffer: KVBuffer) -> LayerLoader | None:
        """Put cached KV where it belongs, at once if it is at hand, else while layers run."""
        is_at_hand = all(isinstance(place.kv, ModuleKV) for place in plan.placements)
        if not is_at_hand or (plan.placements and self.model.device.type == "cuda"):
            return LayerLoader(buffer, plan.placements, self.model.rule)
        for place in plan.placements:
            buffer.place(place.kv, place.begin, self.model.rule)
        return None

    def _drop(self, damaged: Any, error: CorruptBlobError, report: Report) -> None:
        """Forget a module's KV that turned out to be damaged while it was read."""
        _log.warning("%s The module is computed anew.", error)
        report.notes.append(str(error))
        if damaged is None or damaged.source is None:
            raise error
        self.library.store.delete(self.library.key(*damaged.source))

    def _seen(self, kind: str, tokens: Tokens, plan: Plan) -> list[ModuleKV]:
        """KV of the longest beginning that an earlier prompt shared."""
        ends = [end for _, end in plan.modules]
        found = [self.sequences.find(name, tokens.ids, ends) for name in (EXACT, kind)]
        return max(found, key=len)

    def _remember(self, kind: str, tokens: Tokens, plan: Plan, buffer: KVBuffer) -> None:
        """When an answer is complete: keep its modules' KV, and see to those it missed."""
        names, ends = [name for name, _ in plan.modules], [end for _, end in plan.modules]
        with self.lock:
            self.sequences.add(kind, tokens.ids, ends, names, buffer)
            self._workspace.give(buffer)
        if self.write_back is None:
            return
        for missed in plan.missed:
            name = (missed.module.text_digest, missed.behind)
            self.write_back.offer(name, partial(self._recover, missed))
        for place in plan.placements:
            if place.source is not None and not isinstance(place.kv, ModuleKV):
                self.write_back.offer(place.source, partial(self.library.fetch, *place.source))

    def _recover(self, missed: Missed) -> None:
        with self.lock, torch.inference_mode():
            self._encoder.recover(missed.module, missed.text, missed.behind)

    def plan(self, prompt: Prompt, method: str, report: Report) -> tuple[Tokens, Plan]:
        """The prompt's tokens, and which of them come from which module; computes nothing."""
        rendered = self._rendered(prompt)
        if method == "full":
            tokens = self.tokenization.tokenize(rendered)
            return tokens, Plan((), (), len(tokens))
        found = list(self.library.table.find(rendered.text))
        literal = (*rendered.literal, *((match.begin, match.end) for match in found))
        tokens = self.tokenization.tokenize(Rendered(rendered.text, literal, rendered.is_chat))
        clock = Clock()
        sink_ids = self.tokenization.sink_ids
        plan = make_plan(self.library, rendered.text, tokens, found, sink_ids)
        report.load_ms = clock.lap()
        report.modules_missed = len(plan.missed)
        return tokens, plan.exact_only() if method == "prefix" else plan

    def _allowed(
        self, plan: Plan, config: GenerationConfig, report: Report
    ) -> tuple[Plan, Selector]:
        """The plan, cut to what the model can do if the method was left to us.

        Raises:
            RelocationError: it cannot do what was asked for by name.
        """
        selector = config.selector() or Reuse()
        rule = self.model.rule
        try:
            for place in plan.placements:
                rule.check(place.begin - place.kv.start, plan.num_tokens)
        except RelocationError as error:
            if config.method != "auto":
                raise
            report.notes.append(str(error))
            in_place = plan.exact_only()
            switched = rule.limit is not None and plan.num_tokens > rule.limit
            report.method = "full" if switched else "prefix"
            return (Plan((), (), plan.num_tokens) if switched else in_place), Reuse()
        if config.method == "auto" and not self.model.decoder.is_fast:
            report.method, selector = "cacheblend", CacheBlend()
            report.notes.append("this model's attention cannot be watched, so cacheblend is used")
        return plan, selector

    def _compute(
        self,
        tokens: Tokens,
        plan: Plan,
        selector: Selector,
        buffer: KVBuffer,
        report: Report,
        loader: LayerLoader | None,
    ) -> Prefilled:
        ids = torch.tensor([tokens.ids], device=self.model.device)
        layout = plan.layout(self.model.shapes.num_layers)
        cached = int((~layout.live).sum())
        report.modules_hit = sum(place.is_module for place in plan.placements)
        if not cached:
            done = prefill_rows(self.model.decoder, buffer, ids)
        else:
            ready = loader.wait if loader else None
            done = prefill_selected(self.model.decoder, buffer, ids, layout, selector, ready=ready)
        report.charged_recompute = done.computed / (len(tokens) * self.model.shapes.num_layers)
        report.recomputed_tokens = int((~layout.live[done.rows.cpu()]).sum())
        report.cached_tokens = cached - report.recomputed_tokens
        return done

    def _rendered(self, prompt: Prompt) -> Rendered:
        return prompt if isinstance(prompt, Rendered) else self.tokenization.render(prompt)

    def _check_fits(self, prompt_tokens: int, max_tokens: int) -> None:
        room = self.model.context_length
        if prompt_tokens + max_tokens > room:
            raise ContextOverflowError(
                f"a prompt of {prompt_tokens} tokens and an answer of up to {max_tokens} "
                f"exceed the model's context of {room}; retrieve fewer or smaller chunks, or lower "
                "max_tokens"
            )


def _kind(method: str, selector: Selector) -> str:
    """What kind of KV a method leaves behind: exact, or repaired in its own way."""
    is_whole = getattr(selector, "recompute_ratio", None) == 1.0
    return EXACT if is_whole or method in ("full", "prefix") else f"{method} {selector!r}"
