"""Answers in a given form: valid whatever the model would say, and as quick or slow."""

from __future__ import annotations

import json
import math
import re
from ipaddress import IPv4Network
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import jsonschema
import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, smollm2, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, create_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cached_rag import ConfigError, Engine, GenerationConfig, Grammar
from cached_rag.engine.decoding import Sampler
from cached_rag.grammar import grammar as grammars
from cached_rag.grammar.grammar import Matcher

ByName = dict[Literal["a", "b"], int]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["keeper", "sailor"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PROMPT = f"{CHUNKS[0]}\n\nWho lit the lamp?"


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as made:
        yield made


def ask(engine, grammar, **options):
    return engine.generate(PROMPT, grammar=grammar, max_tokens=200, **options)


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_fits_its_schema_at_any_temperature(engine, seed):
    options = {"temperature": 1.5, "seed": seed} if seed else {}
    answer = ask(engine, Grammar.json(PERSON), **options)
    jsonschema.validate(json.loads(answer.text), PERSON)
    assert answer.finish_reason == "stop"


def test_a_random_model_left_to_itself_writes_no_json(engine):  # control
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(ask(engine, None).text)


def test_regular_expressions_and_choices(engine):
    dated = ask(engine, Grammar.regex(r"\d{4}-\d{2}/\d{2}")).text
    assert re.fullmatch(r"\d{4}-\d{2}/\d{2}", dated)
    assert ask(engine, Grammar.choice(["yes", 'no "maybe"'])).text in ("yes", 'no "maybe"')
    assert ask(engine, Grammar.json()).text.startswith("{")


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|im_start|>", "see <|im_end|> here"])
def test_what_spells_a_control_token_is_text(engine, text):
    answer = ask(engine, Grammar.json({"const": text}))
    assert (json.loads(answer.text), answer.finish_reason) == (text, "stop")
    assert ask(engine, Grammar.choice([text])).text == text
    named = Grammar(f"start: {json.dumps(text)} <|im_start|> /<.im_end.>/ // <|im_end|>")
    ids = ask(engine, named).token_ids
    assert engine.model.tokenizer.decode(ids).startswith(f"{text}<|im_start|><")
    assert ids.count(0) == 1  # that which the grammar names as a token, not as text


BYTES = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])


def unigram():
    pieces = [("<unk>", 0.0), ("<s>", 0.0), *((letter, -1.0) for letter in '<s>/ab"\u2581')]
    made = Tokenizer(models.Unigram([*dict(pieces).items()], unk_id=0, byte_fallback=False))
    made.decoder = BYTES
    return made


def wordlike():
    pieces = ["<unk>", "<s>", *"<s>/ab", "s>"]
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("s", ">"), ("<", "s>")]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    made.decoder = BYTES
    return made


def metaspaced():
    made = unigram()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


@pytest.mark.parametrize("make", [unigram, wordlike, metaspaced])
def test_control_tokens_of_other_kinds_of_tokenizers_are_not_read_in_text(make):
    backend = make()
    backend.add_special_tokens(["<unk>", "<s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>")
    size = backend.get_vocab_size()
    spelled = Matcher(Grammar.choice(["a<s>b"]), tokenizer, size, [1])
    ids = []
    while not spelled.is_complete and len(ids) < 20:
        ids.append(int(spelled.masked(torch.arange(size)[None].float()).argmax()))
        spelled.take(ids[-1])
    if ids[-1] == 1:  # the end
        ids.pop()
    assert 1 not in ids
    assert "".join(backend.id_to_token(one) for one in ids) == "a<s>b"


def test_spaces_of_sentencepiece_are_spaces():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=metaspaced(), eos_token="<s>")
    spelled = Matcher(Grammar.choice(["a b"]), tokenizer, len(tokenizer), [1])
    ids = []
    while not spelled.is_complete and len(ids) < 9:
        ids.append(int(spelled.masked(torch.arange(len(tokenizer))[None].float()).argmax()))
        spelled.take(ids[-1])
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["a", "\u2581", "b"]


