"""Prefills one prompt: from its text to the logits of its first answer token.

`read`, `prepare` and `compute` are called in this order. They are the heart of the library: find
the chunks, place their KV, compute what is left. Knows nothing of the answer.
"""

import logging
from typing import Any

import torch

from cached_rag.backends.base import RepairInput
from cached_rag.backends.machine import profile_key
from cached_rag.config import check_room
from cached_rag.engine.planner import check_fits, choose, repair_mark
from cached_rag.engine.prompt import NOTHING, Beginning, Following, Pieces, Prefilling
from cached_rag.engine.report import Clock
from cached_rag.engine.resources import Resources
from cached_rag.engine.trace import TraceSource, kinds_of, uses_of
from cached_rag.errors import ContextOverflowError, CorruptBlobError, StoreError
from cached_rag.kv.buffer import KVBuffer, LayerLoader, ModuleKV
from cached_rag.kv.rows import RowKV
from cached_rag.library.encode import check_known
from cached_rag.library.plan import Plan
from cached_rag.methods import AnchorFlow, Auto, Full, Layout, Takes, spelled

_log = logging.getLogger(__name__)


def read(prompt: Prefilling) -> None:
    """Tokenise a prompt, as plain generation would, and find the chunks in it.

    The time grows with the prompt's length. So this runs on the thread of whoever asks; it needs
    no model and holds no lock.

    Raises:
        ContextOverflowError: the text is so long that it cannot fit the model's context.
    """
    clock, planner = Clock(), prompt.asked.planner
    _check_length(prompt.resources, planner.text, prompt.config.max_tokens)
    prompt.resources.library.refresh()
    method = prompt.config.selector()
    is_whole = prompt.resources.model.keeps_states and not method.composes
    reading = planner.read(Takes.NOTHING if is_whole else method.takes)
    prompt.report.match_ms = clock.total()
    prompt.reading = reading


def _check_length(resources: Resources, text: str, max_tokens: int) -> None:
    context = resources.model.context_length
    check_room(max_tokens, context)
    least = resources.tokenization.least_tokens(text, context - max_tokens)
    if least is not None:
        raise ContextOverflowError(
            f"a prompt of {len(text)} characters has {least} tokens at least; with an answer of up "
            f"to {max_tokens} it exceeds the model's context of {context}; retrieve fewer or "
            "smaller chunks, or lower max_tokens"
        )


def prepare(prompt: Prefilling) -> None:
    """Make the plan of a prompt that was read, and choose its method. Nothing is computed.

    From then on the prompt counts as under way, and background work waits until it is released.

    Raises:
        As `Engine.generate`.
    """
    resources, report, config = prompt.resources, prompt.report, prompt.config
    assert prompt.reading is not None
    resources.shared.activity.begin(prompt)
    with resources.model.lock, torch.inference_mode():
        # 1) Find out which tokens come from which chunk.
        clock, loaded_ms = Clock(), report.load_ms
        # What chunks do to states is needed before anything is computed.
        lazy = resources.library.is_pipelined and not config.selector().composes
        prompt.tokens, plan = prompt.reading(report, lazy=lazy)
        report.prompt_tokens = len(prompt.tokens)
        check_fits(resources.model, plan, config.max_tokens)
        check_known(resources.model, prompt.tokens.ids, "the prompt")
        report.match_ms += clock.lap() - (report.load_ms - loaded_ms)
        plan, method = choose(resources.model, plan, config, report)
        objection = resources.shared.audits.objection(spelled(method))
        if objection and not plan.is_exact:
            plan, method = plan.taking(Takes.NOTHING), Full()
            report.note(objection)
    prompt.plan, prompt.method, prompt.repair = plan, method, repair_mark(method)
    prompt.begin_with(NOTHING)
    asked = config.selector()
    if isinstance(asked, Auto) and not plan.is_exact:
        _reconsider(prompt, asked)
    if harvested := prompt.plan.harvested_from(0):
        report.note(
            f"{harvested} of {len(plan.matches)} texts were taken from earlier prompts that "
            "contained them (harvest), as they are not encoded yet"
        )
    if method != asked:
        report.method = spelled(method)


def _reconsider(prompt: Prefilling, method: Auto) -> None:
    """Drop approximate KV of which the method would compute all anew.

    So nothing is placed in vain, and what is computed is full prefill's, which others may share.
    """
    beginning = prompt.kept_beginning()
    layout = _layout(prompt, prompt.plan.starting_from(beginning.pieces(prompt.tokens.ids)))
    share = method.share(layout)
    if share <= method.recompute_ratio:
        return
    if share == 1.0:
        prompt.plan = prompt.plan.taking(Takes.EXACT)
        prompt.begin_with(NOTHING)
        prompt.report.modules_missed += len(prompt.plan.harvested)
    how = "all of them are computed" if share == 1.0 else f"{share:.0%} of them is recomputed"
    prompt.report.note(
        "these chunks have so few tokens that this model computes all of them"
        if method.takes_few(layout)
        else "these chunks are full of entries that differ in a name or a number, so "
        f"{how}, so that the right one is read; fewer chunks take less time"
    )


