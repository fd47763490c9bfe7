"""The paper's three applications with the real model; fp32, no times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import NEW_PROMPTS, smollm2
from cut_model import LAYERS, write_cut_gguf

from cached_rag import Engine, GenerationConfig, load_model
from cached_rag.evaluation.measure import figures, read
from cached_rag.kv.layers import KVShapes, LayerShape
from docs.experiments.applications import EXAMPLES
from docs.experiments.lengths import bench_prompt, footprint

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engine():
    return Engine(smollm2(), NEW_PROMPTS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_ids_are_those_of_plain_tokenisation(engine, name):
    for prompt in EXAMPLES[name]().prompts:
        pieces = prompt.schema.planner(engine).layout.pieces(prompt.bits)
        ids = [token for piece in pieces for token in piece.ids]
        rendered = engine.tokenization.template.render(prompt.plain())
        assert ids == engine.tokenization.tokenize(rendered).ids


def test_answers_at_full_recompute_are_full_prefills(engine):
    prompt = EXAMPLES["trip"]().prompts[0]
    whole = engine.generate(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=16)
    assert whole.text == engine.generate(prompt, method="full", max_tokens=16).text
    assert whole.report.recomputed_tokens > 0.5 * whole.report.prompt_tokens


def test_what_modules_are_encoded_behind_brings_them_nearer_to_full_prefill(engine):
    prompts, config = EXAMPLES["trip"]().prompts, GenerationConfig(max_tokens=1)
    distance = {}
    for behind in ("schema", "nothing"):
        found = 0.0
        for prompt in prompts:
            full = read(engine, prompt, config.replace(method="full"), None, generates=False)
            asked = replace(prompt, schema=replace(prompt.schema, behind=behind))
            reused = read(engine, asked, config.replace(method="reuse"), None, generates=False)
            found += figures(reused, full, ())["kl"] or 0.0
        distance[behind] = found / len(prompts)
    assert distance["schema"] < 0.15
    assert distance["schema"] < 0.7 * distance["nothing"]


def test_code_of_several_files_is_written_from_cache(tmp_path):
    """With few layers, as the prompt has 5000 tokens."""
    write_cut_gguf(tmp_path / "cut.gguf")
    model = load_model(str(tmp_path / "cut.gguf"), dtype="float32", device="cpu")
    engine = Engine(model, NEW_PROMPTS)
    example = EXAMPLES["code"]()
    (reused,) = bench_prompt(engine, example.prompts[0], ("reuse",), max_tokens=8, repeats=1)
    assert reused.cached_tokens > 0.97 * reused.prompt_tokens
    assert reused.text
    weight = footprint(engine)
    assert weight.memory == weight.formula == 2 * LAYERS * 3 * 64 * 4


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "mib"),
    [
        pytest.param(32, 32, 128, 0.50, id="Llama 7B"),
        pytest.param(40, 40, 128, 0.78, id="Llama 13B"),
        pytest.param(48, 64, 112, 1.31, id="MPT 30B"),
        pytest.param(80, 64, 128, 2.5, id="Llama 70B"),
    ],
)
def test_bytes_a_token_are_those_of_the_papers_table_2(layers, heads, head_dim, mib):
    """The paper counts all heads; models with grouped heads take as many times less."""
    layer = LayerShape(heads, head_dim, head_dim)
    shapes = KVShapes((layer,) * layers, torch.bfloat16, torch.device("cpu"))
    assert shapes.bytes_per_token / 2**20 == pytest.approx(mib, abs=0.006)
