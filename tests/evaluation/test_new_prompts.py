"""Benchmarks and evaluations ask new prompts: what an earlier one left would be a false figure."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, tiny_model

from cached_rag import ConfigError, Engine, GenerationConfig, Import, Report, Schema
from cached_rag.errors import EvaluationError
from cached_rag.evaluation.measure import read
from cached_rag.evaluation.run import EncodedEngines
from cached_rag.evaluation.timing import bench_ttft, configs_of
from cached_rag.library.encode import EncodeSummary
from docs.experiments.comparison import summarise_comparison
from docs.experiments.lengths import bench_prompt
from docs.experiments.schemas import evaluate_schema
from docs.experiments.traffic import bench_traffic


def test_nothing_is_measured_on_prompts_that_may_have_been_kept():
    prompt = [{"role": "user", "content": "Why?"}]
    schema = Schema.from_string('<schema name="s"><module name="a">Rome is old.</module></schema>')
    config = GenerationConfig(max_tokens=1)
    with Engine(tiny_model("llama")) as engine:
        for measure in (
            lambda: bench_ttft(engine, configs_of([]), modules=1, module_tokens=8),
            lambda: bench_traffic(engine, [((CHUNKS[0],), "Why?")]),
            lambda: bench_prompt(engine, schema.prompt(Import("a"))),
            lambda: read(engine, prompt, config, None),
            lambda: evaluate_schema(engine, schema, []),
        ):
            with pytest.raises(ConfigError, match="sequence_bytes=0"):
                measure()
    report = Report("auto", kept_tokens=1)
    with pytest.raises(EvaluationError, match="sequence_bytes=0"):
        summarise_comparison([], [report], [1.0], EncodeSummary(0, 0, (), 0, 0.0))
    row = EncodedEngines(tiny_model("llama"), long=False).engine("", ())
    assert row.sequences.max_bytes == 0
