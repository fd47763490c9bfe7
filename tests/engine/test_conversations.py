"""A turn of a chat costs what the turn added, by any method and through any way in."""

from __future__ import annotations

import numpy as np
import openai
import pytest
import torch
from conftest import CHUNKS, plain_logits, tiny_model
from langchain_cached_rag import CachedRAGLLM as StringLLM
from langchain_cached_rag import ChatCachedRAG
from llama_index.core.llms import ChatMessage
from llama_index.llms.cached_rag import CachedRAGLLM
from served import NAME, serving
from typer.testing import CliRunner

from cached_rag import ConfigError, Engine, GenerationConfig, StoreConfig
from cached_rag.backends.thread import on_model_thread
from cached_rag.cli.main import app
from cached_rag.engine.decoding import answer_alone
from cached_rag.library.sequences import common

DOCUMENTS = [f"{chunk} {other}" for chunk, other in zip(CHUNKS, CHUNKS[1:] + CHUNKS, strict=False)]
SYSTEM = {"role": "system", "content": "\n\n".join(["Answer from the texts.", *DOCUMENTS])}
QUESTIONS = [f"Number {n}: and why was it so?" for n in range(5)]
MAX_TOKENS = 6
# The tiny model's likeliest answers are not tokenised as they were made; these mostly are.
SAMPLED = {"max_tokens": MAX_TOKENS, "temperature": 3.0, "seed": 0}
METHODS = ("auto", "prefix", "full")
# Tokens at the border of two turns that a template or a tokenizer may write in another way.
BORDER = 4


def by_engine(engine, method):
    def ask(messages):
        made = engine.generate(messages, method=method, max_tokens=MAX_TOKENS)
        return made.text, made.report.cached_tokens

    yield ask


def by_langchain(engine, method):
    llm = ChatCachedRAG(engine=engine, method=method, max_tokens=MAX_TOKENS)

    def ask(messages):
        made = llm.invoke([(m["role"], m["content"]) for m in messages])
        return made.content, made.usage_metadata["input_token_details"]["cache_read"]

    yield ask


def by_llama_index(engine, method):
    llm = CachedRAGLLM(engine=engine, method=method, max_tokens=MAX_TOKENS)

    def ask(messages):
        made = llm.chat([ChatMessage(role=m["role"], content=m["content"]) for m in messages])
        return made.message.content, made.raw["cached_rag"]["cached_tokens"]

    yield ask


def by_server(engine, method):
    options = {"model": NAME, "temperature": 0, "max_tokens": MAX_TOKENS}
    with (
        serving(engine) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):

        def ask(messages):
            made = client.chat.completions.create(
                messages=messages, **options, extra_body={"method": method}
            )
            return made.choices[0].message.content, made.usage.prompt_tokens_details.cached_tokens

        yield ask


WAYS = {
    "engine": by_engine,
    "langchain": by_langchain,
    "llama_index": by_llama_index,
    "server": by_server,
}


def opened(**settings):
    engine = Engine(tiny_model("llama"), StoreConfig(**settings))
    engine.encode(DOCUMENTS, context=None)
    return engine


def tokens_of(engine, messages):
    return engine.tokenization.tokenize(engine.tokenization.template.render(messages)).ids


def chat(engine, ask):
    """Ask the questions in turn; yields each turn's prompt as tokens, and what `ask` said of it."""
    messages = [SYSTEM]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        text, said = ask(messages)
        yield tokens_of(engine, messages), said
        messages.append({"role": "assistant", "content": text})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_a_turn_costs_what_it_added(method, way):
    with opened() as engine:
        for ask in WAYS[way](engine, method):
            (before, _), *later = chat(engine, ask)
    assert len(later) == 4
    for ids, cached in later:
        assert len(ids) - cached <= len(ids) - len(before) + BORDER < len(ids) / 2
        before = ids


@pytest.mark.parametrize("method", METHODS)
def test_a_turn_takes_the_last_one_with_its_answer_as_it_was_left(method):
    with opened() as engine:
        known, before, told = np.empty(0, dtype=np.int64), 0, 0

        def ask(messages):
            made = engine.generate(messages, **SAMPLED, method=method)
            return made.text, made

        for turn, (ids, made) in enumerate(chat(engine, ask)):
            report, same = made.report, common(np.asarray(ids), known)
            assert report.kept_tokens == same
            assert (report.kept_repaired_tokens > 0) == (turn > 0 and method == "auto")
            if turn:
                assert report.recomputed_tokens == 0
                assert report.cached_tokens == same
                assert report.charged_recompute == pytest.approx(1 - same / len(ids))
                told += same - before
            before, known = len(ids), np.asarray([*ids, *made.token_ids[:-1]])
        assert told > 2 * MAX_TOKENS  # answers are told again as they were made


