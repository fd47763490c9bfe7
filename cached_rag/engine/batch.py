"""The requests whose answers are being made: their KV, and what of them the next pass computes.

Knows requests and bounds; knows no text, no queue and no thread.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from cached_rag.backends.base import Backend
from cached_rag.config import BatchConfig
from cached_rag.engine import prefill
from cached_rag.engine.prompt import PAGE, Beginning
from cached_rag.engine.request import Request, Status
from cached_rag.engine.sharing import Sharing
from cached_rag.errors import ContextOverflowError
from cached_rag.kv.buffer import KVBuffer

# Requests, each with the number of its pending tokens that a pass computes.
Work: TypeAlias = list[tuple[Request, int]]
_SET_BACK = (
    "The answer was interrupted, as the KV of all running answers reached BatchConfig.max_bytes, "
    "or no memory was left; its own was computed again."
)


class Batch:
    """Requests that were admitted and are not over, in that order. Used during turns only."""

    def __init__(
        self, model: Backend, config: BatchConfig, put_back: Callable[[Request], object]
    ) -> None:
        """Run nothing yet.

        Args:
            put_back: takes a request that has to wait again.
        """
        self._model, self._config, self._put_back = model, config, put_back
        self._requests: list[Request] = []
        self._sharing = Sharing(model.shapes, shares=config.shares and model.can_share)
        self._each = model.shapes.bytes_per_token

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Those of now; some may be over before they are reached."""
        return iter(list(self._requests))

    @property
    def nbytes(self) -> int:
        """Bytes of their KV; KV that they share counts once."""
        return self._sharing.nbytes

    # Admitting -------------------------------------------------------------------------------

    def beginning(self, request: Request) -> Beginning:
        """The KV that finished and running prompts have of this prompt's beginning."""
        return self._sharing.beginning(request.prompt)

    def has_room(self, request: Request, beginning: Beginning) -> bool:
        """Whether a prompt's answer may begin now. It always may if nothing else runs.

        Raises:
            ContextOverflowError: there is no room even then.
        """
        prompt, most = request.prompt, self._config.max_bytes
        needed = (len(prompt.tokens) + prompt.config.max_tokens) * self._each
        if most is not None and needed > most:
            raise ContextOverflowError(
                f"prompt and answer need {needed} bytes of KV, and BatchConfig.max_bytes "
                f"is {most}; raise it, retrieve less, or lower max_tokens"
            )
        count = len(prompt.tokens) + prompt.room
        if not self._requests:
            return True
        if self._follows(request, beginning):  # what is in the beginning takes no more room
            return self._fits(self._sharing.cost(beginning, count))
        return self._fits(prompt.resources.shared.workspace.size(count) * self._each)

    def _fits(self, nbytes: int) -> bool:
        """Whether running answers may take so many bytes more."""
        most = self._config.max_bytes
        return most is None or self._sharing.nbytes + nbytes <= most

    def _follows(self, request: Request, beginning: Beginning) -> bool:
        """Whether the batch computes all of a prompt that has no KV: there is none to repair."""
        is_covered = all(place.end <= len(beginning) for place in request.prompt.plan.placements)
        is_shared = bool(beginning.runs or self._requests)
        return is_covered and is_shared and self._model.can_append

    def begin(self, request: Request, beginning: Beginning, *, others_wait: bool) -> int:
        """Let a request run; returns how many prompt tokens that computed.

        A prompt is prefilled in the batch, in pieces, if others run or wait, so that it holds up no
        running answer, and several prompts are repaired in one pass. If there are none, there is
        nobody to hold up, and one pass is the fastest. Methods that choose layer by layer always
        need one.
        """
        prompt, answer = request.prompt, request.decoding.token_ids
        prompt.keep_apart()
        if self._follows(request, beginning):
            prefill.follow(prompt, beginning)
            request.pending = [*prompt.tokens.ids[len(beginning) :], *answer]
            self._sharing.begin(prompt)
            request.note_sharing()
            self._requests.append(request)
            return 0
        is_crowded = (others_wait or bool(self._requests)) and not answer
        is_repaired = any(place.end > len(beginning) for place in prompt.plan.placements)
        is_in_pieces = is_crowded and is_repaired and self._model.can_share
        computed = prefill.compute(prompt, beginning, in_pieces=is_in_pieces)
        if prompt.left is not None:
            request.pending = [prompt.tokens.ids[slot] for slot in prompt.left.slots]
        self._sharing.hold(prompt)
        self._requests.append(request)
        return computed

    # Running ---------------------------------------------------------------------------------

    def share(self, request: Request) -> None:
        """Share the KV of a prompt with others once it is prefilled, if it was not from the first.

        Called when tokens of it were taken: what was drafted lies behind its end, which is as far
        as KV is moved, until it is accepted.
        """
        prompt = request.prompt
        if request.is_adopted or prompt.buffer is None or prompt.held.kv is None:
            return
        if prompt.is_following:  # what is repaired next must lie in one buffer
            return
        request.is_adopted = True
        self._sharing.adopt(prompt)
        request.note_sharing()

    def work(self, computed: int) -> Work:
        """What the next pass computes; there is memory for it.

        An answer computes its last token, and those that are drafted behind it; one that is
        followed does so alone, and is not here. Prompts share what is left of `prefill_tokens`: the
        one that was admitted first takes as much as it can, and what it leaves goes to the next. So
        that each pass gets on, the first takes its least piece even if that is more: one token, or
        the rows of a chunk that must not be cut.

        Args:
            computed: prompt tokens that were computed in this turn already.
        """
        found = self._answers()
        left = max(1, self._config.prefill_tokens - computed)
        is_first = True
        for request in self._requests:
            if request.status is Status.ANSWERING:
                continue
            count = request.next_piece(left, at_least=is_first)
            if count:
                found.append((request, count))
                is_first, left = False, max(0, left - count)
        # Scattered tokens last: attention over what is appended to need not look at them then.
        return sorted(found, key=lambda one: one[0].prompt.left is not None)

    def _answers(self) -> Work:
        """One token of each answer, with room for it and its draft."""
        answering = [one for one in self._requests if one.status is Status.ANSWERING]
        for request in answering:
            if request.status is Status.ANSWERING:  # making room for another may set one back
                request.make_draft(len(answering))
                self._make_room(request)
        return [
            (request, 1)
            for request in answering
            if request.status is Status.ANSWERING and not request.prompt.is_following
        ]

    def _make_room(self, request: Request) -> None:
        """Add a page to an answer that needs one, or set the youngest request back for it."""
        count = request.missing_room
        if not count:
            return
        while (page := self._page(count)) is None:
            if count > PAGE:
                count = PAGE
                continue
            youngest = self._requests[-1]
            self.set_back(youngest)
            if youngest is request:
                return
        request.prompt.kv.goes_on_in(page)

    def _page(self, count: int) -> KVBuffer | None:
        """Room for so many tokens; None if there is none, unless others are set back for it.

        Where memory lacks, even the only one is: it begins again with all its KV and a page in one
        buffer, and fails if there is no memory for that.
        """
        may_wait = len(self._requests) > 1 or count > PAGE
        if may_wait and not self._fits(count * self._each):
            return None
        try:
            return KVBuffer.like(self._model.shapes, count)
        except (MemoryError, RuntimeError):  # a CPU's is of the latter kind
            return None

    def set_back(self, request: Request) -> None:
        """Let a request wait again, without its memory, until there is enough."""
        request.set_back(is_free=self._leave(request))
        request.prompt.report.note(_SET_BACK)
        self._put_back(request)

    # Leaving ---------------------------------------------------------------------------------

    def drop(self, request: Request) -> None:
        """Let go of a request that is over, whether it ran or not, and keep what it leaves."""
        request.prompt.release(is_free=self._leave(request))

    def _leave(self, request: Request) -> bool:
        """Take a request out, if it is here; returns whether nobody else reads its buffer."""
        if request in self._requests:
            self._requests.remove(request)
        return self._sharing.leave(request.prompt)
