"""What a GPU computes is what the CPU computes, whose exactness the other tests prove.

Skipped without a GPU. `CACHED_RAG_TEST_DEVICE=cpu` runs them here, against the same device.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, RELOCATABLE, TEMPLATE, ask, plain_logits, tiny_model

from cached_rag import Engine, StoreConfig, wrap_model
from cached_rag.backends.transformers.kernels import KV, Scoring, attend, attend_causal, reference
from cached_rag.spi import LanguageModel

DEVICE = os.environ.get("CACHED_RAG_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="this machine has no GPU"
)
PLAIN = ["full", "prefix", "reuse", "cacheblend"]
METHODS = [*PLAIN, "anchorflow", "auto", "fast"]
TOLERANCE = 1e-4


@functools.cache
def there(family: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The tiny model on the device; the other one stays where it is."""
    model = tiny_model.__wrapped__(family, dtype)
    tokenizer = model.tokenizer
    assert tokenizer.chat_template == TEMPLATE
    return wrap_model(model.decoder.model.to(DEVICE), tokenizer, name=family, revision=family)


def encoded(model: LanguageModel, settings: StoreConfig = NEW_PROMPTS) -> Engine:
    engine = Engine(model, settings)
    for context in (engine.primer, None):
        engine.encode([CHUNKS], prefix=engine.head(ask(CHUNKS[0]), CHUNKS[0]), context=context)
    return engine


def first_logits(engine: Engine, method: str, **options: object) -> torch.Tensor:
    request = engine.prefill(ask(*CHUNKS[::-1]), method=method, max_tokens=4, **options)
    logits = request.logits[0].float().cpu().clone()
    request.release()
    return logits


@pytest.mark.parametrize("family", RELOCATABLE)
def test_every_method_gives_the_cpus_logits(family):
    with encoded(tiny_model(family)) as here, encoded(there(family)) as far:
        assert far.model.shapes.device.type == DEVICE
        for method in METHODS if here.model.decoder.is_fast else PLAIN:
            want, found = (first_logits(engine, method) for engine in (here, far))
            torch.testing.assert_close(found, want, atol=TOLERANCE, rtol=1e-4, msg=method)
        ids = here.prefill(ask(*CHUNKS[::-1]), method="full").tokens.ids
        torch.testing.assert_close(
            first_logits(far, "cacheblend", recompute_ratio=1.0),
            plain_logits(here.model, ids)[-1],
            atol=TOLERANCE,
            rtol=1e-4,
        )


@pytest.mark.parametrize("family", ["llama", "gemma3", "mpt"])
def test_answers_are_the_cpus_alone_in_a_batch_and_from_disk(family, tmp_path):
    prompts = [ask(*CHUNKS[::-1]), ask(CHUNKS[1], CHUNKS[0]), ask(CHUNKS[2])]
    options = {"max_tokens": 16, "ignore_eos": True}
    with encoded(tiny_model(family)) as here:
        want = [here.generate(p, **options).token_ids for p in prompts]
    for pipelined in (False, True):
        settings = StoreConfig(path=str(tmp_path), sequence_bytes=0, pipelined=pipelined)
        for _ in range(2):  # the second one reads what the first one has written
            with encoded(there(family), settings) as far:
                assert [far.generate(p, **options).token_ids for p in prompts] == want
                together = far.generate_batch(prompts, **options)
                assert [answer.token_ids for answer in together] == want


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_near_fp32(method):
    with encoded(tiny_model("llama")) as here, encoded(there("llama", torch.bfloat16)) as far:
        want, found = (first_logits(engine, method) for engine in (here, far))
    assert torch.cosine_similarity(found, want, dim=0) > 0.98


def test_full_is_what_the_model_generates():
    model = there("qwen2")
    with Engine(model, NEW_PROMPTS) as engine:
        prompt = ask(*CHUNKS)
        ids = engine.prefill(prompt, method="full").tokens.ids
        found = engine.generate(prompt, method="full", max_tokens=24, ignore_eos=True).token_ids
    tokens = torch.tensor([ids], device=DEVICE)
    with torch.inference_mode():
        want = model.decoder.model.generate(
            tokens, max_new_tokens=24, do_sample=False, eos_token_id=None
        )
    assert list(found) == want[0, len(ids) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_give_output_and_lse_of_the_reference(dtype, head_dim):
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 1, 2, 700, head_dim, device=DEVICE).to(dtype)
    atol = 1e-4 if dtype == torch.float32 else 0.04
    scale = head_dim**-0.5
    for found, want in (
        (
            attend(query, KV(keys, values), Scoring(scale)),
            reference(query, KV(keys, values), scale),
        ),
        (
            attend_causal(query, KV(keys, values), Scoring(scale)),
            reference(query, KV(keys, values), scale, causal=True),
        ),
    ):
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one.float(), other.float(), atol=atol, rtol=0)
