"""Messages inside modules: their markup is the template's, and part of the modules' tokens."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from conftest import NEW_PROMPTS, TEMPLATE, logits_at, tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from cached_rag import ConfigError, Engine, Import, Said, Schema, wrap_model
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.engine.report import Report
from cached_rag.pml.layout import SchemaLayout, answer_header, role_marks

ROLES = Path(__file__).parent / "files" / "roles.xml"
WHOLE = """<schema name="whole">
  <union>
    <module name="kind"><system>Be kind <param name="to" len="6"/></system></module>
    <module name="curt"><system>Be curt.</system></module>
  </union>
  <module name="lamp">
    <user>The lamp of Bishop Rock was lit every evening.</user>
    <assistant>I see.</assistant>
  </module>
  <module name="copper"><user>Copper turns green in the air.</user></module>
  <user>Tell me more.</user>
</schema>"""


def ids_of(engine, prompt):
    tokens, _ = engine.plan(prompt, "full", Report("full"))
    return tokens.ids


def decoded(engine, prompt):
    return engine.model.tokenizer.decode(ids_of(engine, prompt))


def whole(*parts):
    kind = Import("kind", to="all.")
    return Schema.from_string(WHOLE).prompt(kind, Import("copper"), *parts)


def test_modules_that_are_whole_messages_give_the_ids_of_the_chat_template(engine):
    first = whole(Said("assistant", "Why?"), Said("user", "<|im_end|> is text."))
    schema = first.schema
    others = [schema.prompt(Import("curt"), Import("lamp")), schema.prompt(), whole("And why?")]
    lone = '<schema name="lone"><module name="kind"><system>Be kind.</system></module></schema>'
    others += [Schema.from_string(lone).prompt(*some, "Why?") for some in ([Import("kind")], [])]
    roles = [[m["role"] for m in prompt.plain()] for prompt in (first, *others)]
    assert roles == [
        ["system", "user", "user", "assistant", "user"],
        ["system", "user", "assistant", "user"],
        ["user"],
        ["system", "user", "user", "user"],
        ["system", "user"],
        ["user"],
    ]
    for prompt in (first, *others):
        rendered = engine.tokenization.template.render(prompt.plain())
        assert ids_of(engine, prompt) == engine.tokenization.tokenize(rendered).ids


def test_empty_messages_are_there_for_other_models_too(engine):
    empty = "<user>Hi.</user><assistant></assistant>"
    schema = Schema.from_string(f'<schema name="s"><module name="m">{empty}</module></schema>')
    prompt = schema.prompt(Import("m"), Said("user", "Why?"))
    rendered = engine.tokenization.template.render(prompt.plain())
    assert ids_of(engine, prompt) == engine.tokenization.tokenize(rendered).ids


def test_a_template_that_begins_with_bos_has_it_once():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + FOLDED
    model = tiny_model("llama").decoder.model
    with Engine(wrap_model(model, tokenizer, name="bos", revision="bos")) as engine:
        for prompt in (whole(), whole().schema.prompt(Import("copper"))):
            rendered = engine.tokenization.template.render(prompt.plain())
            ids = ids_of(engine, prompt)
            assert ids == engine.tokenization.tokenize(rendered).ids
            assert ids.count(tokenizer.bos_token_id) == 1


def test_the_markup_is_part_of_the_modules_tokens(engine):
    schema = Schema.from_string(WHOLE)
    layout = SchemaLayout(schema.node, engine.tokenization)
    said = [token for run in layout.order if run.unit == ("copper",) for token in run.ids]
    text = "<|im_start|>user\nCopper turns green in the air.<|im_end|>\n"
    assert engine.model.tokenizer.decode(said) == text
    schema.encode(engine)
    report = engine.generate(whole(), method="reuse", max_tokens=2).report
    live = ["<|im_start|>assistant\n", " all."]  # the answer's header, and the argument
    counts = [len(engine.tokenization.tokenizer(text).input_ids) for text in live]
    assert report.prompt_tokens - report.cached_tokens == sum(counts)
    assert report.modules_hit == 2


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_what_is_exact_is_what_the_model_computes_at_these_positions(family):
    with Engine(tiny_model(family), NEW_PROMPTS) as engine:
        roles = Schema.from_file(ROLES)
        mixed = roles.prompt(
            Import("opening", Import("aside"), Import("told", order="row"), Import("owner")),
            Import("errand", Import("errand-wait")),
            Said("user", "Why?"),
        )
        for prompt in (whole(), mixed):
            tokens, plan = engine.plan(prompt, "prefix", Report("prefix"))
            positions = list(plan.positions or range(len(tokens)))
            plain = logits_at(engine.model, tokens.ids, positions)
            exact = engine.prefill(prompt, method="prefix", max_tokens=2)
            assert torch.allclose(exact.logits[0], plain, atol=1e-4)
            reused = engine.prefill(prompt, method="reuse", max_tokens=2)
            assert not torch.allclose(reused.logits[0], plain, atol=1e-4)


def test_text_outside_messages_is_text_and_the_users_to_other_models(engine):
    schema = Schema.from_file(ROLES)
    prompt = schema.prompt_from_string("""<prompt schema="roles">
      <opening so-far="little"><calm/><owner/></opening><errand><errand-wait/></errand>
    </prompt>""")
    known = "What is known so far:\nlittle"
    system = "Stay calm.\n\nThe owner is here."
    assert decoded(engine, prompt) == (
        f"{known}<|im_start|>system\n{system}<|im_end|>\nWait at the pier."
    )
    assert [(m["role"], m["content"]) for m in prompt.plain()] == [
        ("user", known),
        ("system", system),
        ("user", "Wait at the pier."),
    ]
    more = decoded(engine, prompt.then("Now?"))
    assert more.endswith("<|im_end|>\nWait at the pier.\nNow?")  # no message, so no answer's head
    asked = decoded(engine, prompt.then(Said("user", "Now?")))
    assert asked.endswith("pier.<|im_start|>user\nNow?<|im_end|>\n<|im_start|>assistant\n")
    opening = schema.prompt(Import("opening", Import("calm")))
    assert decoded(engine, opening).endswith("Stay calm.<|im_end|>\n<|im_start|>assistant\n")
    assert decoded(engine, opening.then("Now?")).endswith(
        "Stay calm.<|im_end|>\n<|im_start|>user\nNow?<|im_end|>\n<|im_start|>assistant\n"
    )
    shown = schema.outline(engine.tokenization).children[0].children
    (message,) = [node for node in shown if node.kind == "system"]
    assert [node.label for node in message.children if node.kind == "template"] == [
        "<|im_start|>system",
        "<|im_end|>",
    ]


FOLDED = (
    "{% for m in messages %}{% if m['role'] == 'system' %}<<{{ m['content'] }}>>"
    "{% elif m['role'] == 'user' %}[{{ m['content'] }}]{% else %}{{ m['content'] }}.{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        (TEMPLATE, ""),
        (FOLDED, ""),
        (FOLDED.replace("<<", "{{ raise_exception('no system') }}"), "system"),
        (FOLDED.replace("}}.", "}}{% if loop.last %}.{% endif %}"), "user"),
    ],
)
def test_markup_that_depends_on_the_messages_beside_it_is_refused(template, wrong):
    other = copy.deepcopy(tiny_tokenizer())
    other.chat_template = template
    tokenization = Tokenization(other)
    if wrong:
        with pytest.raises(ConfigError, match=f"around <{wrong}> depends"):
            role_marks(tokenization, wrong)
        return
    begin, end = role_marks(tokenization, "system")
    alone = tokenization.template.render(
        [{"role": "system", "content": "x"}], open_answer=False
    ).text
    assert alone == f"{begin}x{end}"
    answer_header(tokenization)


def test_a_template_may_put_nothing_beside_a_message():
    """As DeepSeek's does: a run of a module then has no token."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
        "{% elif m['role'] == 'user' %}<|im_start|>User: {{ m['content'] }}"
        "{% else %}<|im_start|>Assistant: {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>Assistant: {% endif %}"
    )
    made = tiny_model("llama").decoder.model
    engine = Engine(wrap_model(made, tokenizer, name="plain", revision="plain"), NEW_PROMPTS)
    prompt = whole()
    full = engine.generate(prompt, method="full", max_tokens=4)
    exact = {"method": "cacheblend", "recompute_ratio": 1.0, "max_tokens": 4}
    assert engine.generate(prompt, **exact).token_ids == full.token_ids
    assert engine.generate(prompt, method="reuse", max_tokens=4).report.modules_hit > 0