def _layout(prompt: Prefilling, plan: Plan) -> Layout:
    model, ids = prompt.resources.model, torch.tensor(prompt.tokens.ids)
    shapes = model.shapes
    # A choice by words is led astray as often as a small model's by attention.
    weights = model.num_weights if model.can_watch else 0
    return plan.layout(shapes.num_layers, ids, shapes.first_attending, weights)


def compute(
    prompt: Prefilling,
    beginning: Beginning = NOTHING,
    *,
    in_pieces: bool = False,
) -> int:
    """Compute a prompt's tokens that have no KV, and those that the method repairs.

    The prompt then has its `buffer` and the `logits` of the first answer token. If KV turns out
    to be damaged while it is read, the prompt is planned and computed again without it.

    Args:
        beginning: KV of the prompt's first tokens that other prompts have computed.
        in_pieces: only choose these tokens, and leave them to the scheduler's batch.
            Not possible with methods that choose layer by layer; their prompts are computed.

    Returns:
        How many tokens were computed; one computed in half of the layers counts as a half.

    Raises:
        StoreError: reading failed, and no single KV is known to be the cause.
    """
    resources, tokens = prompt.resources, prompt.tokens
    problem = None
    with resources.model.lock, torch.inference_mode():
        # 2) Place cached KV at its positions, in one buffer.
        clock = Clock()
        plan = prompt.begin_with(beginning)
        buffer = resources.shared.workspace.take(len(tokens) + prompt.room)
        buffer.lay_out(plan.positions)
        loader = _place(resources, plan, buffer)
        # 3) Compute the tokens that have no KV, and those that the method repairs.
        try:
            computed = _run(prompt, plan, buffer, loader, in_pieces=in_pieces)
        except StoreError as error:
            problem = error
        finally:
            if loader is not None:
                loader.finish()
        if not prompt.report.ttft_ms:  # else its answer was set back, and time has gone on
            prompt.report.fuse_ms += clock.lap()
    if problem is not None:
        _leave_out(prompt, loader, problem)
        return compute(prompt, in_pieces=in_pieces)
    prompt.report.modules_hit = prompt.plan.num_chunks
    prompt.buffer, prompt.held.kv = buffer, RowKV(buffer, prompt.num_final)
    return computed // resources.model.shapes.num_layers


def alone(prompt: Prefilling) -> Prefilling:
    """Prefill a prompt that was read, without the scheduler. The caller releases it."""
    try:
        prepare(prompt)
        compute(prompt, prompt.kept_beginning())
        # `Scheduler.forget` does not reach this prompt. So its KV is kept only if the plan says
        # which chunks are in it: they are checked when it is released.
        prompt.held.is_private = not prompt.plan.matches
    except BaseException:
        prompt.release()
        raise
    return prompt


def follow(prompt: Prefilling, beginning: Beginning) -> None:
    """Instead of `compute`: leave all tokens behind the beginning to the scheduler's batch.

    Only for prompts without cached KV behind their beginning, so that nothing has to be repaired.
    """
    plan = prompt.begin_with(beginning)
    prompt.report.modules_hit = prompt.plan.num_chunks
    layout = _layout(prompt, plan)
    rows = layout.fresh.nonzero().squeeze(1)
    _note_rows(prompt, plan, layout, rows, len(rows) * layout.num_layers)


def _place(resources: Resources, plan: Plan, buffer: KVBuffer) -> LayerLoader | None:
    """Place cached KV in the prompt's buffer.

    Returns:
        None if all is placed now. Otherwise a loader, which places it layer by layer while the
        model computes.
    """
    model = resources.model
    here, rule = model.shapes.device.type, model.composer.rule if model.composer else model.rule
    kept = [place.kv for place in plan.placements]
    if not all(isinstance(kv, ModuleKV) and kv.keys.device.type == here for kv in kept):
        return LayerLoader(buffer, plan.placements, rule)
    for place in plan.placements:
        buffer.place(place.kv, place.begin, rule)
    return None


