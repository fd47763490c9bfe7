"""A request: what is asked, how far it has come, and who gets its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np
import torch

from cached_rag.backends.base import StepInput
from cached_rag.backends.prompt_text import Tokens
from cached_rag.backends.thread import on_model_thread
from cached_rag.config import GenerationConfig
from cached_rag.engine.audit import compare
from cached_rag.engine.decoding import Decoding
from cached_rag.engine.drafts import DEAREST, MOST, Drafts
from cached_rag.engine.following import Following
from cached_rag.engine.pieces import Pieces
from cached_rag.engine.planner import Planner, Reading
from cached_rag.engine.profile import profile_key
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.resources import Resources
from cached_rag.engine.sharing import NOTHING, Beginning, RunningSequence
from cached_rag.engine.trace import Coverage, TraceSource
from cached_rag.kv.buffer import KVBuffer
from cached_rag.kv.rows import RowKV
from cached_rag.library.matching import inner_ids
from cached_rag.library.plan import Plan
from cached_rag.library.sequences import Ids, PromptKV, where
from cached_rag.methods import Selector, Takes, spelled

# A prompt ends with the header of the answer. Where an answer stands in the next turn's prompt, a
# template may write the last tokens of that header otherwise.
_TEMPLATE_TAIL = 4
# Tokens of an answer that have memory from the first. Most answers are not longer.
PAGE = 256
# What a request delivers: a piece of text; at the end None, or the error that ended it.
Item = str | BaseException | None


class Status(Enum):
    """How far a request has come. The last three are final."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    ANSWERING = "answering"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self in (Status.FINISHED, Status.CANCELLED, Status.FAILED)