def test_what_was_repaired_serves_its_own_conversation_only():
    asked = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    with opened(sequence_bytes=0) as engine:
        alone = [engine.generate(one, max_tokens=MAX_TOKENS) for one in asked]
    with opened(settle=False) as engine:  # else the third prompt's beginning is exact
        found = [engine.generate(one, max_tokens=MAX_TOKENS) for one in asked]
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        repaired = [one.report.recomputed_tokens for one in found]
        assert repaired == [one.report.recomputed_tokens for one in alone]
        assert not any(one.report.kept_repaired_tokens for one in found)
        again = engine.generate(asked[0], max_tokens=MAX_TOKENS)  # the same prompt goes on with it
        assert again.token_ids == alone[0].token_ids
        assert again.report.kept_tokens == again.report.prompt_tokens - 1
    with opened(keeps_repaired=True) as engine:
        found = [engine.generate(one, max_tokens=MAX_TOKENS) for one in asked]
        assert all(one.report.kept_repaired_tokens for one in found[1:])


@pytest.mark.parametrize("method", ["prefix", "full"])
def test_lossless_methods_take_nothing_that_was_repaired(method):
    with opened(sequence_bytes=0) as engine:
        ids = tokens_of(engine, [SYSTEM, {"role": "user", "content": QUESTIONS[0]}])
        plain = plain_logits(engine.model, ids)[-1]
    with opened() as engine:
        messages = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
        repaired = engine.prefill(messages, max_tokens=1)
        assert not torch.allclose(repaired.logits[0], plain, atol=1e-3)  # control
        repaired.release()
        exact = engine.prefill(messages, method=method, max_tokens=1)
        assert torch.allclose(exact.logits[0], plain, atol=1e-4)
        assert exact.report.kept_repaired_tokens == 0
        exact.release()
        engine.generate(messages, method=method, max_tokens=1)
        # Of the two that are as long, `auto` takes the exact one.
        best = engine.prefill(messages, max_tokens=1)
        assert torch.allclose(best.logits[0], plain, atol=1e-4)
        assert best.report.kept_tokens == len(ids) - 1
        best.release()


def test_exact_kv_that_the_library_has_is_not_replaced_by_repaired_kv_as_long():
    begins, more = f"Well. {DOCUMENTS[0]}", " And there was no more to it than that."
    with opened(keeps_repaired=True) as engine:
        first = engine.prefill(f"{begins} Why?", max_tokens=1)
        first.release()
        assert first.report.recomputed_tokens > 0
        follower = engine.prefill(f"{begins} Who?", max_tokens=1)  # control: it is taken
        follower.release()
        assert follower.report.kept_repaired_tokens > 0
        engine.encode([begins + more], prefix="", context=None)
        again = engine.prefill(f"{begins}{more} Why?", max_tokens=1)
        plain = plain_logits(engine.model, again.tokens.ids)[-1]
        assert torch.allclose(again.logits[0], plain, atol=1e-4)
        assert again.report.kept_repaired_tokens == 0
        again.release()


def test_chunks_behind_a_kept_beginning_are_used_and_repaired():
    with opened() as engine:
        messages = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
        first = engine.generate(messages, max_tokens=MAX_TOKENS)
        more = "Tin cans keep soup for years, as sailors found when the salted meat was gone."
        engine.encode([more], context=None)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": f"{more}\n\n{QUESTIONS[1]}"},
        ]
        second = engine.generate(messages, max_tokens=MAX_TOKENS).report
        assert second.kept_tokens >= first.report.prompt_tokens
        assert second.cached_tokens > second.kept_tokens + second.recomputed_tokens > 0
        assert 0 < second.recomputed_tokens < len(engine.library.table.get(more).token_ids)


def test_without_repaired_kv_only_what_is_exact_is_kept():
    with opened(keeps_repaired=False) as engine:

        def ask(messages):
            made = engine.generate(messages, max_tokens=MAX_TOKENS, method="anchorflow")
            return made.text, made.report

        reports = [report for _, report in chat(engine, ask)]
    assert not any(report.kept_repaired_tokens for report in reports)
    assert all(report.recomputed_tokens == reports[0].recomputed_tokens for report in reports)
    for bad in ("conversations", None):
        with pytest.raises(ConfigError, match="keeps_repaired"):
            StoreConfig(keeps_repaired=bad)


