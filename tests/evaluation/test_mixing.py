"""Mixtures of exact and stale KV: their ends are full prefill and reuse."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import CHUNKS
from typer.testing import CliRunner

from cached_rag import ConfigError
from cached_rag.backends.transformers.attention.scattered import Rows
from cached_rag.backends.transformers.prefill import choose_rows
from cached_rag.config import GenerationConfig
from cached_rag.evaluation.data import Example
from cached_rag.evaluation.encodings import EncodedEngines
from cached_rag.evaluation.measure import figures, read
from cached_rag.evaluation.prompts import messages
from cached_rag.methods import Epic, InfoFlow
from docs.experiments.__main__ import app
from docs.experiments.mixing import _Mixed, bench_mixing
from docs.experiments.probes import Watching, over_anchors

EXAMPLES = [
    Example("1", "What turned green?", ("copper",), tuple(CHUNKS)),
    Example("2", "Who lit the lamp?", ("the keeper of the lamp",), tuple(reversed(CHUNKS))),
    Example("3", "Nobody knows?", (), tuple(CHUNKS)),
]


def test_all_exact_is_full_prefill_and_nothing_exact_is_reuse(engine):
    rows = {row.exact: row for row in bench_mixing(engine, EXAMPLES)}
    assert {row.n for row in rows.values()} == {2}  # the third has no answer
    whole, nothing = rows["all"], rows["nothing"]
    assert (whole.share, nothing.share) == (1, 0)
    for figure in (whole.kl, whole.kl_along, whole.nll_diff, whole.attention):
        assert figure == pytest.approx(0, abs=1e-5)
    assert nothing.attention > rows["40 %, by the question"].attention > 1e-4
    encodings, twins = EncodedEngines(engine.model, EXAMPLES, long=False), []
    for example in EXAMPLES[:2]:
        prompt, plain = messages(example.chunks, example.question, long=False), []
        for encoding, method in (("primer", "reuse"), ("", "full")):
            config = GenerationConfig(method=method, max_tokens=16)
            own = encodings.engine(encoding, example.chunks)
            plain.append(read(own, prompt, config, example.reference, generates=False))
        twins.append(figures(*plain, example.answers))
    for name in ("kl", "kl_along"):
        mean = sum(twin[name] for twin in twins) / 2
        assert getattr(nothing, name) == pytest.approx(mean, rel=1e-3)
        assert mean > 1e-5  # control


def test_shares_are_those_of_what_is_exact(engine):
    rows = {row.exact: row for row in bench_mixing(engine, EXAMPLES)}
    assert rows["keys"].share == rows["values"].share == 0.5
    assert rows["first half of the layers"].share == 0.5
    for way in (
        *("by the question", "by the question over anchors", "by question and answer"),
        *("by the question over anchors, in one layer", "by question and draft", "by chance"),
        "by the norm of deep hidden states",
    ):
        shares = [rows[f"{percent} %, {way}"].share for percent in (5, 15, 40)]
        assert shares == sorted(shares)
        assert shares[2] == pytest.approx(0.4, abs=0.2)
    one, two = (rows[f"{count} whole, by the question"].share for count in (1, 2))
    assert 0 < one < two <= 1


def test_what_is_told_after_the_question_chooses_too(engine):
    encodings = EncodedEngines(engine.model, EXAMPLES, long=False)
    mixed = _Mixed(engine.model, encodings.engine("primer", EXAMPLES[0].chunks), EXAMPLES[0])
    asked, count = InfoFlow(0.4), len(mixed.prompt)
    alone = mixed._chosen(asked)
    assert torch.equal(alone, mixed._chosen(asked, torch.empty(0, dtype=torch.long)))
    told = torch.tensor([mixed.prompt[count // 4]] * 8)
    assert not torch.equal(alone, mixed._chosen(asked, told))


@pytest.mark.parametrize("anchors", [2, 10_000])
def test_a_question_over_anchors_is_computed_of_their_values_alone(engine, anchors):
    encodings = EncodedEngines(engine.model, EXAMPLES, long=False)
    mixed = _Mixed(engine.model, encodings.engine("primer", EXAMPLES[0].chunks), EXAMPLES[0])
    layout, ids = mixed.layout, mixed._ids[:, : len(mixed.prompt)]
    hidden = layout.reused & ~Epic(anchors).first_rows(layout)
    scores = []
    for rows_type in (over_anchors(layout, anchors), Rows):
        for value in (0.0, 7.0):
            buffer, watching = mixed._buffer(), Watching(0.5)
            if value:
                buffer.values[..., hidden.nonzero()[:, 0], :] = value
            decoder = engine.model.decoder
            choose_rows(decoder, buffer, ids, layout, watching, rows_type=rows_type)
            scores.append(watching.seen[0])
    over, over_changed, whole, whole_changed = scores
    assert torch.equal(over, over_changed)  # of the others' values, nothing
    if anchors > len(mixed.prompt):
        torch.testing.assert_close(over, whole, rtol=1e-4, atol=1e-6)
    else:
        assert not torch.allclose(over, whole, rtol=1e-2)
        assert not torch.allclose(whole, whole_changed, rtol=1e-2)


def test_the_farthest_are_those_whose_values_differ_most(engine):
    encodings = EncodedEngines(engine.model, EXAMPLES, long=False)
    mixed = _Mixed(engine.model, encodings.engine("primer", EXAMPLES[0].chunks), EXAMPLES[0])
    stale, full = mixed._buffer().values[1, 0], mixed._full.values[1, 0]
    reused = mixed.layout.reused.nonzero()[:, 0].tolist()
    apart = {at: float((stale[:, at] - full[:, at]).norm()) for at in reused}
    found = mixed._farthest(0.25, 1).nonzero()[:, 0].tolist()
    assert len(found) == round(0.25 * len(reused))
    assert min(apart[at] for at in found) >= max(apart[at] for at in reused if at not in found)


def test_the_highest_norms_are_those_of_the_models_own_hidden_states(engine):
    encodings = EncodedEngines(engine.model, EXAMPLES, long=False)
    mixed = _Mixed(engine.model, encodings.engine("primer", EXAMPLES[0].chunks), EXAMPLES[0])
    model, states = engine.model.decoder.model, []
    hook = model.model.layers[-1].register_forward_pre_hook(
        lambda _, given: states.append(given[0])
    )
    try:
        with torch.inference_mode():
            model(input_ids=mixed._ids, use_cache=False)
    finally:
        hook.remove()
    norms = states[0][0].norm(dim=-1)
    torch.testing.assert_close(mixed._norms[0], norms, rtol=1e-4, atol=1e-4)
    reused = mixed.layout.reused
    found = mixed._highest(mixed._norms[0][: len(mixed.prompt)], 0.25)
    at = [slot for slot in range(len(mixed.prompt)) if reused[slot]]
    assert int(found.sum()) == round(0.25 * len(at))
    taken, left = [s for s in at if found[s]], [s for s in at if not found[s]]
    assert min(norms[taken]) >= max(norms[left]) - 1e-4


def test_a_draft_is_what_reuse_answers(engine):
    example = EXAMPLES[0]
    encodings = EncodedEngines(engine.model, EXAMPLES, long=False)
    own = encodings.engine("primer", example.chunks)
    prompt = messages(example.chunks, example.question, long=False)
    config = GenerationConfig(method="reuse", max_tokens=4, ignore_eos=True)
    answer = list(own.generate(prompt, config).token_ids)
    assert _Mixed(engine.model, own, example)._draft(4).tolist() == answer


def test_what_cannot_be_mixed_is_refused(engine):
    with pytest.raises(ConfigError, match="has an answer"):
        bench_mixing(engine, EXAMPLES[2:])


def test_the_command_prints_a_row_a_mixture(model_folder, tmp_path):
    data = tmp_path / "set.jsonl"
    row = {"id": 1, "question": "Who?", "answers": ["the keeper"]}
    data.write_text(json.dumps(row | {"chunks": [{"text": text} for text in CHUNKS]}))
    args = ["mixing", str(data), "--model", model_folder, "--dtype", "float32", "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["machine"]["commit"]
    assert len(found["rows"]) == 39
