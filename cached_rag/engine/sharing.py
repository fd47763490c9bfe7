"""Finds KV that several running prompts have in common, so that it is kept once and read once.

Two kinds of KV are shared. A prompt that begins as another one does takes the KV of that beginning
from it, as far as the KV is exact in both. A chunk that neither prompt repairs is shared wherever
it stands (Prompt Cache, section 3.4; RelayAttention, section 3.3 and appendix D). The KV that
finished prompts left is in `Sequences`. Knows tokens and KV; computes nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cached_rag.engine.prompt import NOTHING, Beginning, Name, Prefilling
from cached_rag.kv.buffer import KVBuffer, ModuleKV
from cached_rag.kv.layers import KVShapes, stacks_of
from cached_rag.kv.rows import RowKV, Run, SlabRow, Slabs
from cached_rag.library.plan import Placement
from cached_rag.library.sequences import MIN_SHARED, common


class Sharing:
    """The prompts that are being answered now, and their KV. Used by one thread at a time.

    Args:
        shares: False keeps all of each prompt's KV apart.
    """

    def __init__(self, shapes: KVShapes, *, shares: bool = True) -> None:
        self._shares = shares
        self._prompts: list[Prefilling] = []
        self._slabs = Slabs(shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of all running prompts; a buffer that several use counts once.

        Memory that is held for the next ones counts, too.
        """
        used = _buffers(self._prompts).values()
        apart = sum(buffer.nbytes for buffer in used if not isinstance(buffer, SlabRow))
        return apart + self._slabs.nbytes

    def beginning(self, prompt: Prefilling) -> Beginning:
        """The longest KV of a prompt's beginning, from finished prompts or from a running one."""
        finished, (running, coming) = prompt.kept_beginning(), self._running_beginning(prompt)
        best = running
        if len(finished) > len(running):  # the running prompt's KV is shared, the rest is copied
            behind = (run.cut(len(running), len(finished)) for run in finished.runs)
            best = replace(finished, runs=(*running.runs, *filter(None, behind)))
        return replace(best, is_coming=coming - len(best) >= MIN_SHARED)

    def cost(self, beginning: Beginning, count: int) -> int:
        """Bytes that `begin` would take for a prompt with room for `count` tokens in all."""
        return self._slabs.cost(count - sum(map(len, self._common_runs(beginning.runs))))

    def _running_beginning(self, prompt: Prefilling) -> tuple[Beginning, int]:
        """The longest KV of a beginning in a running prompt, and how long it will become.

        No more is taken than is exact without any help, so that an answer does not depend on what
        else runs; and never the last token, which is computed for its logits.
        """
        count, coming, best = MIN_SHARED - 1, 0, NOTHING
        # Slots alone do not say where the tokens of a prompt with gaps stand.
        if not self._shares or prompt.plan.positions is not None or prompt.is_beyond_switch:
            return best, coming
        wanted = prompt.ids[:-1][: prompt.held.exact_length]
        for one in self._prompts:
            if (
                one.namespace != prompt.namespace
                or one.held.is_private
                or one.kv.positions is not None
            ):
                continue
            length = min(common(wanted, one.ids), one.held.exact_length)
            coming, length = max(coming, length), min(length, one.kv.length)
            if length > count:
                count, best = length, Beginning(tuple(one.kv.cut(0, length)), length)
        return best, coming

    def begin(self, prompt: Prefilling) -> None:
        """Add a prompt of which only the beginning has KV; the batch computes the rest of it."""
        runs = prompt.held.beginning.runs
        shared = self._common_runs(runs)
        own = self._slabs.take(len(prompt.ids) - sum(map(len, shared)) + prompt.room)
        prompt.held.kv = RowKV(own, len(prompt.held.beginning), runs).moved(shared, own)
        prompt.kv.lay_out(prompt.plan.positions)
        self._prompts.append(prompt)

    def hold(self, prompt: Prefilling) -> None:
        """Add a prompt all of whose KV is in its buffer, but for what is still computed."""
        prompt.held.taken = tuple(self._common_runs(prompt.held.beginning.runs))
        self._prompts.append(prompt)

    def adopt(self, prompt: Prefilling) -> None:
        """Share the KV of a prompt that is prefilled; KV that others have too is used in common.

        If there is any, what is not shared is copied to a smaller buffer. But a buffer that others
        read by now, as they begin alike, stays as it is.
        """
        whole = prompt.kv.own
        named = {_name(p, whole): p for p in _unrepaired(prompt)} if self._shares else {}
        shared = [*prompt.held.taken, *self._elsewhere(named)]
        others = _buffers(one for one in self._prompts if one is not prompt)
        if shared and id(whole) not in others:
            own = self._slabs.take(len(prompt.ids) - sum(map(len, shared)) + prompt.room)
            prompt.held.kv = prompt.kv.moved(shared, own)
        prompt.held.taken, prompt.held.chunks = (), named

    def leave(self, prompt: Prefilling) -> bool:
        """Remove a prompt whose answer is over, if it is here.

        Returns:
            Whether its buffer is free: no other prompt reads it.
        """
        if prompt not in self._prompts:
            return True
        self._prompts.remove(prompt)
        used = _buffers(self._prompts)
        for name, one in _buffers([prompt]).items():
            if name not in used:
                self._slabs.give(one)
        self._slabs.drop_idle()
        prompt.held.taken, prompt.held.chunks = (), {}
        return id(prompt.buffer) not in used

    def _common_runs(self, runs: Sequence[Run]) -> list[Run]:
        """The runs that running prompts use, if they are long enough to be shared.

        What only finished prompts have left is copied. Shared, it would save one copy, and cost a
        kernel call for each run, in every layer, for every token of the answer.
        """
        used = _buffers(self._prompts) if self._shares else {}
        return [run for run in runs if len(run) >= MIN_SHARED and id(run.buffer) in used]

    def _elsewhere(self, named: dict[Name, Placement]) -> list[Run]:
        """Runs of these chunks that other prompts have; neighbours are joined."""
        found: list[Run] = []
        for name, place in sorted(named.items(), key=lambda item: item[1].begin):
            for one in self._prompts:
                if (there := one.held.chunks.get(name)) is not None:
                    moved = place.begin - there.begin
                    for run in one.kv.cut(there.begin, there.end):
                        _join(found, Run(run.buffer, run.begin, run.end, run.slot + moved))
                    break
        return [run for run in found if len(run) >= MIN_SHARED]


