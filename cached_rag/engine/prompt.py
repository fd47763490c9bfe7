"""A prompt on its way to the logits of its first answer token, and the repair that goes on then.

`prefill.py` fills `Prefilling` in, in the order of the attributes. `Pieces` says where a prompt's
repair may be cut. A row sees no later one, so pieces in the order of slots give what one pass
gives. Only where a method moves a chunk's other tokens as its computed ones are (drift), all of
that chunk's rows are in one piece.

`Following` is repair that goes on while the answer is made. A question attends to what the first
token needs. The tokens behind it are read from other places, which were left stale
(docs/experiments.md). So each of an answer's first tokens chooses, too: it is computed once to see
what it attends to, that is recomputed, and it is computed again. Knows nothing of batches.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch

from cached_rag.backends.base import Backend, RepairInput, StepInput
from cached_rag.backends.prompt_text import Tokens
from cached_rag.config import GenerationConfig
from cached_rag.engine.planner import Planner, Reading
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.resources import Resources
from cached_rag.engine.trace import TraceSource
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.rows import RowKV, Run
from cached_rag.library.plan import Placement, Plan
from cached_rag.library.sequences import Ids, PromptKV, where
from cached_rag.methods import AnchorFlow, InfoFlow, Layout, Selector, Takes, spelled

# So many tokens are followed in the two passes that one alone would take: the last one, and what
# the model says next over the KV as it is. What it says otherwise afterwards is taken instead.
TOGETHER = 4


class Following:
    """What is left to follow of one answer.

    Attributes:
        count: how many of the answer's first tokens are followed.
    """

    def __init__(self, method: AnchorFlow, layout: Layout, rows: torch.Tensor) -> None:
        """Begin behind a prompt's repair.

        Args:
            layout: how the prompt was covered before it.
            rows: (num_rows,) slots of the prompt's tokens that were computed.
        """
        self.count, self._method, self._layers = method.followed(layout), method, layout.num_layers
        self._stale = layout.reused.clone()
        self._each = math.ceil(method.follow_ratio * int(self._stale.sum()))
        self._stale[rows.cpu()] = False

    def is_on(self, answered: int) -> bool:
        """Whether the last of so many of the answer's tokens is followed, or is an ordinary one."""
        return answered <= self.count and bool(self._each and self._stale.any())

    @torch.inference_mode()
    def step(
        self, model: Backend, buffer: KVBuffer, token_ids: Sequence[int], draft: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute the last of `token_ids` and what is drafted behind it, and what they need.

        Args:
            token_ids: the prompt's and the answer's so far.

        Returns:
            (1 + len(draft), vocab_size) logits after each of them, (num_rows,) slots of the
            prompt's tokens that were recomputed, and how many (token, layer) pairs that took.

        Effects: writes their KV, and that of the prompt's recomputed tokens, to `buffer`, which
        holds that of all others.
        """
        ids, prompt, new = torch.tensor([[*token_ids, *draft]]), len(self._stale), 1 + len(draft)
        fresh = torch.arange(ids.shape[1]) >= len(token_ids) - 1
        exact = ~fresh
        exact[:prompt] = ~self._stale
        stale = int(self._stale.sum())
        # A half more, for it is rounded down.
        share = min(1.0, (new * self._each + 0.5) / stale)
        wanted = InfoFlow(share, self._method.depth)
        layout = Layout(fresh, exact, (), self._layers)
        done = model.repair(RepairInput(buffer, ids, layout, wanted, num_logits=new))
        rows = done.rows[done.rows < prompt].cpu()
        self._stale[rows] = False
        return done.tail[0], rows, done.computed - new * self._layers


@torch.inference_mode()
def likeliest(model: Backend, buffer: KVBuffer, token_ids: Sequence[int], most: int) -> list[int]:
    """So many tokens that the model says next, or fewer if an answer ends.

    Args:
        token_ids: all up to now; `buffer` has the KV of all but the last.

    Effects: writes theirs to `buffer`.
    """
    kv, found = RowKV(buffer, len(token_ids) - 1), [token_ids[-1]]
    while len(found) <= most:
        token = int(model.step([StepInput(kv, found[-1:])]).argmax())
        if token in model.eos_ids:
            break
        found.append(token)
    return found[1:]


@dataclass
class Pieces:
    """Rows of a prompt that are still to be computed.

    Attributes:
        slots: theirs, ascending.
        drifting: (begin, end) slots of the chunks that must not be cut, ascending.
    """

    slots: list[int]
    drifting: Sequence[tuple[int, int]] = ()

    @property
    def done(self) -> int:
        """How many of the prompt's tokens, from the first, are final."""
        chunk = self._around(self.slots[0])
        return chunk[0] if chunk else self.slots[0]

    def count(self, most: int, *, at_least: bool = False) -> int:
        """How many rows the next piece has.

        Args:
            most: no more than that, as far as there is a place to cut; 0 if there is none.
            at_least: then up to the first place, instead of 0.
        """
        if most >= len(self.slots):
            return len(self.slots)
        chunk = self._around(self.slots[most])
        if chunk is None:
            return most
        before = bisect_left(self.slots, chunk[0])
        return before or (bisect_left(self.slots, chunk[1]) if at_least else 0)

    def _around(self, slot: int) -> tuple[int, int] | None:
        """The chunk that must not be cut and has a slot; None if there is none."""
        return next((chunk for chunk in self.drifting if chunk[0] <= slot < chunk[1]), None)


# A prompt ends with the header of the answer. Where an answer stands in the next turn's prompt, a
# template may write the last tokens of that header otherwise.
_TEMPLATE_TAIL = 4
# Tokens of an answer that have memory from the first. Most answers are not longer.
PAGE = 256
# The plan of a prompt that was not prepared yet.
UNPLANNED = Plan((), (), 0)
# A chunk's KV by its address, its length and where it was moved to.
Name = tuple[int, int, int]


@dataclass(frozen=True)
class Beginning:
    """KV of a prompt's first tokens that other prompts have computed.

    Attributes:
        runs: where this KV lies, in the order of the tokens.
        exact_length: number of tokens, from the first, whose KV is what full prefill computes.
        is_coming: a running prompt will soon have at least `MIN_SHARED` tokens more of the same.
    """

    runs: tuple[Run, ...] = ()
    exact_length: int = 0
    is_coming: bool = False

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def pieces(self, ids: Sequence[int]) -> list[ModuleKV]:
        """The same KV as views, one for each run, to be placed at a prompt's beginning.

        Args:
            ids: the prompt's tokens.
        """
        return [run.module(ids[run.slot : run.slot + len(run)]) for run in self.runs]


NOTHING = Beginning()


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt as it was asked.

    Attributes:
        resources: what the engine answers with.
        planner: finds its tokens, and what of them has KV.
        config: how to answer.
        clock: started when it was asked.
    """

    resources: Resources
    planner: Planner
    config: GenerationConfig
    clock: Clock = field(default_factory=Clock)


@dataclass(eq=False)
class HeldKV:
    """A prompt's KV, with what others need to know to share it. `Sharing` sees to most of it.

    Attributes:
        beginning: the KV of the prompt's first tokens that was taken from other prompts.
        exact_length: number of tokens, from the first, whose KV is, or will be, what full prefill
            computes.
        kv: that of the prompt and of its answer; None before its tokens are computed, and after
            it is released. While the prompt is prefilled, its `length` is the number of tokens,
            from the first, whose KV is final.
        chunks: those that are not repaired, by the name that `Sharing` gives them. A name contains
            the address of the KV, which is held here, so that no other KV comes to have it.
        taken: KV of other prompts that `Sharing.adopt` will share; until then it must not be freed.
        is_private: no other prompt may use its KV, as it has a text that was forgotten, or for what
            `Prefilling.keep_apart` knows of it.
        answer: the tokens of its answer so far, of which a prompt that was set back has some.
    """

    beginning: Beginning = NOTHING
    exact_length: int = 0
    kv: RowKV | None = None
    chunks: dict[Name, Placement] = field(default_factory=dict)
    taken: tuple[Run, ...] = ()
    is_private: bool = False
    answer: Sequence[int] = ()


@dataclass(eq=False)
class Prefilling:
    """How far a prompt has come, and what was found and computed for it.

    Attributes:
        report: complete when its answer is.
        reading: the result of reading the prompt; None before that.
        plan: which tokens come from which KV; `UNPLANNED` before `prefill.prepare`.
        tokens: the prompt's.
        method: the one that was asked for, or what replaces it on this model.
        repair: mark of KV that the method repaired; empty if all KV is what full prefill computes.
        buffer: all of the prompt's KV, with room for the answer; None if the KV lies elsewhere.
        held: its KV, wherever it lies.
        logits: (1, vocab_size) after the last prompt token.
        first_logits: (vocab_size,) of the answer's first token, to be audited; None if not.
        trace_source: for each token, whether it was computed, and where its KV came from; None
            before they are prefilled.
        left: rows that are chosen, and left to the scheduler's batch; None if all are computed.
        following: the repair that goes on with the answer; None if it does not.
    """

    asked: AskedPrompt
    report: Report = field(init=False)
    reading: Reading | None = None
    plan: Plan = UNPLANNED
    tokens: Tokens = field(init=False)
    method: Selector = field(init=False)
    repair: str = ""
    buffer: KVBuffer | None = None
    held: HeldKV = field(default_factory=HeldKV)
    logits: torch.Tensor = field(init=False)
    first_logits: torch.Tensor | None = None
    trace_source: TraceSource | None = None
    left: Pieces | None = None
    following: Following | None = None

    def __post_init__(self) -> None:
        self.report = Report(spelled(self.config.selector()))

    @property
    def resources(self) -> Resources:
        """What the engine answers with."""
        return self.asked.resources

    @property
    def config(self) -> GenerationConfig:
        """How to answer."""
        return self.asked.config

    @property
    def kv(self) -> RowKV:
        """The prompt's and the answer's, while it is held."""
        assert self.held.kv is not None
        return self.held.kv

    @cached_property
    def ids(self) -> Ids:
        """(seq_len,) int64, the prompt's tokens."""
        return np.asarray(self.tokens.ids, dtype=np.int64)

    @property
    def namespace(self) -> str:
        """The tenant whose KV this prompt may use."""
        return self.resources.library.namespace

    @property
    def is_beyond_switch(self) -> bool:
        """Whether prompt or answer reach beyond the model's rotary switch (`RelocationRule.limit`).

        Keys from either side of it do not mix, so such KV is neither taken nor left to others.
        """
        limit = self.resources.model.rule.limit
        return limit is not None and len(self.tokens) + len(self.held.answer) > limit

    def keep_apart(self) -> None:
        """Let no other prompt use its KV, if it is known by now that none may."""
        self.held.is_private |= self.plan.has_strays or self.is_beyond_switch

    def forget(self, namespace: str, text_digest: str, token_ids: Sequence[int]) -> None:
        """If the prompt contains a text, or a part of it, let no other prompt use its KV."""
        if self.plan is not UNPLANNED and namespace == self.namespace:
            wanted = np.asarray(token_ids, dtype=np.int64)
            named = any(match.chunk.text_digest == text_digest for match in self.plan.matches)
            self.held.is_private |= named or bool(where(self.ids, wanted))

    def kept_beginning(self) -> Beginning:
        """The KV that finished prompts left of this prompt's beginning."""
        if self.plan.positions is not None or self.is_beyond_switch:
            return NOTHING
        kept, wanted = self.resources.shared.sequences, self.ids[:-1]  # the last token is computed
        if not kept.keeps_repaired:  # then no answer depends on prompts before it
            wanted = wanted[: self.held.exact_length]
        sequence, length = kept.beginning(self.namespace, wanted, self.repair)
        if sequence is not None and sequence.exact_length < length <= self.plan.exact_end:
            # The plan has as much, and all of it exact.
            sequence, length = kept.beginning(self.namespace, wanted)
        if sequence is None:
            return NOTHING
        return Beginning(sequence.cut(length), min(length, sequence.exact_length))

    def begin_with(self, beginning: Beginning) -> Plan:
        """Set the KV of the prompt's first tokens that is taken from other prompts.

        Returns:
            The plan with this beginning.
        """
        self.held.beginning = beginning
        self.report.kept_tokens = len(beginning)
        self.report.kept_repaired_tokens = len(beginning) - beginning.exact_length
        plan = self.plan.starting_from(beginning.pieces(self.tokens.ids))
        shelf = self.resources.library.shelf
        tiers = [tier for tier in (shelf.disk, shelf.remote) if tier is not None]
        is_lossy = any(tier.codec.name != "raw" for tier in tiers)
        # Without a mark of repair, approximate KV is computed anew, all of it.
        inexact = [
            place.begin
            for place in plan.placements
            if place.begin >= len(beginning) and (is_lossy if place.is_exact else self.repair)
        ]
        if beginning.exact_length < len(beginning):
            inexact.append(beginning.exact_length)
        self.held.exact_length = min(inexact, default=plan.num_tokens)
        return plan

    @property
    def room(self) -> int:
        """How many tokens of the answer there is memory for at first; `Scheduler` adds pages."""
        most = self.config.max_tokens
        if not self.resources.model.can_batch:  # such a model needs all KV in one buffer
            return most
        return min(most, len(self.held.answer) + PAGE)

    @property
    def is_following(self) -> bool:
        """Whether the answer's last token is computed alone, by `follow`."""
        return self.following is not None and self.following.is_on(len(self.held.answer))

    def follow(
        self, token_ids: Sequence[int], draft: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]] | None:
        """If repair goes on with an answer's last token: compute it, and what it needs.

        The caller holds the model's lock.

        Args:
            token_ids: the answer's so far.
            draft: tokens behind them that are followed, too, as far as `TOGETHER` allows; None for
                those that the model says.

        Returns:
            (1 + number of drafted tokens, vocab_size) logits after it and each drafted one, and
            the drafted ones; None if the token is an ordinary one.
        """
        if self.following is None or not self.following.is_on(len(token_ids)):
            return None
        assert self.buffer is not None
        assert self.trace_source is not None
        model, ids = self.resources.model, [*self.tokens.ids, *token_ids]
        most = min(self.following.count, self.config.max_tokens - 1) - len(token_ids)
        most = min(most, TOGETHER - 1, self.buffer.capacity - len(ids))
        if draft is None:
            draft = likeliest(model, self.buffer, ids, most)
        draft = list(draft[: max(0, most)])
        logits, rows, pairs = self.following.step(model, self.buffer, ids, draft)
        self.report.charged_recompute += pairs / (len(self.tokens) * model.shapes.num_layers)
        self.report.recomputed_tokens += len(rows)
        self.report.cached_tokens -= len(rows)
        self.trace_source = self.trace_source.repaired(rows)
        return logits, draft

    @property
    def num_final(self) -> int:
        """How many of the prompt's tokens, from the first, have final KV in `buffer`."""
        return self.left.done if self.left and self.left.slots else len(self.ids)

    def give_buffer(self, *, is_free: bool = True) -> None:
        """Let the next prompt use this one's memory, if no other request reads it."""
        if self.buffer is not None and is_free:
            self.resources.shared.workspace.give(self.buffer)
        self.buffer = None

    def release(self, *, is_free: bool = True) -> None:
        """End the prompt: its KV is kept for others, as far as it may be, and memory released.

        Doing it again changes nothing.

        Args:
            is_free: no other request reads the buffer.
        """
        try:
            if self.held.kv is not None:
                self._leave(self.held.kv)
        finally:
            self.give_buffer(is_free=is_free)
            self.held.kv = self.first_logits = None
            self.resources.shared.activity.end(self)

    def _leave(self, kv: RowKV) -> None:
        """Keep KV for prompts that begin alike, and offer missed chunks to the background."""
        plan, learning, shared = self.plan, self.resources.learning, self.resources.shared
        self.keep_apart()
        if (states := kv.own.states) is not None:
            kv.own.snapshots[states.length] = states
        if not self.held.is_private:
            learning.keep(shared.sequences, self._prompt_kv(plan, kv), kv, plan)
        is_reused = self.method.takes is not Takes.NOTHING
        if is_reused:
            learning.see_to(self.tokens, plan)
        if is_reused and not self.held.is_private and plan.positions is None:
            # A chat goes on from its own.
            settled = max(self.held.exact_length, len(self.held.beginning))
            shared.settling.see(learning, self.ids, plan, settled)
        if (logits := self.first_logits) is not None and learning.write_back is not None:
            model, ids = self.resources.model, torch.from_numpy(self.ids[None])
            audit = partial(shared.audits.compare, spelled(self.method), model, ids, logits)
            learning.write_back.offer(("audit", id(logits)), audit, lasts=False)

    def _prompt_kv(self, plan: Plan, kv: RowKV) -> PromptKV:
        """A description of this KV, to be kept. The answer is as exact as the prompt before it."""
        answer = np.asarray(self.held.answer, dtype=np.int64)
        ids = np.concatenate([self.ids, answer])[: kv.length]
        exact = len(ids) if self.held.exact_length == len(self.ids) else self.held.exact_length
        least = self.header_begin
        # What was made of harvested KV depends on texts that are not in this prompt, and it could
        # not be found when one of them is forgotten. So of that only the exact part is kept.
        repair = "" if plan.harvested_from(len(self.held.beginning)) else self.repair
        return PromptKV(self.namespace, ids, (), exact, repair, plan.chunks, least)

    def branch_off(self, common: int) -> int:
        """Where a snapshot serves prompts that have so many tokens in common with this one.

        That is before the chunk in which they part: others that have the same chunks before it part
        from it elsewhere.
        """
        ends = [end for _, end in self.plan.chunks]
        before = [end for end in ends if end <= common]
        return before[-1] if before and len(before) < len(ends) else common

    @property
    def header_begin(self) -> int:
        """Where the header of the answer begins: at a control token among the last ones.

        It has at least the last one, which every prompt computes, also if all was asked before.
        """
        controls = set(self.resources.tokenization.controls.values())
        last = range(max(0, len(self.ids) - _TEMPLATE_TAIL), len(self.ids))
        return next((at for at in last if int(self.ids[at]) in controls), last.stop - 1)
