"""Finds KV that several running prompts have in common, so that it is kept once and read once.

Two kinds of KV are shared. A prompt that begins as another one does takes the KV of that beginning
from it, as far as the KV is exact in both. A chunk that neither prompt repairs is shared wherever
it stands (Prompt Cache, section 3.4; RelayAttention, section 3.3 and appendix D). The KV that
finished prompts left is in `Sequences`. Knows tokens and KV; computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.layers import KVShapes, stacks_of
from cached_rag.kv.rows import RowKV, Run, SlabRow, Slabs
from cached_rag.library.plan import Placement
from cached_rag.library.sequences import MIN_SHARED, Ids, common

_Name = tuple[int, int, int]


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


@dataclass(eq=False)
class RunningSequence:
    """A prompt that is being answered, with what others need to know to share its KV.

    Attributes:
        namespace: the tenant; tenants share nothing.
        ids: (seq_len,) int64, the prompt's tokens.
        exact_length: number of tokens, from the first, whose KV is, or will be, what full prefill
            computes.
        kv: the KV of the prompt and of its answer. While the prompt is prefilled, `kv.length` is
            the number of tokens, from the first, whose KV is final.
        chunks: those that are not repaired, by the name that `_name` gives them. A name contains
            the address of the KV, which is held here, so that no other KV comes to have it.
        taken: KV of other prompts that `adopt` will share; until then it must not be freed.
        is_private: the prompt contains a text that was forgotten, so no other prompt may use its
            KV any more.
    """

    namespace: str
    ids: Ids
    exact_length: int
    kv: RowKV = field(init=False)
    chunks: dict[_Name, Placement] = field(default_factory=dict)
    taken: tuple[Run, ...] = ()
    is_private: bool = False

    def buffers(self) -> Iterator[KVBuffer]:
        """All buffers that must not be used for other KV."""
        yield from self.kv.buffers()
        yield from (run.buffer for run in self.taken)


class Sharing:
    """The prompts that are being answered now, and their KV. Used by one thread at a time.

    Args:
        shares: False keeps all of each prompt's KV apart.
    """

    def __init__(self, shapes: KVShapes, *, shares: bool = True) -> None:
        self._shares = shares
        self._sequences: list[RunningSequence] = []
        self._slabs = Slabs(shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of all running prompts; a buffer that several use counts once.

        Memory that is held for the next ones counts, too.
        """
        used = _buffers(self._sequences).values()
        apart = sum(buffer.nbytes for buffer in used if not isinstance(buffer, SlabRow))
        return apart + self._slabs.nbytes

    def beginning(self, finished: Beginning, namespace: str, ids: Ids, limit: int) -> Beginning:
        """The longest KV of a prompt's beginning, from finished prompts or from a running one.

        Args:
            finished: what finished prompts left of it.
            ids: (seq_len,) the prompt's tokens. The last one is always computed, for its logits.
            limit: number of tokens, from the first, that are exact without any help. No more is
                taken from running prompts, so that an answer does not depend on what else runs.
        """
        running, coming = self._running_beginning(namespace, ids[:-1][:limit])
        best = running
        if len(finished) > len(running):  # the running prompt's KV is shared, the rest is copied
            behind = (run.cut(len(running), len(finished)) for run in finished.runs)
            best = replace(finished, runs=(*running.runs, *filter(None, behind)))
        return replace(best, is_coming=coming - len(best) >= MIN_SHARED)

    def cost(self, beginning: Beginning, count: int) -> int:
        """Bytes that `begin` would take for a prompt with room for `count` tokens in all."""
        return self._slabs.cost(count - sum(map(len, self._common_runs(beginning.runs))))

    def _running_beginning(self, namespace: str, wanted: Ids) -> tuple[Beginning, int]:
        """The longest KV of a beginning in a running prompt, and how long it will become."""
        count, coming, best = MIN_SHARED - 1, 0, None
        for sequence in self._sequences if self._shares else ():
            if sequence.namespace != namespace or sequence.is_private:
                continue
            if sequence.kv.positions is not None:  # slots alone do not say where tokens stand
                continue
            length = min(common(wanted, sequence.ids), sequence.exact_length)
            coming = max(coming, length)
            if min(length, sequence.kv.length) > count:
                count, best = min(length, sequence.kv.length), sequence
        found = Beginning(tuple(best.kv.cut(0, count)), count) if best else NOTHING
        return found, coming

    def begin(
        self,
        sequence: RunningSequence,
        beginning: Beginning,
        positions: Sequence[int] | None,
        room: int,
    ) -> RunningSequence:
        """Add a prompt of which only the beginning has KV; the batch computes the rest of it.

        Args:
            positions: of the prompt's tokens; None if token i stands at position i.
            room: number of tokens that the answer may have.
        """
        shared = self._common_runs(beginning.runs)
        own = self._slabs.take(len(sequence.ids) - sum(map(len, shared)) + room)
        sequence.kv = RowKV(own, len(beginning), beginning.runs).moved(shared, own)
        sequence.kv.lay_out(positions)
        self._sequences.append(sequence)
        return sequence

    def hold(
        self, sequence: RunningSequence, whole: KVBuffer, beginning: Beginning, done: int
    ) -> RunningSequence:
        """Add a prompt all of whose KV is in one buffer, but for what is still computed.

        Args:
            whole: becomes the sequence's own buffer.
            beginning: what was copied to it from other prompts.
            done: number of tokens, from the first, whose KV is final.
        """
        sequence.taken = tuple(self._common_runs(beginning.runs))
        sequence.kv = RowKV(whole, done)
        self._sequences.append(sequence)
        return sequence

    def adopt(
        self,
        sequence: RunningSequence,
        unrepaired: Sequence[Placement],
        room: int,
    ) -> None:
        """Share the KV of a prompt that is prefilled; KV that others have too is used in common.

        If there is any, what is not shared is copied to a smaller buffer. But a buffer that others
        read by now, as they begin alike, stays as it is.

        Args:
            unrepaired: cached KV that was placed and not changed by a method.
            room: number of tokens that the answer may have.
        """
        whole, count = sequence.kv.own, len(sequence.ids)
        named = {_name(p, whole): p for p in unrepaired} if self._shares else {}
        shared = [*sequence.taken, *self._elsewhere(named)]
        others = _buffers([one for one in self._sequences if one is not sequence])
        if shared and id(whole) not in others:
            own = self._slabs.take(count - sum(map(len, shared)) + room)
            sequence.kv = sequence.kv.moved(shared, own)
        sequence.taken, sequence.chunks = (), named

    def leave(self, sequence: RunningSequence, buffer: KVBuffer | None) -> bool:
        """Remove a prompt whose answer is over.

        Returns:
            Whether a buffer of it is free: no other prompt reads it.
        """
        self._sequences.remove(sequence)
        used = _buffers(self._sequences)
        for name, one in _buffers([sequence]).items():
            if name not in used:
                self._slabs.give(one)
        self._slabs.drop_idle()
        return id(buffer) not in used

    def _common_runs(self, runs: Sequence[Run]) -> list[Run]:
        """The runs that running prompts use, if they are long enough to be shared.

        What only finished prompts have left is copied. Shared, it would save one copy, and cost a
        kernel call for each run, in every layer, for every token of the answer.
        """
        used = _buffers(self._sequences) if self._shares else {}
        return [run for run in runs if len(run) >= MIN_SHARED and id(run.buffer) in used]

    def _elsewhere(self, named: dict[_Name, Placement]) -> list[Run]:
        """Runs of these chunks that other sequences have; neighbours are joined."""
        found: list[Run] = []
        for name, place in sorted(named.items(), key=lambda item: item[1].begin):
            for sequence in self._sequences:
                if (there := sequence.chunks.get(name)) is not None:
                    moved = place.begin - there.begin
                    for run in sequence.kv.cut(there.begin, there.end):
                        _join(found, Run(run.buffer, run.begin, run.end, run.slot + moved))
                    break
        return [run for run in found if len(run) >= MIN_SHARED]


def _buffers(sequences: Sequence[RunningSequence]) -> dict[int, KVBuffer]:
    """All buffers that some sequences use, each once, by identity."""
    return {id(buffer): buffer for sequence in sequences for buffer in sequence.buffers()}


def _join(runs: list[Run], run: Run) -> None:
    """Append a run, or lengthen the last one if it goes on where that ends."""
    last = runs[-1] if runs else None
    if last and last.buffer is run.buffer and last.shift == run.shift and last.end == run.begin:
        runs[-1] = Run(last.buffer, last.begin, run.end, last.slot)
    else:
        runs.append(run)


def _name(place: Placement, whole: KVBuffer) -> _Name:
    """A name that two placements have in common if they are the same KV at the same positions."""
    kv = place.kv
    assert isinstance(kv, ModuleKV)
    return stacks_of(kv.values)[0].data_ptr(), kv.seq_len, whole.position(place.begin) - kv.start