def _unrepaired(prompt: Prefilling) -> list[Placement]:
    """Placements whose KV is in memory and was not changed by a repair, so it can be shared.

    Those in the prompt's beginning are not: their slots have what another prompt computed.
    """
    return [
        place
        for place in prompt.plan.placements
        if place.begin >= len(prompt.held.beginning)
        and isinstance(place.kv, ModuleKV)
        and (place.is_exact or not prompt.method.repairs)
    ]


def _buffers(prompts: Iterable[Prefilling]) -> dict[int, KVBuffer]:
    """All buffers that must not be used for other KV, each once, by identity."""
    found = [buffer for one in prompts for buffer in one.kv.buffers()]
    found += [run.buffer for one in prompts for run in one.held.taken]
    return {id(buffer): buffer for buffer in found}


def _join(runs: list[Run], run: Run) -> None:
    """Append a run, or lengthen the last one if it goes on where that ends."""
    last = runs[-1] if runs else None
    if last and last.buffer is run.buffer and last.shift == run.shift and last.end == run.begin:
        runs[-1] = Run(last.buffer, last.begin, run.end, last.slot)
    else:
        runs.append(run)


def _name(place: Placement, whole: KVBuffer) -> Name:
    """A name that two placements have in common if they are the same KV at the same positions."""
    kv = place.kv
    assert isinstance(kv, ModuleKV)
    return stacks_of(kv.values)[0].data_ptr(), kv.seq_len, whole.position(place.begin) - kv.start