def _run(
    prompt: Prefilling,
    plan: Plan,
    buffer: KVBuffer,
    loader: LayerLoader | None,
    *,
    in_pieces: bool,
) -> int:
    """Compute a prompt's rows, or choose them only; returns the (token, layer) pairs computed."""
    model, layout = prompt.resources.model, _layout(prompt, plan)
    ids, layers = layout.ids[None], layout.num_layers
    ready = loader.wait if loader else None
    if model.keeps_states:
        _wait(loader, layers)
        return _run_on(prompt, plan, buffer, layout)
    given = RepairInput(buffer, ids, layout, prompt.method, ready)
    chosen = model.choose(given) if in_pieces else None
    if chosen is not None:
        _wait(loader, layers)
        slots = chosen.left.tolist()
        drifting = layout.modules if prompt.method.transfers_drift else ()
        prompt.left = Pieces(slots, drifting)
        _note_rows(prompt, plan, layout, chosen.rows, chosen.computed + len(slots) * layers)
        return chosen.computed
    done = model.prefill(buffer, ids) if layout.fresh.all() else model.repair(given)
    prompt.logits = done.logits
    _note_rows(prompt, plan, layout, done.rows, done.computed)
    return done.computed


def _wait(loader: LayerLoader | None, layers: int) -> None:
    """Wait until KV is placed in all layers."""
    if loader is not None:
        for layer in range(layers):
            loader.wait(layer)


def _run_on(prompt: Prefilling, plan: Plan, buffer: KVBuffer, layout: Layout) -> int:
    """Compute a prompt behind the states of its beginning, with snapshots on the way.

    One is taken where the answer's header begins, for the next turn and for the same prompt again,
    and one where the prompt departs from the kept one that is most like it: so what several prompts
    begin with is kept from the second one on. What is known to change states in some way is not
    computed.
    """
    model, sequences = prompt.resources.model, prompt.resources.shared.sequences
    runs, begin, ids = prompt.held.beginning.runs, len(prompt.held.beginning), layout.ids[None]
    kept = runs[-1].buffer.states if runs else None
    buffer.states = kept.copy() if kept is not None else None
    jumps = {place.begin + change.begin: change for place, change in plan.changes}
    ends = {prompt.header_begin, prompt.branch_off(sequences.branch(prompt.namespace, prompt.ids))}
    done, computed = begin, list[int]()
    for end in sorted(end for end in ends | jumps.keys() if begin < end < len(prompt.ids)):
        if end < done:
            continue  # within what was not computed, where nothing can be kept
        if end > done:
            model.prefill(buffer, ids[:, :end], torch.arange(done, end), num_logits=0)
            computed += range(done, end)
            done = end
        assert buffer.states is not None
        if end in ends:
            buffer.snapshots[end] = buffer.states.copy()
        if (change := jumps.get(end)) is not None:
            assert model.composer is not None
            done += change.end - change.begin
            buffer.states = model.composer.behind(buffer.states, change.packed, done)
    prompt.logits = model.prefill(buffer, ids, torch.arange(done, ids.shape[1])).logits
    rows = torch.tensor([*computed, *range(done, ids.shape[1])])
    pairs = len(rows) * layout.num_layers
    _note_rows(prompt, plan, layout, rows, pairs)
    return pairs


def _note_rows(
    prompt: Prefilling, plan: Plan, layout: Layout, rows: torch.Tensor, computed: int
) -> None:
    """Note and report which (num_rows,) slots are computed, and how many (token, layer) pairs."""
    resources, report = prompt.resources, prompt.report
    prompt.trace_source = TraceSource(
        kinds_of(layout, rows, prompt.method),
        uses_of(plan),
        plan.matches if plan.looks_for_kv else (),
        prompt.tokens,
        prompt.asked.planner.text,
        resources.tokenization,
        profile_key(resources.model),
    )
    report.charged_recompute = computed / (len(prompt.tokens) * layout.num_layers)
    report.recomputed_tokens = int((~layout.fresh[rows.cpu()]).sum())
    report.cached_tokens = int((~layout.fresh).sum()) - report.recomputed_tokens
    if isinstance(prompt.method, AnchorFlow) and plan.positions is None:
        prompt.following = Following(prompt.method, layout, rows)


def _leave_out(prompt: Prefilling, loader: LayerLoader | None, problem: StoreError) -> None:
    """Plan a prompt again, without KV that could not be read.

    Damaged KV is deleted, and the rest of the cache is used. If a file only cannot be read now, it
    is kept, and this prompt is prefilled without any cached KV.
    """
    failed: Any = None if loader is None else loader.failed
    if failed is None or failed.source is None:
        raise problem
    _log.warning("%s The chunk is computed anew.", problem)
    prompt.report.note(str(problem))
    library = prompt.resources.library
    if isinstance(problem, CorruptBlobError):
        with library.shelf.spared():
            library.shelf.store.delete(library.shelf.key(*failed.source))
            prepare(prompt)
            return
    prompt.plan, prompt.method = prompt.plan.taking(Takes.NOTHING), Full()
    prompt.repair, prompt.report.method = "", spelled(prompt.method)
