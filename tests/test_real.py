"""The promises on the real SmolLM2-135M, fp32, with real documents."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import NEW_PROMPTS, plain_logits, smollm2

from cached_rag import CachedRAG, Engine
from cached_rag.cli.bench import CORPUS
from cached_rag.kv.buffer import KVBuffer
from cached_rag.rag.chunks import Embedder
from cached_rag.rag.finding import look_at
from cached_rag.rag.readers import load_document

pytestmark = pytest.mark.real


@functools.cache
def chunks():
    return [load_document(file).text[:450].strip() for file in look_at(CORPUS).files[:4]]


def messages(*texts):
    content = "\n\n".join([*texts, "Question: Which Python version is named?"])
    return [
        {"role": "system", "content": "Answer from the documents."},
        {"role": "user", "content": content},
    ]


@pytest.fixture(scope="module")
def engine():
    made = Engine(smollm2(), NEW_PROMPTS)
    made.encode(chunks(), prefix=made.head(messages(chunks()[0]), chunks()[0]), context=None)
    return made


def test_full_ratio_equals_full_prefill_and_no_repair_does_not(engine):
    prompt = messages(*chunks()[::-1])
    repaired = engine.prefill(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=4)
    assert repaired.report.modules_hit == 4
    plain = plain_logits(engine.model, repaired.tokens.ids)[-1]
    assert torch.allclose(repaired.logits[0], plain, atol=1e-4)
    repaired.release()
    stale = engine.prefill(prompt, method="reuse", max_tokens=4)
    assert not torch.allclose(stale.logits[0], plain, atol=1e-2)


def test_generated_text_equals_generate(engine):
    prompt = messages(*chunks()[:3])
    answer = engine.generate(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=12)
    tokenizer = engine.model.tokenizer
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        out = engine.model.decoder.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
    assert answer.text == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_prefix_and_first_module_are_lossless(engine):
    done = engine.prefill(messages(chunks()[2]), method="prefix", max_tokens=4)
    plain = plain_logits(engine.model, done.tokens.ids)[-1]
    assert done.report.cached_tokens > 0.8 * len(done.tokens)
    assert torch.allclose(done.logits[0], plain, atol=1e-4)


def test_relocated_keys_equal_keys_computed_there(engine):
    model, delta = engine.model, 3000
    tokens = torch.tensor([engine.tokenization.literal(chunks()[0]).ids[:64]])
    near, far = (KVBuffer.like(model.shapes, 64) for _ in range(2))
    far.lay_out(range(delta, delta + 64))
    model.prefill(near, tokens)
    model.prefill(far, tokens)
    moved = model.rule.relocate(near.keys[:, 0], delta, torch.empty_like(near.keys[:, 0]))
    # transformers takes the far angles in fp32, which costs digits at position 3000
    assert torch.allclose(moved, far.keys[:, 0], atol=2e-2)
    assert torch.allclose(near.values, far.values, atol=2e-3)
    wrong = model.rule.relocate(near.keys[:, 0], delta + 1, torch.empty_like(moved))
    assert not torch.allclose(wrong, far.keys[:, 0], atol=1.0)


def test_documents_are_asked_in_the_fastest_dtype(tmp_path):
    corpus = tmp_path / "docs"
    corpus.mkdir()
    for file in look_at(CORPUS).files:
        if file.stem in ("pep-3129", "pep-0553"):
            (corpus / file.name).write_bytes(file.read_bytes()[:4000])
    with CachedRAG.open(tmp_path / "index", "smollm2-135m") as rag:
        summary = rag.ingest(corpus, progress=False)
        assert summary.added == 2
        assert summary.encoded == summary.chunks > 5
        question = "Which function does breakpoint() call?"
        answer = rag.ask(question, max_tokens=24)
        assert "pep-0553" in answer.sources[0].source
        assert "breakpoint()" in answer.text
        assert answer.report.cached_tokens > 0.6 * answer.report.prompt_tokens
        exact = rag.ask(question, max_tokens=24, method="full")
        assert "sys.breakpointhook()" in exact.text


def test_embeddings_are_unit_vectors_and_near_means_alike():
    embedder = Embedder()
    a, b, c = embedder.embed(["copper turns green", "why is copper green?", "annual releases"])
    assert a.shape == (384,)
    assert abs(float(a @ a) - 1) < 1e-4
    assert a @ b > a @ c + 0.2