def test_a_tokenizer_that_no_grammar_can_be_held_with_is_an_error_of_ours():
    strange = unigram()
    strange.decoder = decoders.CTC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=strange, eos_token="<s>")
    with pytest.raises(ConfigError, match="tokenizer"):
        Matcher(Grammar.choice(["a"]), tokenizer, len(tokenizer), [1])


def test_drafts_and_neighbours_change_no_answer(engine):
    grammars = [Grammar.json(PERSON), None, Grammar.regex("[a-f]{12}"), Grammar.json(PERSON)]
    alone = [ask(engine, grammar, drafts=False).token_ids for grammar in grammars]
    drafted = [ask(engine, grammar) for grammar in grammars]
    assert [answer.token_ids for answer in drafted] == alone
    assert drafted[0].report.accepted_tokens > 0  # the grammar forces names and punctuation
    streams = [engine.stream(PROMPT, grammar=grammar, max_tokens=200) for grammar in grammars]
    for stream in streams:
        stream.start()
    assert [stream.result().token_ids for stream in streams] == alone


def test_the_mask_is_what_the_grammar_says(engine):
    model = engine.model
    tokenizer, size = model.tokenizer, model.vocab_size
    matcher = Matcher(Grammar.choice(["ab", "cd"]), tokenizer, size, model.eos_ids)
    allowed = matcher.masked(torch.zeros(1, size))[0] == 0
    spelled = {tokenizer.decode([token]) for token in allowed.nonzero().flatten().tolist()}
    assert {"a", "c"} <= spelled <= {"a", "ab", "c", "cd"}
    matcher.take(tokenizer.convert_tokens_to_ids("a"))
    assert [tokenizer.decode([token]) for token in matcher.forced(4)] in (["b"], [])
    matcher.take(tokenizer.convert_tokens_to_ids("b"))
    assert matcher.is_complete
    with pytest.raises(ConfigError, match="does not allow"):
        matcher.take(tokenizer.convert_tokens_to_ids("c"))


def test_what_is_forced_is_tokenised_once_and_is_what_is_forced_at_each_token(engine):
    model = engine.model
    grammar = Grammar.json({"const": " ".join(CHUNKS)})
    one, other = (
        Matcher(grammar, model.tokenizer, model.vocab_size, model.eos_ids) for _ in range(2)
    )
    one._matcher = asked = Mock(wraps=one._matcher)
    taken = 0
    while not one.is_complete:
        forced = one.forced(8)
        assert forced == list(other._matcher.compute_ff_tokens()[:8])
        allowed = (one.masked(torch.zeros(1, model.vocab_size))[0] == 0).nonzero().flatten()
        # Once the model spells it otherwise.
        token = int(allowed[0]) if taken == 20 or not forced else forced[0]
        for matcher in (one, other):
            matcher.take(token)
        taken += 1
    assert taken > 60
    assert asked.compute_ff_tokens.call_count < 10


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a" * 40_000},
        {"enum": ["b", {"c": ["a" * 40_000]}]},
        {"properties": {"a" * 40_000: {}}, "required": ["a" * 40_000]},
    ],
)
def test_what_would_hold_up_all_answers_is_refused(schema):
    with pytest.raises(ConfigError, match="has 40000 characters, and may have 32768"):
        Grammar.json(schema)
    assert Grammar.json({"description": "a" * 40_000, "type": "integer"})


def test_where_the_library_breaks_off_is_nobodys_to_know(engine):
    with pytest.raises(ConfigError, match=r"cannot be read: .*symbols") as error:
        engine.stream(PROMPT, grammar=Grammar.json({"const": [1] * 66_000}))
    assert "backtrace" not in str(error.value)


def test_what_the_tokenizer_cannot_spell_is_an_error_and_the_next_answer_is_made(engine):
    with pytest.raises(ConfigError, match="cannot spell"):
        ask(engine, Grammar.choice(["你好"]))
    assert ask(engine, Grammar.choice(["yes"])).text == "yes"


