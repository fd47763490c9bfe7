"""A request: a prompt in the scheduler's hands, its answer, and who gets it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from cached_rag.backends.base import StepInput
from cached_rag.engine.decoding import Decoding
from cached_rag.engine.drafts import DEAREST, MOST, Drafts
from cached_rag.engine.prompt import NOTHING, PAGE, Prefilling

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

    Attributes:
        tenant: requests of different tenants take turns.
        deliver: is called with every piece of the answer as soon as it is certain, on any thread.
        is_wanted: whether anybody still waits for the answer.
        is_adopted: others were offered its KV.
        pending: tokens whose KV is still to be computed: the rest of the prompt (`prompt.left` says
            where these stand, if they do not follow those that have KV), or the answer's last
            token.
        decoding: the answer so far.
        drafts: proposes its next tokens; None if that is not wanted, or not possible.
        draft: the tokens that the next pass checks.
    """

    prompt: Prefilling
    tenant: str = ""
    deliver: Callable[[Item], None] = lambda _: None
    status: Status = Status.WAITING
    is_wanted: bool = True
    is_adopted: bool = False
    pending: list[int] = field(default_factory=list)
    decoding: Decoding = field(init=False)
    drafts: Drafts | None = None
    draft: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decoding = Decoding(self.prompt.resources.model, self.prompt.config)
        self.prompt.held.answer = self.decoding.token_ids

    @property
    def finish_reason(self) -> str | None:
        """As in `Generation`, or "error"; None until the request is over."""
        reasons = {Status.CANCELLED: "cancelled", Status.FAILED: "error"}
        return reasons.get(self.status, self.decoding.finish_reason)

    def _is_audited(self) -> bool:
        """Whether the first logits may differ from full prefill's, and it is time to compare."""
        prompt = self.prompt
        may_differ = prompt.held.exact_length < len(prompt.tokens) and prompt.plan.positions is None
        return may_differ and prompt.resources.shared.audits.is_due()

    def begin_answer(self) -> None:
        """Set the prompt that is answered, before the first token is taken."""
        plan, config = self.prompt.plan, self.prompt.config
        if self.decoding.token_ids:  # it was set back, and goes on
            return
        self.decoding.begin(self.prompt.tokens.ids)
        model = self.prompt.resources.model
        if config.drafts and model.can_append and model.token_price <= DEAREST:
            chunks = [(place.begin, place.end) for place in plan.placements if place.is_chunk]
            chunks += [(match.begin, match.end) for match in plan.matches]
            price = model.token_price
            self.drafts = Drafts(self.prompt.tokens.ids, chunks, config.max_tokens, price)

    def make_draft(self, rows: int) -> None:
        """Draft the next tokens: those that the answer's grammar forces, or `Drafts.propose`."""
        if self.drafts is not None and not self.prompt.is_following:
            forced = self.decoding.forced(MOST)
            self.draft = self.drafts.propose(self.decoding.token_ids, rows, forced)

    @property
    def missing_room(self) -> int:
        """How many slots to add before the next step; 0 if all of its tokens have one.

        A page is as large as the answer so far, so that long answers are in few pages.
        """
        kv, answered = self.prompt.kv, len(self.decoding.token_ids)
        if kv.at(kv.length + len(self.pending) + len(self.draft)) <= kv.own.capacity:
            return 0
        most = len(self.prompt.ids) + self.prompt.config.max_tokens
        return min(max(PAGE, answered), most - kv.length)

    def next_piece(self, most: int, *, at_least: bool) -> int:
        """How many pending tokens of the prompt the next pass computes; see `Pieces.count`."""
        if self.prompt.left is None:
            # The answer of a request that was set back; such a model takes one token a step.
            each = most if self.prompt.resources.model.can_append else min(1, most)
            return min(each, len(self.pending))
        return self.prompt.left.count(most, at_least=at_least)

    def step_input(self, count: int) -> StepInput:
        """The next `count` pending tokens, and the draft behind them, with the KV they see.

        Logits are wanted if no tokens are pending then.
        """
        kv, left, drafted = self.prompt.kv, self.prompt.left, len(self.draft)
        num_logits = 1 + drafted if count == len(self.pending) else 0
        if left is not None:
            slots = left.slots[:count]
            return StepInput(kv, self.pending[:count], num_logits, slots, left.drifting)
        return StepInput(kv, [*self.pending[:count], *self.draft], num_logits)

    def computed(self, count: int) -> None:
        """Note that the step for `step_input` was made; drafted tokens are not accepted yet."""
        del self.pending[:count]
        kv, left = self.prompt.kv, self.prompt.left
        kv.length -= len(self.draft)
        if left is not None:
            del left.slots[:count]
            kv.length = self.prompt.num_final
        if not self.pending:
            self.prompt.left = None

    def take(self, logits: torch.Tensor, followed: Sequence[int] | None = None) -> str:
        """Take the answer's next tokens, those of the draft among them; see `Decoding`.

        Args:
            logits: (1 + number of drafted tokens, vocab_size).
            followed: what was drafted by `Prefilling.follow`; None for `draft`.
        """
        draft = self.draft if followed is None else followed
        if not self.decoding.token_ids and self._is_audited():
            self.prompt.first_logits = logits[0].clone()
        text, accepted = self.decoding.take_drafted(logits, draft)
        self.prompt.kv.length += accepted
        if followed is None:
            self.prompt.report.drafted_tokens += len(draft)
            self.prompt.report.accepted_tokens += accepted
            if self.drafts is not None:
                self.drafts.learn(len(draft), accepted)
        self.pending = self.decoding.token_ids[-1:]
        return text

    def note_sharing(self) -> None:
        """Report how much KV is shared, and give the prompt's buffer back if it was replaced."""
        prompt, own = self.prompt, self.prompt.kv.own
        if shared := sum(len(run) for run in prompt.kv.runs if run.buffer is not own):
            prompt.report.kv_bytes = own.nbytes
            prompt.report.shared_kv_bytes = shared * prompt.resources.model.shapes.bytes_per_token
        if own is not prompt.buffer:
            prompt.give_buffer()

    def set_back(self, *, is_free: bool) -> None:
        """Give up all memory; the answer so far is kept, and its KV is to be computed anew.

        Args:
            is_free: no other request reads the buffer.
        """
        self.status, self.pending, self.draft = Status.WAITING, [], []
        self.prompt.give_buffer(is_free=is_free)
        self.prompt.held.kv = self.prompt.left = self.prompt.following = None
        self.prompt.begin_with(NOTHING)
        self.is_adopted = False

    def finish(self, status: Status, last: BaseException | None) -> None:
        """Set the final status, and deliver None or the error."""
        self.status = status
        self.deliver(last)
