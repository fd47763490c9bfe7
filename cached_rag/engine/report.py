"""The report of a request: what it reused and computed, and how long that took; and its clock."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Figures of one request, complete when its answer is. Times are in milliseconds.

    Attributes:
        method: the method that was used: as it was asked for, or what took its place.
        prompt_tokens: number of the prompt's tokens.
        cached_tokens: how many of them were taken from cached KV and not recomputed.
        recomputed_tokens: how many had cached KV and were computed again in every layer.
        charged_recompute: (token, layer) pairs that were computed, as a share of all pairs of the
            prompt; 1 for full prefill.
        kept_tokens: how many of the cached tokens, from the first, are from other prompts: those
            that ended, such as the last turn of a conversation, or one that runs.
        kept_repaired_tokens: how many of these a method repaired for those prompts.
        modules_hit, modules_missed: number of known chunks in the prompt whose KV was used, and
            of those that had no KV.
        missed_tokens: number of tokens in the missed chunks, which are now encoded in the
            background; 0 if that is switched off.
        search_ms: embedding the question and finding chunks, before the engine was asked; 0 if
            the engine was asked directly.
        match_ms: tokenising, finding known chunks, and planning, without loading.
        load_ms: fetching KV from the store.
        fuse_ms: placing KV in the prompt's buffer, and computing what has none; where that
            is done in pieces beside others, only what was done before the first piece.
        ttft_ms: from the call to the first token. The search of `CachedRAG.ask` is included,
            loading a model is not.
        total_ms: from the call to the last token.
        output_tokens: number of the answer's tokens.
        drafted_tokens, accepted_tokens: how many tokens were drafted for the answer, and how many
            of them were right and are in it; both 0 where the model takes one token a step.
        kv_bytes, shared_kv_bytes: bytes of KV that this prompt holds alone, and that it shares
            with prompts answered at the same time; both 0 if nothing is shared.
        notes: sentences for the user, such as why another method was used.
    """

    method: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    charged_recompute: float = 1.0
    kept_tokens: int = 0
    kept_repaired_tokens: int = 0
    modules_hit: int = 0
    modules_missed: int = 0
    missed_tokens: int = 0
    search_ms: float = 0.0
    match_ms: float = 0.0
    load_ms: float = 0.0
    fuse_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kv_bytes: int = 0
    shared_kv_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, *sentences: str) -> None:
        """Tell the user these, unless they are told already."""
        self.notes += [one for one in sentences if one not in self.notes]

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON, numbers rounded to six digits after the point."""
        values = dataclasses.asdict(self)
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}

    def to_line(self) -> str:
        """As one line for people."""
        share = self.cached_tokens / max(1, self.prompt_tokens)
        return (
            f"{self.method}: {self.cached_tokens} of {self.prompt_tokens} prompt tokens from cache "
            f"({share:.0%}), {self.modules_hit} chunks hit, {self.modules_missed} missed; first "
            f"token after {self.ttft_ms:.0f} ms, {self.output_tokens} tokens in "
            f"{self.total_ms:.0f} ms"
        )


class Clock:
    """A stopwatch, started when it is made. Times are in milliseconds."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()

    def lap(self) -> float:
        """Time since the last lap, or since the start; a new lap begins."""
        now = time.perf_counter()
        passed, self._lap = now - self._lap, now
        return passed * 1000

    def total(self) -> float:
        """Time since the start."""
        return (time.perf_counter() - self._start) * 1000
