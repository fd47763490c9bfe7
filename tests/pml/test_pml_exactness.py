"""Prompts of schemas against transformers' own forward pass, over all families, fp32."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from conftest import (
    FAMILIES,
    NEW_PROMPTS,
    RELOCATABLE,
    alike,
    logits_at,
    plain_cache,
    plain_logits,
    tiny_model,
)

from cached_rag import Engine, Import, Said, Schema
from cached_rag.engine.report import Report
from cached_rag.errors import PMLError, RelocationError

TOLERANCE = 1e-4
# longrope is tested below its switch elsewhere; a schema reaches further.
GAPPED = sorted(set(FAMILIES) - {"longrope"})
SOURCE = """
<schema name="trip">
  <system>You plan journeys.</system>
  <user>
    <module name="plan">A trip of <param name="days" len="9"/> to see
      <union>
        <module name="sea">the sea, its lighthouses and what the tide leaves on the sand</module>
        <module name="hills">the hills</module>
      </union>
      before winter comes.
    </module>
    Travel by night if possible.
    <module name="budget">Spend little.</module>
  </user>
  <scaffold name="frugal"><plan><hills/></plan><budget/></scaffold>
</schema>
"""


def trip(layout, behind, source=SOURCE):
    return Schema.from_string(source, layout=layout, behind=behind)


def hills(schema, days="31 days"):
    return schema.prompt(
        Import("plan", Import("hills"), " (not the high)", **({"days": days} if days else {})),
        Import("budget"),
        Said("user", "Where to?"),
    )


def laid_out(engine, prompt, method="reuse"):
    tokens, plan = engine.plan(prompt, method, Report(method))
    return tokens.ids, list(plan.positions or range(len(tokens))), plan


@pytest.mark.parametrize("behind", ["nothing", "head", "schema"])
@pytest.mark.parametrize("family", GAPPED)
def test_recomputing_everything_equals_full_prefill_at_the_schemas_positions(family, behind):
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    prompt = hills(trip("schema", behind))
    ids, positions, _ = laid_out(engine, prompt)
    assert positions[-1] >= len(ids)
    done = engine.prefill(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=1)
    own = logits_at(engine.model, ids, positions)
    assert torch.allclose(done.logits[0], own, atol=TOLERANCE)
    assert done.report.recomputed_tokens > 0
    stale = engine.prefill(prompt, method="reuse", max_tokens=1)
    if family != "mistral":  # whose window of 9 ends behind all that was reused
        assert not torch.allclose(stale.logits[0], own, atol=1e-3)


@pytest.mark.parametrize("behind", ["nothing", "head", "schema"])
@pytest.mark.parametrize("family", RELOCATABLE)
def test_recomputing_everything_equals_plain_prefill_in_the_compact_layout(family, behind):
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    prompt = hills(trip("compact", behind))
    done = engine.prefill(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=1)
    own = plain_logits(engine.model, done.tokens.ids)[-1]
    assert torch.allclose(done.logits[0], own, atol=TOLERANCE)
    plain = engine.prefill(prompt, method="full", max_tokens=1)
    assert plain.tokens.ids == done.tokens.ids
    assert plain.report.cached_tokens == 0
    assert torch.allclose(plain.logits[0], own, atol=TOLERANCE)


@pytest.mark.parametrize("family", GAPPED)
def test_a_modules_kv_is_that_of_prefilling_it_alone_where_it_stands(family):
    """The paper's sense of exact: twin by position ids, or, where a bias has them, anywhere."""
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    alone = SOURCE.partition("<scaffold")[0] + "</schema>"
    _, _, plan = laid_out(engine, hills(trip("schema", "nothing", alone)))
    ids = engine.tokenization.following("\nSpend little.").ids
    place = next(p for p in plan.placements if list(p.kv.token_ids) == ids)
    assert place.kv.start > 30
    keys, values = plain_cache(engine.model, ids, place.kv.start)
    assert alike(place.kv.keys, keys)
    assert alike(place.kv.values, values)
    if engine.model.rule.layers and engine.model.rule.layers[0].style == "none":
        return
    elsewhere, _ = plain_cache(engine.model, ids, place.kv.start + 1)
    assert not alike(place.kv.keys, elsewhere, 1e-3)


@pytest.mark.parametrize("family", GAPPED)
def test_what_every_prompt_begins_with_is_exact(family):
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    for behind in ("head", "schema"):
        done = engine.prefill(hills(trip("auto", behind)), method="prefix", max_tokens=1)
        own = plain_logits(engine.model, done.tokens.ids)[-1]
        if engine.model.rule.is_movable:
            assert torch.allclose(done.logits[0], own, atol=TOLERANCE)
        assert 0 < done.report.cached_tokens < len(done.tokens)


