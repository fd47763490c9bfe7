"""One question to the scheduler, and where its answer appears. Knows no model.

Also the queue of those that wait: fair between tenants, in order within each.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cached_rag.config import GenerationConfig
from cached_rag.engine.planner import Planner
from cached_rag.engine.prefill import Prefiller, Read
from cached_rag.engine.report import Clock, Report
from cached_rag.errors import BusyError

# A piece of text; None when the answer is complete; or what went wrong.
Item = str | BaseException | None


@dataclass(eq=False)
class Request:
    """A prompt that wants an answer.

    Attributes:
        prefiller: whose modules it may use.
        read: the prompt's tokens and modules; None until they are known.
        deliver: is given every piece of the answer as soon as it is certain, by any thread.
        tenant: requests of different tenants take turns.
        token_ids: the answer's tokens so far.
        finish_reason: see `Generation`; None until it is complete.
        is_cancelled: nobody waits for it any more.
    """

    prefiller: Prefiller
    planner: Planner
    config: GenerationConfig
    tenant: str = ""
    read: Read | None = None
    deliver: Callable[[Item], None] = lambda _: None
    report: Report = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_cancelled: bool = False
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.report = Report(self.config.method_name)


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
            return next((one for one in self if one.read or one.is_cancelled), None)

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
