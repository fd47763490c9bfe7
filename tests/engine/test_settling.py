"""What prompts begin with again is computed in full in the background, and then exact."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import CHUNKS, ask, plain_logits, tiny_model

from cached_rag import Engine, StoreConfig
from cached_rag.engine import idle


def opened(**settings):
    engine = Engine(tiny_model("llama"), StoreConfig(**settings))
    engine.encode(CHUNKS, engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
    return engine


def asked(engine, question, *chunks, method="auto"):
    """A prompt over chunks whose background work is done when this returns."""
    messages = ask(*chunks)
    messages[-1] = messages[-1] | {"content": messages[-1]["content"] + question}
    done = engine.prefill(messages, method=method, max_tokens=4)
    done.release()
    if engine.write_back is not None:
        engine.write_back.drain()
    return done


@pytest.mark.parametrize("piece", [7, 512])  # in one piece, and in several
def test_the_third_prompt_over_the_same_chunks_is_exact(piece, monkeypatch):
    monkeypatch.setattr(idle, "_PIECE", piece)
    with opened() as engine:
        first, second, third = (asked(engine, f" {n}?", *CHUNKS) for n in ("Who", "Why", "When"))
        for repaired in (first, second):
            plain = plain_logits(engine.model, repaired.tokens.ids)[-1]
            assert not torch.allclose(repaired.logits[0], plain, atol=1e-3)  # control
        plain = plain_logits(engine.model, third.tokens.ids)[-1]
        assert torch.allclose(third.logits[0], plain, atol=1e-4)
        assert third.report.kept_tokens > 0
        assert third.report.kept_repaired_tokens == 0
        assert third.report.charged_recompute < second.report.charged_recompute


def test_only_the_common_beginning_is_settled():
    with opened() as engine:
        asked(engine, " Who?", *CHUNKS)
        asked(engine, " Why?", CHUNKS[0], CHUNKS[1])
        asked(engine, " Why?", CHUNKS[0], CHUNKS[1])
        third = asked(engine, " When?", *CHUNKS)
        ends = [end for _, end in third.plan.chunks]
        assert ends[1] <= third.report.kept_tokens < ends[2]


@pytest.mark.parametrize(
    "settings", [{"settle": False}, {"write_back": False}, {"keeps_repaired": False}]
)
def test_it_can_be_off(settings):
    with opened(**settings) as engine:
        reports = [asked(engine, f" {n}?", *CHUNKS).report for n in ("Who", "Why", "When")]
        shares = [report.charged_recompute for report in reports]
        assert shares[2] == pytest.approx(shares[1], abs=0.02)


def test_other_orders_and_other_tenants_settle_nothing():
    with opened() as engine, engine.tenant("other") as other:
        other.encode(CHUNKS, other.head(ask(CHUNKS[0]), CHUNKS[0]), context=None)
        asked(engine, " Who?", *CHUNKS)
        asked(engine, " Who?", *CHUNKS[::-1])
        asked(other, " Who?", *CHUNKS)
        assert asked(engine, " Why?", CHUNKS[1], CHUNKS[0]).report.kept_tokens == 0
        assert asked(other, " Why?", CHUNKS[2], CHUNKS[0]).report.kept_tokens == 0


def test_a_chunk_that_is_forgotten_meanwhile_takes_the_settled_kv_with_it(monkeypatch):
    with opened() as engine:
        asked(engine, " Who?", *CHUNKS)
        kept = idle._Work._keep

        def forgets_first(work):
            engine.forget([CHUNKS[1]])
            kept(work)

        monkeypatch.setattr(idle._Work, "_keep", forgets_first)
        second = asked(engine, " Why?", *CHUNKS)
        ends = [end for _, end in second.plan.chunks]
        _, left = engine.sequences.beginning("", _ids(second))
        assert left <= ends[0]


def test_what_does_not_fit_is_not_begun():
    with opened(sequence_bytes=1 << 10) as engine:
        for name in ("Who", "Why", "When"):
            assert asked(engine, f" {name}?", *CHUNKS).report.kept_tokens == 0
        assert engine.sequences.nbytes == 0


def test_a_chat_goes_on_from_its_own_turns_and_settles_nothing(monkeypatch):
    begun = []
    monkeypatch.setattr(idle._Work, "offer", lambda work, _: begun.append(work))
    with opened() as engine:
        messages = ask(*CHUNKS)
        for question in ("Who?", "Why?", "When?"):
            answer = engine.generate(messages, method="auto", max_tokens=4)
            said = {"role": "assistant", "content": answer.text}
            messages = [*messages, said, {"role": "user", "content": question}]
    assert begun == []


def _ids(done):
    import numpy as np

    return np.asarray(done.tokens.ids, dtype=np.int64)


def test_a_stream_that_the_collector_ends_amid_the_look_up_waits_for_nobody(monkeypatch):
    with Engine(tiny_model("llama"), StoreConfig()) as engine:
        text = " ".join(CHUNKS)
        engine.encode([text])
        request = engine.prefill(f"{text}\n\nWho?", max_tokens=4)
        left = [engine.stream("Another question, of a client that left?", max_tokens=200)]
        next(left[0])
        real = idle.xxh3_128

        class Collected:
            """A digest, in the midst of which a stream is dropped, as by the collector."""

            def __init__(self):
                self.update, self.digest = real().update, self._digest
                self._own = real()

            def _digest(self):
                left.clear()
                return self._own.digest()

        monkeypatch.setattr(idle, "xxh3_128", Collected)
        done = threading.Thread(target=request.release, daemon=True)
        done.start()
        done.join(20)
        assert not done.is_alive()
        assert not left