def test_the_default_bound_is_a_share_of_memory():
    for settings, bound in (
        ({}, 512 << 20),
        ({"memory_bytes": 1 << 20}, 1 << 18),
        ({"sequence_bytes": 0}, 0),
        ({"sequence_bytes": 5000}, 5000),
    ):
        with Engine(tiny_model("llama"), StoreConfig(**settings)) as engine:
            assert 0 <= engine.sequences.max_bytes <= bound
            assert (engine.sequences.max_bytes > 0) == (bound > 0)


def test_an_answer_that_is_kept_is_what_its_method_computed():
    """Twin: the answer's own buffer, gone on with by the model."""
    messages = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
    with opened(sequence_bytes=0) as engine:
        first = engine.prefill(messages, max_tokens=300)
        config = GenerationConfig(**SAMPLED)
        answer = on_model_thread(lambda: answer_alone(engine.model, first, config))
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": QUESTIONS[1]},
        ]
        ids = tokens_of(engine, messages)
        same = common(np.asarray(ids), np.asarray([*first.tokens.ids, *answer.token_ids[:-1]]))
        assert same > len(first.tokens)  # some of the answer is told again as it was made
        slots = torch.arange(same, len(ids))
        with torch.inference_mode():
            twin = engine.model.prefill(first.buffer, torch.tensor([ids]), slots).logits.clone()
        first.release()
    with opened() as engine:
        assert engine.generate(messages[:2], **SAMPLED).text == answer.text
        second = engine.prefill(messages, max_tokens=1)
        assert second.report.kept_tokens == same
        assert torch.allclose(second.logits, twin, atol=1e-4)
        second.release()


@pytest.mark.parametrize("kind", [ChatCachedRAG, StringLLM, CachedRAGLLM])
def test_integrations_keep_prompts_within_a_bound_that_can_be_set(kind, monkeypatch):
    name = "cached_rag.engine.engine.load_backend"
    monkeypatch.setattr(name, lambda *_, **__: tiny_model("llama"))
    for settings, bound in (({}, None), ({"sequence_bytes": 5000}, 5000)):
        with kind(model="tiny-kept", **settings).loaded_engine() as engine:
            assert engine.sequences.max_bytes > 0
            assert bound in (None, engine.sequences.max_bytes)
    with pytest.raises(ValueError, match="sequence_bytes"):
        kind(model="tiny-kept", sequence_bytes=-1)


@pytest.mark.parametrize("options", [(), ("--keeps-repaired", "false")])
def test_the_server_keeps_conversations_and_repaired_ones_unless_told(
    options, model_folder, monkeypatch
):
    kept = []

    def noted(server, sockets):
        engine = server.config.app.state.service.engine
        kept.append((engine.sequences.max_bytes, engine.sequences.keeps_repaired))

    monkeypatch.setattr("cached_rag.server.run.Server.run", noted)
    where = ["--model", model_folder, "--port", "0", "--dtype", "float32"]
    result = CliRunner().invoke(app, ["serve", *where, *options])
    assert result.exit_code == 0, result.output
    assert kept == [(1 << 30, False if options else "conversation")]


def test_a_prompt_that_is_too_long_to_be_kept_is_said_once(caplog):
    for bound, count in ((1000, 1), (0, 0)):
        caplog.clear()
        with opened(sequence_bytes=bound) as engine:
            for question in QUESTIONS[:2]:
                asked = [SYSTEM, {"role": "user", "content": question}]
                assert engine.generate(asked, max_tokens=2).report.kept_tokens == 0
            assert engine.sequences.nbytes == 0
        assert sum("raise it" in text for text in caplog.messages) == count


@pytest.mark.parametrize("method", METHODS)
def test_documents_that_are_encoded_between_two_turns_change_nothing(method):
    with Engine(tiny_model("llama")) as engine:
        engine.register(DOCUMENTS)

        def ask(messages):
            made = engine.generate(messages, method=method, max_tokens=MAX_TOKENS)
            engine.write_back.drain()
            return made.text, made.report

        (before, first), *later = chat(engine, ask)
        assert first.cached_tokens == 0
        assert first.modules_missed == (0 if method == "full" else len(DOCUMENTS))
        for ids, report in later:
            assert report.modules_missed == 0
            assert report.recomputed_tokens == report.kept_repaired_tokens == 0
            assert len(ids) - report.cached_tokens <= len(ids) - len(before) + BORDER
            before = ids