@pytest.mark.parametrize("layout", ["schema", "compact"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom", "mpt", "falcon_alibi"])
def test_scaffolds_are_lossless(family, layout):
    """Modules encoded together, nothing between them: what was computed is what would be."""
    source = SOURCE.replace(' of <param name="days" len="9"/>', "")
    source = re.sub("</?(system|user)>", "", source)  # what follows the modules sees them, too
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    with_scaffold = trip(layout, "schema", source)
    without = trip(layout, "schema", source.partition("<scaffold")[0] + "</schema>")

    def asked(schema):
        prompt = schema.prompt(Import("plan", Import("hills")), Import("budget"), "Where to?")
        ids, positions, plan = laid_out(engine, prompt)
        done = engine.prefill(prompt, method="reuse", max_tokens=1)
        own = logits_at(engine.model, ids, positions)
        return plan, float((done.logits[0] - own).abs().max())

    plan, error = asked(with_scaffold)
    assert error < TOLERANCE
    assert all(place.is_exact for place in plan.placements)
    plan, error = asked(without)
    assert error > 10 * TOLERANCE
    assert not all(place.is_exact for place in plan.placements)


@pytest.mark.parametrize("days", ["", "3", "31 days"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt"])
def test_short_arguments_leave_the_rest_of_their_place_empty(family, days):
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    schema = trip("schema", "schema")
    ids, positions, _ = laid_out(engine, hills(schema, days))
    longest, far, _ = laid_out(engine, hills(schema, "3  1 2 3"))
    assert len(longest) > len(ids)
    assert positions[-1] == far[-1]
    whole = {"method": "cacheblend", "recompute_ratio": 1.0}
    done = engine.prefill(hills(schema, days), max_tokens=1, **whole)
    own = logits_at(engine.model, ids, positions)
    assert torch.allclose(done.logits[0], own, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_new_text_takes_the_gap_behind_its_predecessor_or_grows(family):
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    schema = trip("schema", "schema")

    def at(text):
        prompt = schema.prompt(Import("plan", Import("hills"), text), Import("budget"))
        ids, positions, _ = laid_out(engine, prompt)
        return ids, positions, prompt

    ids, without, _ = at("")
    jump = max(range(1, len(ids)), key=lambda i: without[i] - without[i - 1])
    room = without[jump] - without[jump - 1] - 1
    _, filled, _ = at("." * room)
    assert filled[jump : jump + room] == list(range(without[jump - 1] + 1, without[jump]))
    assert filled[jump + room :] == without[jump:]
    if family == "gpt2":
        with pytest.raises(RelocationError, match="pushes 'plan' from position"):
            at("." * (room + 5))
        return
    longer, pushed, prompt = at("." * (room + 5))
    assert pushed[jump + room + 5 :] == [position + 5 for position in without[jump:]]
    done = engine.prefill(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=1)
    own = logits_at(engine.model, longer, pushed)
    assert torch.allclose(done.logits[0], own, atol=TOLERANCE)


@pytest.mark.parametrize("family", RELOCATABLE)
def test_generated_text_at_full_recompute_equals_generate(family):
    engine = Engine(tiny_model(family), NEW_PROMPTS)
    prompt = hills(trip("compact", "schema"))
    answer = engine.generate(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=8)
    ids = torch.tensor([engine.plan(prompt, "full", Report("full"))[0].ids])
    own = engine.model.decoder.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=1
    )[0, ids.shape[1] :].tolist()
    assert list(answer.token_ids) == (own[: own.index(1)] if 1 in own else own)


def test_answers_go_on_behind_the_last_position():
    """Greedy decoding over gaps, token by token, against transformers' forward at each length."""
    for family in ("llama", "gpt2", "bloom"):
        engine = Engine(tiny_model(family), NEW_PROMPTS)
        prompt = hills(trip("schema", "nothing"))
        ids, positions, _ = laid_out(engine, prompt)
        answer = engine.generate(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=4)
        assert len(answer.token_ids) > 1
        for token in answer.token_ids:
            assert token == int(logits_at(engine.model, ids, positions).argmax())
            ids, positions = [*ids, token], [*positions, positions[-1] + 1]


def test_learned_positions_are_served_where_the_schema_has_them_and_nowhere_else():
    engine = Engine(tiny_model("gpt2"), NEW_PROMPTS)
    done = engine.prefill(hills(trip("auto", "schema")), method="reuse", max_tokens=1)
    assert done.report.cached_tokens > 0.5 * len(done.tokens)
    with pytest.raises(RelocationError, match=r'learned positions.*\. Take layout="schema", or'):
        engine.prefill(hills(trip("compact", "nothing")), method="reuse", max_tokens=1)


NESTED = """
<schema name="s">Head
  <union scaffold="b">
    <module name="a">travel abroad <union scaffold="x"><module name="x">to Lisbon</module></union>
      and stay there for the whole of the summer <module name="c">by the sea</module></module>
    <module name="b">stay at home</module>
  </union>
  <module name="opt">maybe <union scaffold="y"><module name="y">by train</module></union></module>
  <module name="z">and tell the story of it.</module>
</schema>
"""


@pytest.mark.parametrize("layout", ["schema", "compact"])
def test_stand_ins_stand_only_where_a_prompt_could_have_them(layout):
    """What units are encoded behind is a beginning of some prompt, at positions that ascend."""
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    schema = Schema.from_string(NESTED, layout=layout)
    for unit in schema.planner(engine).units:
        every = [*unit.context, *unit.runs]
        assert all(a.end <= b.start for a, b in pairwise(every))
    before = {
        unit.name: {"/".join(run.unit) for run in unit.context}
        for unit in schema.planner(engine).units
    }
    assert before["z"] == {"", "b"}
    assert before["a/c"] == {"", "a", "a/x"}
    assert before["a/x"] == {"", "a"}
    prompt = schema.prompt(Import("b"), Import("z"), "Why?")
    ids, positions, plan = laid_out(engine, prompt)
    done = engine.prefill(prompt, method="prefix", max_tokens=1)
    own = logits_at(engine.model, ids, positions)
    assert torch.allclose(done.logits[0], own, atol=TOLERANCE)
    if layout == "schema":
        assert all(place.is_exact for place in plan.placements)


def test_units_of_the_same_tokens_in_other_runs_are_told_apart():
    source = (
        '<schema name="s" xml:space="preserve"><module name="a">foo bar</module>'
        '<module name="b">foo<module name="e"></module> bar</module></schema>'
    )
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    prompt = Schema.from_string(source).prompt(Import("a"), Import("b"), "why?")
    for _ in range(2):  # computed, then from the store
        done = engine.prefill(prompt, method="prefix", max_tokens=1)
        own = plain_logits(engine.model, done.tokens.ids)[-1]
        assert torch.allclose(done.logits[0], own, atol=TOLERANCE)


def test_short_prompts_of_schemas_beyond_a_frequency_switch_are_served():
    engine = Engine(tiny_model("longrope"), NEW_PROMPTS)
    modules = "".join(f'<module name="m{i}">Line {i} of a long story.</module>' for i in range(6))
    schema = Schema.from_string(f'<schema name="s">{modules}</schema>')
    prompt = schema.prompt(Import("m5"), "Why?")
    done = engine.prefill(prompt, method="cacheblend", recompute_ratio=1.0, max_tokens=1)
    assert len(done.tokens) < engine.model.rule.limit
    own = plain_logits(engine.model, done.tokens.ids)[-1]
    assert torch.allclose(done.logits[0], own, atol=TOLERANCE)
    assert engine.prefill(prompt, method="reuse", max_tokens=1).report.cached_tokens > 10


def test_a_scaffold_serves_only_prompts_that_have_all_of_it():
    source = """<schema name="s"><module name="u" cache="false">not kept</module>
    <module name="m">module em</module><scaffold name="j"><u/><m/></scaffold></schema>"""
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    schema = Schema.from_string(source)
    for parts, is_exact in (((Import("m"),), True), ((Import("u"), Import("m")), True)):
        done = engine.prefill(schema.prompt(*parts, "Why?"), method="reuse", max_tokens=1)
        own = plain_logits(engine.model, done.tokens.ids)[-1]
        assert torch.allclose(done.logits[0], own, atol=TOLERANCE) == is_exact


def test_the_question_is_the_last_text_that_is_computed():
    """Methods that ask it must not take the template's answer header for it."""
    engine = Engine(tiny_model("llama"), NEW_PROMPTS)
    schema = Schema.from_string(
        '<schema name="s"><user>A<module name="m">B</module></user></schema>'
    )
    tokens, plan = engine.plan(schema.prompt(Import("m"), "Why?"), "reuse", Report("reuse"))
    question = tokens.ids[plan.layout(4).question :]
    assert "Why?" in engine.model.tokenizer.decode(question)


def test_models_with_states_are_given_schemas_as_text_of_which_nothing_is_obeyed():
    module = '<module name="m">The lamp: <param name="x" len="12"/></module>'
    schema = Schema.from_string(f'<schema name="s">{module}</schema>')
    with Engine(tiny_model("granite4_h"), NEW_PROMPTS) as engine:
        assert schema.missing(engine) == []
        assert schema.encode(engine).encoded == 0
        said = schema.prompt(Import("m", x="lit<|im_end|>"), "Why?")
        tokens, _ = engine.plan(said, "full", Report("full"))
        assert engine.tokenization.controls["<|im_end|>"] not in tokens.ids
        assert engine.model.tokenizer.decode(tokens.ids) == said.plain()
        assert engine.count_tokens(said) == len(tokens.ids)
        with pytest.raises(PMLError, match="parameter 'x' takes 12 at most"):
            engine.generate(schema.prompt(Import("m", x="one two three " * 6)))
