"""What one request did and how long it took. Knows numbers only."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Figures of one request; complete once its answer is.

    Attributes:
        method: what was used, after `auto` was resolved.
        prompt_tokens: tokens of the prompt.
        cached_tokens: taken from the store and not recomputed in any layer.
        recomputed_tokens: cached, but computed again from layer 0 to the last.
        charged_recompute: (token, layer) pairs computed over all pairs of the prompt.
        modules_hit, modules_missed: known modules in the prompt, with and without KV.
        missed_tokens: of the modules without KV; encoded in the background for the next request.
        search_ms: embedding the question and finding chunks, before the engine was asked; 0 for an
            engine's own requests.
        match_ms: tokenising, finding modules, planning (without loading).
        load_ms: fetching KV from the store.
        fuse_ms: assembling KV and partial prefill.
        ttft_ms: from the call to the first token; the search of `CachedRAG.ask` is part of it,
            loading models is not.
        total_ms: from the call to the last token.
        output_tokens: tokens of the answer.
        kv_bytes, shared_kv_bytes: of prompts answered together, what this one holds alone and what
            it shares; 0 where nothing is shared.
        decision: the loading controller's, and why; empty where it was not asked.
        notes: what the user should know.
    """

    method: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    charged_recompute: float = 1.0
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
    kv_bytes: int = 0
    shared_kv_bytes: int = 0
    decision: str = ""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, times rounded to a microsecond."""
        values = dataclasses.asdict(self)
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}

    def to_line(self) -> str:
        """As one line for people."""
        share = self.cached_tokens / max(1, self.prompt_tokens)
        return (
            f"{self.method}: {self.cached_tokens} of {self.prompt_tokens} prompt tokens from cache "
            f"({share:.0%}), {self.modules_hit} modules hit, {self.modules_missed} missed; first "
            f"token after {self.ttft_ms:.0f} ms, {self.output_tokens} tokens in "
            f"{self.total_ms:.0f} ms"
        )

    def to_json(self) -> str:
        """As one JSON object."""
        return json.dumps(self.to_dict())
