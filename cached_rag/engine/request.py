"""One question: what is asked, how far it has come, and where its answer appears.

Also the queue of those that wait: fair between tenants, in order within each. Knows no model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch

from cached_rag.backends.base import Backend
from cached_rag.backends.tokenizer import Tokenization, Tokens
from cached_rag.config import GenerationConfig
from cached_rag.engine.decoding import Decoding
from cached_rag.engine.planner import Planner, Reading
from cached_rag.engine.report import Clock, Report
from cached_rag.engine.sharing import Row
from cached_rag.errors import BusyError
from cached_rag.kv.buffer import KVBuffer, Workspace
from cached_rag.kv.rows import RowKV
from cached_rag.library.background import Activity
from cached_rag.library.learning import Learning
from cached_rag.library.library import Library
from cached_rag.library.plan import Plan
from cached_rag.library.sequences import PromptKV, Sequences
from cached_rag.methods import Selector

# A piece of text; None when the answer is complete; or what went wrong.
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
        """Whether nothing more will come."""
        return self in (Status.FINISHED, Status.CANCELLED, Status.FAILED)


@dataclass(frozen=True)
class Resources:
    """What the requests of one engine are answered with.

    Attributes:
        library: the engine's own; all else is shared with its tenants.
        activity: the requests that are under way, for which background work waits.
    """

    model: Backend
    tokenization: Tokenization
    library: Library
    learning: Learning
    sequences: Sequences
    workspace: Workspace
    activity: Activity


@dataclass(eq=False)
class Request:
    """A prompt that wants an answer. What is below `report` comes to be in this order.

    Attributes:
        deliver: is given every piece of the answer as soon as it is certain, by any thread.
        tenant: requests of different tenants take turns.
        is_wanted: whether anybody waits for the answer.
        report: written as the request goes on; complete when it is over.
        reading: the prompt's tokens and the chunks in it; None until it was read.
        read_ms: milliseconds that took.
        plan: which tokens come from which KV; None until the request's turn comes near.
        method: what was asked for, or what the model allows.
        repair: what marks KV that the method repaired; empty if it is as full prefill's.
        exact_length: tokens from the first whose KV is, or will be, what full prefill computes.
        buffer: all of the prompt's KV, with room for the answer; None where it lies elsewhere.
        logits: (1, vocab_size) after the last prompt token.
        rows: slots of the tokens that were computed in every layer; the others are cached.
        row: its KV while answers are made together.
        pending: tokens whose KV is not there yet: the rest of the prompt, or the last token.
        decoding: the answer so far.
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
    method: Selector = field(init=False)
    repair: str = ""
    exact_length: int = 0
    buffer: KVBuffer | None = None
    logits: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)
    row: Row | None = None
    pending: list[int] = field(default_factory=list)
    decoding: Decoding = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report(self.config.method_name)
        self.decoding = Decoding(self.resources.model, self.config)

    @property
    def namespace(self) -> str:
        """Whose KV it may use."""
        return self.resources.library.namespace

    @property
    def finish_reason(self) -> str | None:
        """See `Generation`; "error" if it failed; None until it is over."""
        reasons = {Status.CANCELLED: "cancelled", Status.FAILED: "error"}
        return reasons.get(self.status, self.decoding.finish_reason)

    def as_row(self) -> Row:
        """For those who are answered beside it; its KV is not there yet."""
        return Row(self.namespace, np.asarray(self.tokens.ids), self.exact_length)

    def note_sharing(self) -> None:
        """Write down what its row shares; what it shares is nobody else's buffer any more."""
        assert self.row is not None
        own = self.row.kv.own
        if shared := self.row.num_shared:
            self.report.kv_bytes = own.nbytes
            self.report.shared_kv_bytes = shared * self.resources.model.shapes.bytes_per_token
        if self.buffer is not None and own is not self.buffer:
            self.resources.workspace.give(self.buffer)
            self.buffer = None

    def release(self, *, is_free: bool = True) -> None:
        """Keep of its KV what may serve others, and let go of it. Doing it again changes nothing.

        Args:
            is_free: nobody else reads the buffer.
        """
        try:
            self._leave_behind()
        finally:
            if self.buffer is not None and is_free:
                self.resources.workspace.give(self.buffer)
            self.buffer = self.row = None
            self.resources.activity.end(self)

    def _leave_behind(self) -> None:
        """KV for prompts that begin alike, and work on what this one missed."""
        plan, learning, sequences = self.plan, self.resources.learning, self.resources.sequences
        if self.row is not None:
            kv, is_private = self.row.kv, self.row.is_private
        elif self.buffer is not None:
            # Nobody tells it of texts that are forgotten meanwhile, so it must know them itself.
            kv, is_private = RowKV(self.buffer, len(self.tokens)), not (plan and plan.chunks)
        else:
            return
        assert plan is not None
        if not is_private:
            sequences.add(self._sequence(plan, kv), kv)
            for text_digest in learning.forgotten(plan):
                sequences.forget(self.namespace, text_digest, ())
        learning.see_to(self.tokens, plan)

    def _sequence(self, plan: Plan, kv: RowKV) -> PromptKV:
        """What its KV stands for: where all of the prompt is exact, so is the answer."""
        ids, exact = np.asarray(self.tokens.ids, dtype=np.int64), self.exact_length
        if exact == len(ids):
            answer = np.asarray(self.decoding.token_ids, dtype=np.int64)
            ids = np.concatenate([ids, answer])[: kv.length]
            exact = len(ids)
        return PromptKV(self.namespace, ids, (), exact, self.repair, plan.chunks)

    def finish(self, status: Status, last: BaseException | None) -> None:
        """Say that it is over, and how, to whoever waits."""
        self.report.output_tokens = len(self.decoding.token_ids)
        self.report.total_ms = self.clock.total()
        self.status = status
        self.deliver(last)


class Waiting:
    """Requests in the order in which they get their turn: one of each tenant, round and round.

    Those whose prompts are not read yet let others go first.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._tenants: OrderedDict[str, deque[Request]] = OrderedDict()
        # Entered again where the collector drops a stream while its thread is in here.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, list(self._tenants.values())))

    def __iter__(self) -> Iterator[Request]:
        with self._lock:
            return iter(
                [request for line in list(self._tenants.values()) for request in list(line)]
            )

    def add(self, request: Request, free: int = 0) -> None:
        """Put a request at its tenant's end.

        Args:
            free: so many do not really wait: their turn comes at once.

        Raises:
            BusyError: too many wait already.
        """
        with self._lock:
            count = len(self) - free
            if self._bound is not None and count >= self._bound:
                raise BusyError(
                    f"{count} requests wait already, and no more may; ask again later, or raise "
                    "BatchConfig.max_waiting"
                )
            self._tenants.setdefault(request.tenant, deque()).append(request)

    def first(self) -> Request | None:
        """Whose turn it is."""
        with self._lock:
            return next((one for one in self if one.reading or not one.is_wanted), None)

    def remove(self, request: Request) -> None:
        """Take a request out, if it waits; if it was its turn, its tenant goes to the end."""
        with self._lock:
            line = self._tenants.get(request.tenant)
            if line is None or request not in line:
                return
            is_first = self.first() is request
            line.remove(request)
            if not line:
                self._tenants.pop(request.tenant, None)
            elif is_first:
                self._tenants.move_to_end(request.tenant)
