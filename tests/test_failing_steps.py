"""What fails in a pass that answers share fails the answer whose fault it is, and no other."""

from __future__ import annotations

import pytest
import torch
from conftest import CHUNKS, tiny_model

from cached_rag import BatchConfig, Engine, LanguageModel
from cached_rag.engine.sharing import Live

STEP = LanguageModel.step

ASKED = [f"{chunk} And why is number {n} so?" for n, chunk in enumerate([*CHUNKS, *CHUNKS])]
GUILTY = 3
GREEDY = {"max_tokens": 8, "method": "full"}
ERRORS = [MemoryError("row"), torch.OutOfMemoryError("row"), RuntimeError("row")]


def begun(engine, asked, **options):
    streams = [engine.stream(prompt, **options) for prompt in asked]
    for stream in streams:
        stream.start()
    return streams


def failing(monkeypatch, fails):
    """Passes of which `fails(batch)` gives an error fail with it, after they have written."""

    def step(model, batch):
        lengths = [row.kv.length for row in batch]
        logits = STEP(model, batch)
        if error := fails(batch):
            for row, length in zip(batch, lengths, strict=True):
                row.kv.length = length
            raise error
        return logits

    monkeypatch.setattr(LanguageModel, "step", step)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("when", ["prompt", "answer"])
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom"])
def test_one_row_fails_and_the_others_answer_as_alone(monkeypatch, family, when, error):
    engine = Engine(tiny_model(family), batch=BatchConfig(prefill_tokens=40))
    expected = [engine.generate(prompt, **GREEDY).token_ids for prompt in ASKED]

    def fails(batch):
        one = next((o for o in engine.scheduler._running if o.request is guilty._request), None)
        is_there = one is not None and any(row.kv is one.row.kv for row in batch)
        count = len(guilty.token_ids)
        return error if is_there and (when == "prompt" or count > 3) else None

    streams = begun(engine, ASKED, **GREEDY)
    guilty = streams[GUILTY]
    failing(monkeypatch, fails)
    for n, stream in enumerate(streams):
        if n == GUILTY:
            with pytest.raises(type(error), match="row"):
                stream.result()
        else:
            assert stream.result().token_ids == expected[n]
    assert engine.scheduler.nbytes == engine.scheduler.num_running == 0


def test_what_is_too_much_for_all_together_is_done_in_parts(monkeypatch):
    engine = Engine(tiny_model("llama"))
    expected = [engine.generate(prompt, **GREEDY).token_ids for prompt in ASKED]
    failing(monkeypatch, lambda batch: MemoryError() if len(batch) > 2 else None)
    assert [a.token_ids for a in engine.generate_batch(ASKED, **GREEDY)] == expected


def test_an_interrupt_is_not_taken_for_a_rows_fault(monkeypatch):
    engine = Engine(tiny_model("llama"))
    failing(monkeypatch, lambda _: KeyboardInterrupt())
    streams = begun(engine, ASKED[:3], **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        streams[0].result()


def test_what_an_answer_leaves_and_cannot_be_kept_fails_nobody(monkeypatch):
    engine = Engine(tiny_model("llama"))
    expected = [engine.generate(prompt, **GREEDY).token_ids for prompt in ASKED]
    leave, failed = Live.leave, []

    def leaving(live, row, answer_ids):
        leave(live, row, answer_ids)
        if not failed:
            failed.append(row)
            raise MemoryError

    monkeypatch.setattr(Live, "leave", leaving)
    assert [a.token_ids for a in engine.generate_batch(ASKED, **GREEDY)] == expected
    assert failed
    assert engine.scheduler.num_running == 0
