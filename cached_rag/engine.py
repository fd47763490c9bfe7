"""The model-facing half: prompt in, text out, with cached modules wherever they occur in it.

`Engine.prefill` is the main flow; its numbered steps are the library in one screen. Knows no
document and no framework.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cached_rag.assemble import KVBuffer, Workspace
from cached_rag.config import AUTO, GenerationConfig, StoreConfig
from cached_rag.encode import EncodeSummary, encode_modules, encode_prefix
from cached_rag.errors import ConfigError, ContextOverflowError, RelocationError
from cached_rag.fuse import Prefilled, prefill_rows, prefill_selected
from cached_rag.kv import ModuleKV
from cached_rag.library import Library
from cached_rag.match import ANCHOR, record_of
from cached_rag.model import LanguageModel, load_model
from cached_rag.plan import Plan, make_plan
from cached_rag.prompt import Message, Rendered, Tokenization, Tokens
from cached_rag.report import Report
from cached_rag.selectors import Reuse, Selector
from cached_rag.store import ModuleRecord
from cached_rag.stream import Clock, Generation, Prefill, Stream

Prompt = str | Sequence[Message] | Rendered


class Engine:
    """A model and its library of modules. One request runs at a time; others wait.

    Use `Engine.load`; or give a `LanguageModel` from `wrap_model`.
    """

    def __init__(self, model: LanguageModel, store: StoreConfig | None = None) -> None:
        self.model = model
        self.library = Library(store or StoreConfig(), model.fingerprint)
        self.tokenization = Tokenization(model.tokenizer)
        self._workspace = Workspace(model.shapes)
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
    ) -> EncodeSummary:
        """Prefill texts once and keep their KV; those that are there already cost nothing.

        Args:
            texts: each becomes a module, found later wherever a prompt contains it verbatim
                (surrounding white space aside).
            prefix: what they will stand behind (see `head`); None for BOS alone.
            progress: called with the number of modules prefilled, after each batch.

        Raises:
            ContextOverflowError: a text exceeds the context.
            StoreFullError: no room left; what was encoded before is kept.
        """
        started = time.perf_counter()
        records, skipped = self._records(texts)
        prefix_ids = self._prefix_ids(prefix, next((t for t in map(str.strip, texts) if t), ""))
        with self.lock:
            head = self._ensure_prefix(prefix_ids)
            wanted = {
                record.token_ids: record
                for record in records
                if not self.library.holds(prefix_ids, record.token_ids)
            }
            present = [record for record in records if record.token_ids not in wanted]
            self.library.add_modules(present)
            for kv in encode_modules(self.model, head, list(wanted), progress):
                self.library.put(prefix_ids, kv)
                self.library.add_modules([wanted[kv.token_ids]])
        return EncodeSummary(
            encoded=len(wanted),
            present=len(present),
            skipped=tuple(skipped),
            tokens=sum(map(len, wanted)),
            seconds=time.perf_counter() - started,
        )

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

    def _prefix_ids(self, prefix: Prompt | None, following: str) -> tuple[int, ...]:
        """The prefix's tokens where a module follows: its last characters may merge differently."""
        if prefix is None:
            return self.tokenization.sink_ids
        head = self._rendered(prefix)
        whole = Rendered(head.text + following[:ANCHOR], head.literal, head.is_chat)
        tokens = self.tokenization.tokenize(whole)
        count = sum(end <= len(head.text) for end in tokens.ends)
        return tuple(tokens.ids[:count])

    def _ensure_prefix(self, prefix_ids: tuple[int, ...]) -> ModuleKV | None:
        """The prefix's own KV, computed if need be, and known as a prefix from now on."""
        if not prefix_ids:
            return None
        kv = self.library.fetch((), prefix_ids)
        if kv is None:
            kv = encode_prefix(self.model, prefix_ids)
            self.library.put((), kv)
        self.library.add_prefix(prefix_ids)
        return kv

    def _records(self, texts: Sequence[str]) -> tuple[list[ModuleRecord], list[tuple[str, str]]]:
        records: dict[str, ModuleRecord] = {}
        skipped = []
        for text in (text.strip() for text in texts):
            if len(text) < ANCHOR:
                skipped.append((text, f"shorter than {ANCHOR} characters, cheaper to prefill"))
                continue
            record = record_of(text, self.tokenization.literal(text))
            records[record.text_digest] = record
        return list(records.values()), skipped

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
        method = AUTO if config.method == "auto" else config.method
        report = Report(method)
        with self.lock, torch.inference_mode():
            # 1) The prompt's tokens, as plain generation would have them.
            clock = Clock()
            self.library.refresh()
            tokens, plan = self._plan(self._rendered(prompt), method, report)
            report.prompt_tokens = len(tokens)
            self._check_fits(len(tokens), config.max_tokens)
            report.match_ms = clock.lap() - report.load_ms
            # 2) Cached KV at its positions, in one buffer.
            plan, selector = self._allowed(plan, config, report)
            buffer = self._workspace.take(len(tokens) + config.max_tokens)
            for place in plan.placements:
                buffer.place(place.kv, place.begin, self.model.rule)
            # 3) The rows that have no KV, and those that the method repairs.
            done = self._compute(tokens, plan, selector, buffer, report)
            report.fuse_ms = clock.lap()
        return Prefill(tokens, done.logits, buffer, report, lambda: self._workspace.give(buffer))

    def _plan(self, rendered: Rendered, method: str, report: Report) -> tuple[Tokens, Plan]:
        if method == "full":
            tokens = self.tokenization.tokenize(rendered)
            return tokens, Plan((), (), len(tokens))
        found = list(self.library.table.find(rendered.text))
        literal = (*rendered.literal, *((match.begin, match.end) for match in found))
        tokens = self.tokenization.tokenize(Rendered(rendered.text, literal, rendered.is_chat))
        clock = Clock()
        plan = make_plan(self.library, tokens, found, self.tokenization.sink_ids)
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
        return plan, selector

    def _compute(
        self, tokens: Tokens, plan: Plan, selector: Selector, buffer: KVBuffer, report: Report
    ) -> Prefilled:
        ids = torch.tensor([tokens.ids], device=self.model.device)
        layout = plan.layout(self.model.shapes.num_layers)
        cached = int((~layout.live).sum())
        report.modules_hit = sum(place.is_module for place in plan.placements)
        if not cached:
            done = prefill_rows(self.model.decoder, buffer, ids)
        else:
            done = prefill_selected(self.model.decoder, buffer, ids, layout, selector)
        report.charged_recompute = done.computed / (len(tokens) * self.model.shapes.num_layers)
        live = len(tokens) - cached
        report.recomputed_tokens = max(0, done.final_rows - live)
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