@pytest.mark.real
def test_texts_of_any_script_are_spelled_by_a_real_tokenizer():
    names = ["你好啊集团", "Ωμέγα “🙂”"]
    with Engine(smollm2(), NEW_PROMPTS) as engine:
        for name in names:
            schema = {"properties": {"name": {"const": name}}, "required": ["name"]}
            answer = engine.generate("Greet.", grammar=Grammar.json({"type": "object", **schema}))
            assert json.loads(answer.text) == {"name": name}


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("start: nothing"), "cannot be read"),
        (Grammar.regex("(unclosed"), "cannot be read"),
        (Grammar.json({"type": "no such type"}), "cannot be read"),
    ],
)
def test_what_is_no_grammar_is_refused_before_anything_is_computed(engine, grammar, says):
    with pytest.raises(ConfigError, match=says):
        engine.stream(PROMPT, grammar=grammar)
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0


@pytest.mark.parametrize(
    "schema",
    [
        {
            "allOf": [
                {"$ref": "#/$defs/a"},
                {"properties": {"b": {"const": 1}}, "required": ["b"]},
            ],
            "$defs": {
                "a": {"type": "object", "properties": {"a": {"const": 2}}, "required": ["a"]}
            },
        },
        {
            "type": "object",
            "properties": {"enum": {"type": "object", "properties": {"x": {"const": 1}}}},
            "required": ["enum"],
        },
    ],
)
def test_closed_objects_leave_schemas_what_they_say(engine, schema):
    found = ask(engine, Grammar.json(schema))
    if found.finish_reason == "stop":
        jsonschema.validate(json.loads(found.text), schema)
    if "allOf" not in schema:
        assert set(json.loads(found.text)["enum"]) <= {"x"}


def reads(engine, schema):
    model = engine.model
    return Matcher(Grammar.json(schema), model.tokenizer, model.vocab_size, model.eos_ids)


WORD = {"type": "string", "maxLength": 3}


@pytest.mark.parametrize(
    "unheld",
    [
        *({"uniqueItems": True, "maxItems": 2}, {"uniqueItems": False, "maxItems": 2}),
        *({"contains": {"const": "x"}, "maxItems": 2}, {"minContains": 0, "maxItems": 2}),
        *(
            {"format": "path"},
            {"format": "password"},
            {"format": "binary"},
            {"not": {"const": "x"}},
        ),
        *({"if": {"const": "x"}, "then": {"maxLength": 1}},),
        *({"pattern": "^(?!x)[a-z]+$"}, {"pattern": "(?<=a)b"}, {"pattern": r"\bfoo\b"}),
        *({"pattern": r"(a)\1"}, {"oneOf": [{"maxLength": 2}, {"maxLength": 3}]}),
    ],
)
def test_what_a_grammar_cannot_hold_is_left_out_and_the_rest_is_held(engine, unheld):
    is_list = "maxItems" in unheld
    part = {"type": "array", "items": {"const": "y"}} if is_list else WORD
    schema = {"type": "object", "properties": {"one": part | unheld}, "required": ["one"]}
    found = json.loads(ask(engine, Grammar.json(schema)).text)["one"]
    most = {"maxItems": 2} if is_list else {}
    jsonschema.validate(found, part | most)


@pytest.mark.parametrize(
    "annotation", [set[str], frozenset[int], Path, SecretStr, bytes, IPv4Network, ByName]
)
def test_what_pydantic_says_of_ordinary_types_is_read(engine, annotation):
    assert reads(engine, create_model("Holder", x=(annotation, ...)).model_json_schema())


@pytest.mark.parametrize(
    "malformed",
    [
        *({"type": "path"}, {"type": 5}, {"type": "string", "format": 5}, {"anyOf": []}),
        *({"type": "string", "pattern": "(a"}, {"type": "string", "pattern": 5}),
        *({"$ref": "#/$defs/none"}, {"type": "object", "properties": 5}),
        *({"type": "integer", "multipleOf": 0}, {"type": "object", "required": "a"}),
        {"type": "object", "properties": {}, "required": [{}]},
    ],
)
def test_what_is_malformed_stays_an_error(engine, malformed):
    with pytest.raises(ConfigError, match="cannot be read"):
        reads(engine, malformed)


def numbers(multiples):
    kind = {"type": "integer"}
    return {str(at): kind | {"multipleOf": one} for at, one in enumerate(multiples)}