@dataclass(eq=False)
class Request:
    """A prompt that is to be answered.

    The attributes below `report` are filled in while the request goes on, in this order.

    Attributes:
        planner: the prompt.
        tenant: requests of different tenants take turns.
        deliver: is called with every piece of the answer as soon as it is certain, on any thread.
        clock: started when the request was made.
        is_wanted: whether anybody still waits for the answer.
        report: complete when the request is over.
        reading: the result of reading the prompt; None before that.
        read_ms: milliseconds that reading took.
        plan: which tokens come from which KV; None before `prefill.prepare`.
        tokens, ids: the prompt's; `ids` is the (seq_len,) int64 array of them.
        method: the one that was asked for, or what replaces it on this model.
        repair: mark of KV that the method repaired; empty if all KV is what full prefill computes.
        exact_length: number of tokens, from the first, whose KV is, or will be, what full prefill
            computes.
        beginning: the KV of the prompt's first tokens that was taken from other prompts.
        buffer: all of the prompt's KV, with room for the answer; None if the KV lies elsewhere.
        logits: (1, vocab_size) after the last prompt token.
        rows: (num_rows,) int64 slots of the tokens that were computed in every layer; the KV of
            all others is cached.
        coverage: the same for each token, and where its KV came from.
        sequence: the prompt as others may share it, while it runs in the scheduler's batch.
        is_adopted: others were offered its KV.
        is_private: as in `RunningSequence`, of one that was set back.
        pending: tokens whose KV is still to be computed: the rest of the prompt, or the answer's
            last token.
        repair_left: where these tokens stand, in a prompt that is repaired in pieces; None if they
            follow those that have KV.
        decoding: the answer so far.
        drafts: proposes its next tokens; None if that is not wanted, or not possible.
        draft: the tokens that the next pass checks.
        following: the repair that goes on with the answer; None if it does not.
        is_audited: its first logits are to be compared with full prefill's.
        first_logits: (vocab_size,) of the answer's first token; None if they are not wanted.
    """

    resources: Resources
    planner: Planner
    config: GenerationConfig
    tenant: str = ""
    deliver: Callable[[Item], None] = lambda _: None
    clock: Clock = field(default_factory=Clock)
    status: Status = Status.WAITING
    is_wanted: bool = True
    report: Report = field(init=False)
    reading: Reading | None = None
    read_ms: float = 0.0
    plan: Plan | None = None
    tokens: Tokens = field(init=False)
    ids: Ids = field(init=False)
    method: Selector = field(init=False)
    repair: str = ""
    exact_length: int = 0
    beginning: Beginning = NOTHING
    buffer: KVBuffer | None = None
    logits: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)
    coverage: Coverage | None = None
    sequence: RunningSequence | None = None
    is_adopted: bool = False
    is_private: bool = False
    pending: list[int] = field(default_factory=list)
    repair_left: Pieces | None = None
    decoding: Decoding = field(init=False)
    drafts: Drafts | None = None
    draft: list[int] = field(default_factory=list)
    following: Following | None = None
    is_audited: bool = False
    first_logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.report = Report(self.config.method_name)
        self.decoding = Decoding(self.resources.model, self.config)

    @property
    def namespace(self) -> str:
        """The tenant whose KV this request may use."""
        return self.resources.library.namespace

    @property
    def finish_reason(self) -> str | None:
        """As in `Generation`, or "error"; None until the request is over."""
        reasons = {Status.CANCELLED: "cancelled", Status.FAILED: "error"}
        return reasons.get(self.status, self.decoding.finish_reason)

    @property
    def trace_source(self) -> TraceSource | None:
        """What says what became of each of the prompt's tokens; None before they are prefilled."""
        if self.coverage is None:
            return None
        text, key = self.planner.text, profile_key(self.resources.model)
        tokenization = self.resources.tokenization
        return TraceSource(self.coverage, self.tokens, text, tokenization, key)

    @property
    def is_beyond_switch(self) -> bool:
        """Whether prompt or answer reach beyond the model's rotary switch (`RelocationRule.limit`).

        Keys from either side of it do not mix, so such KV is neither taken nor left to others.
        """
        limit = self.resources.model.rule.limit
        answered = len(self.decoding.token_ids)
        return limit is not None and len(self.tokens) + answered > limit

    def kept_beginning(self) -> Beginning:
        """The KV that finished prompts left of this prompt's beginning."""
        assert self.plan is not None
        if self.plan.positions is not None or self.is_beyond_switch:
            return NOTHING
        kept, wanted = self.resources.sequences, self.ids[:-1]  # the last token is computed
        if not kept.keeps_repaired:  # then no answer depends on prompts before it
            wanted = wanted[: self.exact_length]
        sequence, length = kept.beginning(self.namespace, wanted, self.repair)
        if sequence is not None and sequence.exact_length < length <= self.plan.exact_end:
            # The plan has as much, and all of it exact.
            sequence, length = kept.beginning(self.namespace, wanted)
        if sequence is None:
            return NOTHING
        return Beginning(sequence.cut(length), min(length, sequence.exact_length))

    def begin_with(self, beginning: Beginning) -> None:
        """Set the KV of the prompt's first tokens that is taken from other prompts."""
        self.beginning = beginning
        self.report.kept_tokens = len(beginning)
        self.report.kept_repaired_tokens = beginning.num_repaired

    def as_sequence(self) -> RunningSequence:
        """The prompt as others may share it; `Sharing` adds its KV."""
        matches = self.plan.matches if self.plan else ()
        private = self.is_private or self.is_beyond_switch
        parts = frozenset(match.chunk.text_digest for match in matches)
        return RunningSequence(
            self.namespace, self.ids, self.exact_length, parts, is_private=private
        )

    def begin_answer(self) -> None:
        """Set the prompt that is answered, before the first token is taken."""
        plan, config = self.plan, self.config
        assert plan is not None
        if self.decoding.token_ids:  # it was set back, and goes on
            return
        self.decoding.begin(self.tokens.ids)
        model = self.resources.model
        if config.drafts and model.can_append and model.token_price <= DEAREST:
            chunks = [(place.begin, place.end) for place in plan.placements if place.is_chunk]
            chunks += [(match.begin, match.end) for match in plan.matches]
            price = model.token_price
            self.drafts = Drafts(self.tokens.ids, chunks, config.max_tokens, price)

    def make_draft(self, rows: int) -> None:
        """Draft the next tokens: those that the answer's grammar forces, or `Drafts.propose`."""
        if self.drafts is not None and not self.is_following:
            forced = self.decoding.forced(MOST)
            self.draft = self.drafts.propose(self.decoding.token_ids, rows, forced)

    @property
    def is_following(self) -> bool:
        """Whether the answer's last token is computed alone, by `follow`."""
        return self.following is not None and not self.following.is_over

    def follow(self, token_ids: Sequence[int]) -> torch.Tensor | None:
        """See `decoding.Prefilled`. The caller holds the model's lock."""
        if self.following is None or self.following.is_over:
            return None
        assert self.buffer is not None
        assert self.coverage is not None
        model, before = self.resources.model, self.following.computed
        logits, rows = self.following.step(model, self.buffer, [*self.tokens.ids, *token_ids])
        pairs = self.following.computed - before
        self.report.charged_recompute += pairs / (len(self.tokens) * model.shapes.num_layers)
        self.report.recomputed_tokens += len(rows)
        self.report.cached_tokens -= len(rows)
        self.coverage.repair(rows)
        return logits

    @property
    def room(self) -> int:
        """How many tokens of the answer there is memory for at first; `Scheduler` adds pages."""
        most = self.config.max_tokens
        if not self.resources.model.can_batch:  # such a model needs all KV in one buffer
            return most
        return min(most, len(self.decoding.token_ids) + PAGE)

    @property
    def missing_room(self) -> int:
        """How many slots to add before the next step; 0 if all of its tokens have one.

        A page is as large as the answer so far, so that long answers are in few pages.
        """
        assert self.sequence is not None
        kv, answered = self.sequence.kv, len(self.decoding.token_ids)
        if kv.at(kv.length + len(self.pending) + len(self.draft)) <= kv.own.capacity:
            return 0
        return min(max(PAGE, answered), len(self.ids) + self.config.max_tokens - kv.length)

    @property
    def num_final(self) -> int:
        """How many of the prompt's tokens, from the first, have final KV in `buffer`."""
        done = self.repair_left.done if self.repair_left else None
        return len(self.ids) if done is None else done

    def next_piece(self, most: int, *, at_least: bool) -> int:
        """How many pending tokens of the prompt the next pass computes; see `Pieces.count`."""
        if self.repair_left is None:
            # The answer of a request that was set back; such a model takes one token a step.
            each = most if self.resources.model.can_append else min(1, most)
            return min(each, len(self.pending))
        return self.repair_left.count(most, at_least=at_least)

    def step_input(self, count: int) -> StepInput:
        """The next `count` pending tokens, and the draft behind them, with the KV they see.

        Logits are wanted if no tokens are pending then.
        """
        assert self.sequence is not None
        kv, left, drafted = self.sequence.kv, self.repair_left, len(self.draft)
        num_logits = 1 + drafted if count == len(self.pending) else 0
        if left is not None:
            slots = left.slots[:count]
            return StepInput(kv, self.pending[:count], num_logits, slots, left.drifting)
        return StepInput(kv, [*self.pending[:count], *self.draft], num_logits)

    def computed(self, count: int) -> None:
        """Note that the step for `step_input` was made; drafted tokens are not accepted yet."""
        assert self.sequence is not None
        del self.pending[:count]
        kv, left = self.sequence.kv, self.repair_left
        kv.length -= len(self.draft)
        if left is not None:
            del left.slots[:count]
            kv.length = self.num_final
        if not self.pending:
            self.repair_left = None

    def take(self, logits: torch.Tensor) -> str:
        """Take the answer's next tokens, those of the draft among them; see `Decoding`.

        Args:
            logits: (1 + len(draft), vocab_size).
        """
        assert self.sequence is not None
        kv, drafted = self.sequence.kv, len(self.draft)
        if self.is_audited and not self.decoding.token_ids:
            self.first_logits = logits[0].clone()
        text, accepted = self.decoding.take_drafted(logits, self.draft)
        kv.length += accepted
        self.report.drafted_tokens += drafted
        self.report.accepted_tokens += accepted
        if self.drafts is not None:
            self.drafts.learn(drafted, accepted)
        self.pending = self.decoding.token_ids[-1:]
        return text

    def note_sharing(self) -> None:
        """Report how much KV is shared, and give the prompt's buffer back if it was replaced."""
        assert self.sequence is not None
        own = self.sequence.kv.own
        if shared := self.sequence.num_shared:
            self.report.kv_bytes = own.nbytes
            self.report.shared_kv_bytes = shared * self.resources.model.shapes.bytes_per_token
        if self.buffer is not None and own is not self.buffer:
            self.resources.workspace.give(self.buffer)
            self.buffer = None

    def set_back(self, *, is_free: bool) -> None:
        """Give up all memory; the answer so far is kept, and its KV is to be computed anew.

        Args:
            is_free: no other request reads the buffer.
        """
        self.status, self.pending, self.draft = Status.WAITING, [], []
        self.is_private = self.sequence is not None and self.sequence.is_private
        if self.buffer is not None and is_free:
            self.resources.workspace.give(self.buffer)
        self.buffer = self.sequence = self.repair_left = self.following = None
        self.beginning, self.is_adopted = NOTHING, False

    def forget(self, namespace: str, text_digest: str, token_ids: Sequence[int]) -> None:
        """If the prompt contains a text, or a part of it, let no other prompt use its KV."""
        if self.plan is not None and namespace == self.namespace:
            wanted = np.asarray(token_ids, dtype=np.int64)
            named = any(match.chunk.text_digest == text_digest for match in self.plan.matches)
            self.is_private = self.is_private or named or bool(where(self.ids, wanted))

    def release(self, *, is_free: bool = True) -> None:
        """Keep a copy of the KV that may serve later prompts, and release the rest.

        Doing it again changes nothing.

        Args:
            is_free: no other request reads the buffer.
        """
        try:
            self._leave_behind()
        finally:
            if self.buffer is not None and is_free:
                self.resources.workspace.give(self.buffer)
            self.buffer = self.sequence = None
            self.resources.activity.end(self)

    def _leave_behind(self) -> None:
        """Keep KV for prompts that begin alike, and offer missed chunks to the background."""
        plan, learning, sequences = self.plan, self.resources.learning, self.resources.sequences
        if self.sequence is not None:
            kv, is_private = self.sequence.kv, self.sequence.is_private
        elif self.buffer is not None:
            # `Sharing.forget` does not reach a prompt that is in no batch. So its KV is kept only
            # if the plan says which chunks are in it: they are checked below.
            kv, is_private = RowKV(self.buffer, len(self.tokens)), not (plan and plan.matches)
        else:
            return
        assert plan is not None
        is_private = is_private or self.is_beyond_switch
        if not is_private:
            sequences.add(self._prompt_kv(plan, kv), kv)
            for chunk in learning.forgotten(plan):
                sequences.forget(self.namespace, chunk.text_digest, inner_ids(chunk))
        is_reused = self.method.takes is not Takes.NOTHING
        if is_reused:
            learning.see_to(self.tokens, plan)
        if is_reused and not is_private and plan.positions is None:
            settled = max(self.exact_length, len(self.beginning))  # a chat goes on from its own
            self.resources.settling.see(learning, self.namespace, self.ids, plan, settled)
        if self.first_logits is not None and learning.write_back is not None:
            ids, logits, self.first_logits = self.ids[None], self.first_logits, None
            audit = partial(_audit, self.resources, spelled(self.method), ids, logits)
            learning.write_back.offer(("audit", id(logits)), audit, lasts=False)

    def _prompt_kv(self, plan: Plan, kv: RowKV) -> PromptKV:
        """A description of this KV, to be kept. The answer is as exact as the prompt before it."""
        answer = np.asarray(self.decoding.token_ids, dtype=np.int64)
        ids = np.concatenate([self.ids, answer])[: kv.length]
        exact = len(ids) if self.exact_length == len(self.ids) else self.exact_length
        least = len(self.ids) - self._header_length()
        # What was made of harvested KV depends on texts that are not in this prompt, and it could
        # not be found when one of them is forgotten. So of that only the exact part is kept.
        repair = "" if plan.harvested else self.repair
        return PromptKV(self.namespace, ids, (), exact, repair, plan.chunks, least)

    def _header_length(self) -> int:
        """How many of the last tokens are the header of the answer: those from a control token on.

        At least the last one, which every prompt computes, also if all was asked before.
        """
        controls = set(self.resources.tokenization.controls.values())
        tail = self.ids[-_TEMPLATE_TAIL:].tolist()
        begins = [at for at, token in enumerate(tail) if token in controls]
        return len(tail) - begins[0] if begins else min(1, len(tail))

    def finish(self, status: Status, last: BaseException | None) -> None:
        """Set the final status, and deliver None or the error."""
        self.status = status
        self.deliver(last)


def _audit(resources: Resources, method: str, ids: Ids, logits: torch.Tensor) -> None:
    """Compare a prompt's first logits with full prefill's, and note what came of it."""
    model, prompt = resources.model, torch.from_numpy(ids)
    kl, agrees = on_model_thread(lambda: compare(model, prompt, logits))
    resources.audits.note(method, kl, agrees=agrees)