@pytest.mark.parametrize(
    "slow",
    [
        {"type": "object", "properties": numbers([999_983])},
        {"type": "object", "$defs": numbers([999_983]), "$ref": "#/$defs/0"},
        {"allOf": [*numbers([997, 991, 983]).values()]},
        {"type": "integer", "multipleOf": 31_536_000.0},
        {"type": "integer", "multipleOf": 10**400},
        {"$defs": {"enum": numbers([999_983])}, "$ref": "#/$defs/enum/0"},
        {"zz": {"properties": {"const": {"a": 1}}} | numbers([999_983])["0"], "$ref": "#/zz"},
        {"type": "object", "properties": numbers(range(4000, 5000))},
    ],
)
def test_multiples_that_take_long_are_left_out(slow):
    told = json.dumps(grammars.prepared(slow))
    kept = [int(one) for one in re.findall(r'"multipleOf": (\d+)', told)]
    assert math.lcm(*kept) <= 5000


def test_multiples_that_are_quick_are_held(engine):
    properties = numbers([60, 3600]) | {"x": {"type": "number", "multipleOf": 0.25}}
    properties |= {"multipleOf": {"type": "integer", "maximum": 3}}  # a name
    for one in properties.values():
        one |= {"minimum": 1, "maximum": 99_999}
    found = Grammar.json({"type": "object", "properties": properties, "required": [*properties]})
    answer = json.loads(ask(engine, found).text)
    assert answer["0"] % 60 == answer["1"] % 3600 == answer["x"] % 0.25 == 0
    assert grammars.prepared({"multipleOf": 3600.0})["multipleOf"] == 3600
    with pytest.raises(ConfigError, match="enum or const"):
        Grammar.json({"$ref": "#/enum/0", "enum": [{"type": "integer", "multipleOf": 999_983}]})


def test_an_object_that_requires_what_it_does_not_list_stays_open(engine):
    listed = {"a": {"const": 1}}
    open_one = {"type": "object", "properties": listed, "required": ["a", "b"], "maxProperties": 2}
    assert reads(engine, open_one)
    assert "additionalProperties" not in grammars.prepared(open_one)
    closed = grammars.prepared({"type": "object", "properties": listed, "required": ["a"]})
    assert closed["additionalProperties"] is False


TYPES = {"type": {"enum": ["a", "b"]}, "payload": {"type": "integer", "maximum": 3}}
BASE = {"type": "object", "properties": {"id": {"const": 1}}, "required": ["id"]}
ONLY_A = [{"properties": {"type": {"const": "a"}}}]


@pytest.mark.parametrize(
    ("schema", "takes"),
    [
        (
            {"properties": TYPES, "required": ["type", "payload"], "oneOf": ONLY_A},
            {"type": "a", "payload": 1},
        ),
        ({"properties": TYPES, "required": ["type"], "anyOf": ONLY_A}, {"type": "a", "payload": 1}),
        ({"required": ["type", "x"], "anyOf": ONLY_A}, {"type": "a", "x": 1}),
        (
            {"$defs": {"base": BASE}, "$ref": "#/$defs/base", "properties": {"x": {"const": 2}}},
            {"id": 1, "x": 2},
        ),
        (
            {
                "$defs": {"base": BASE, "it": {"$ref": "#/$defs/base"}},
                "properties": {"a": {"$ref": "#/$defs/it", "required": ["x"]}},
            },
            {"a": {"id": 1, "x": 2}},
        ),
    ],
)
def test_an_object_that_several_parts_describe_stays_open(engine, schema, takes):
    matcher = reads(engine, {"type": "object"} | schema)
    jsonschema.validate(takes, schema)
    tokenizer = engine.model.tokenizer
    for token in tokenizer(json.dumps(takes), add_special_tokens=False)["input_ids"]:
        matcher.take(token)


def test_a_schema_in_which_a_part_of_an_object_is_a_reference_stays_open():
    joint = {"$ref": "#/$defs/a", "properties": {"y": {}}}
    for whole in (joint, {"items": joint}):
        schema = {"$defs": {"a": BASE, "b": BASE}} | whole
        assert grammars.closed(schema) == schema


def test_what_one_part_describes_is_closed():
    nested = {"$defs": {"base": BASE}, "anyOf": [{"$ref": "#/$defs/base"}, BASE]}
    found = grammars.prepared(nested)
    assert [one["additionalProperties"] for one in (found["$defs"]["base"], found["anyOf"][1])] == [
        False,
        False,
    ]
    inner = {"properties": {"x": BASE}, "required": ["x"]}
    found = grammars.prepared({"properties": {"y": {}}, "oneOf": [inner]})["oneOf"][0]
    assert "additionalProperties" not in found
    assert found["properties"]["x"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("pattern", "answer"), [(r"1\/2", "1/2"), ("1/2", "1/2"), (r"a\\/b", r"a\/b"), ("/", "/")]
)
def test_a_slash_in_an_expression_may_be_escaped(engine, pattern, answer):
    assert ask(engine, Grammar.regex(pattern)).text == answer


def test_settings_that_contradict_a_grammar_are_refused():
    with pytest.raises(ConfigError, match="ignore_eos"):
        GenerationConfig(grammar=Grammar.json(), ignore_eos=True)
    with pytest.raises(ConfigError, match="cannot be empty"):
        Grammar(" ")
    with pytest.raises(ConfigError, match="a text to choose"):
        Grammar.choice([])
    with pytest.raises(ConfigError, match="must be JSON"):
        Grammar.json({"enum": [object()]})


SCHEMAS = st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"enum": ["x", 1, None]}]),
    lambda inner: (
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2})
        | inner.map(
            lambda item: {
                "type": "object",
                "properties": {"k": item},
                "required": ["k"],
                "additionalProperties": False,
            }
        )
    ),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(schema=SCHEMAS)
def test_any_schema_is_kept(engine, schema):
    answer = engine.generate("x", grammar=Grammar.json(schema), max_tokens=120)
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.text), schema)


# What goes with it -----------------------------------------------------------------------------


def test_log_probabilities_are_the_models_own(engine):
    answer = engine.generate(PROMPT, max_tokens=5, logprobs=3, temperature=0)
    plain = engine.generate(PROMPT, max_tokens=5)
    assert answer.token_ids == plain.token_ids
    assert plain.logprobs == ()
    assert [at.token for at in answer.logprobs] == list(answer.token_ids)
    ids = engine.tokenization.tokenize(engine.tokenization.template.render(PROMPT)).ids
    for number, at in enumerate(answer.logprobs):
        so_far = torch.tensor([[*ids, *answer.token_ids[:number]]])
        expected = engine.model.forward(so_far)[0].log_softmax(-1)
        assert at.logprob == pytest.approx(float(expected[at.token]), abs=1e-3)
        assert at.top[0] == (at.token, at.logprob)
        assert len(at.top) == 3


@pytest.mark.parametrize("cold", [1e-8, 5e-324, 9.9e-5])
def test_a_temperature_next_to_nothing_is_none(engine, cold):
    assert GenerationConfig(temperature=cold).temperature == 0
    assert GenerationConfig().replace(temperature=cold) == GenerationConfig()
    found = engine.generate(PROMPT, max_tokens=5, temperature=cold)
    assert found.token_ids == engine.generate(PROMPT, max_tokens=5).token_ids
    assert GenerationConfig(temperature=1e-4).temperature == 1e-4
    for bad in (-1e-9, float("nan")):
        with pytest.raises(ConfigError, match="temperature"):
            GenerationConfig(temperature=bad)


def test_penalties_take_off_what_openai_says(engine):
    scores = torch.zeros(1, engine.model.vocab_size)
    config = GenerationConfig(presence_penalty=0.5, frequency_penalty=0.25)
    found = Sampler(engine.model, config)._penalised(scores, [7, 9, 7])
    assert found[0, 6:10].tolist() == [0, -1.0, 0, -0.75]
    repeats = engine.generate(PROMPT, max_tokens=40).token_ids
    fewer = engine.generate(PROMPT, max_tokens=40, frequency_penalty=2.0).token_ids
    assert len(set(fewer)) > len(set(repeats))
    for bad in (2.5, -2.5):
        with pytest.raises(ConfigError, match="frequency_penalty"):
            GenerationConfig(frequency_penalty=bad)
    with pytest.raises(ConfigError, match="logprobs"):
        GenerationConfig(logprobs=21)
