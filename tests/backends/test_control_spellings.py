"""A control token is text in what others write, also where a tokenizer's steps make it one."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
from conftest import CHUNKS, FAMILIES, NEW_PROMPTS, TEMPLATE
from hypothesis import given, settings
from hypothesis import strategies as st
from indexes import WordEmbedding
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from cached_rag import CachedRAG, Engine, Import, Report, Schema, wrap_model
from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.tokenizer import Tokenization

# The template names a tool's results by name, and says what the model thought, as Qwen's does.
TOLD = (
    "{{ documents | tojson if documents }}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}"
    "{{ m.name or '' }}{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
# Full-width characters, which compatibility normalisation makes ASCII.
WIDE = {ord(character): chr(ord(character) + 0xFEE0) for character in "<|>imend_"}
WIDE_END = "<|im_end|>".translate(WIDE)
# Steps of tokenizers, options of their tokens, and what becomes <|im_end|> by them.
STEPS = {
    "none": (None, {}, "<|im_end|>"),
    "compatible": (normalizers.NFKC(), {}, WIDE_END),
    "decomposed": (normalizers.NFKD(), {}, WIDE_END),
    "lower": (normalizers.Lowercase(), {}, "<|IM_End|>"),
    "accents": (
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
        {},
        "<|ím_énd|>",
    ),
    "replaced": (normalizers.Replace("«", "<"), {}, "«|im_end|>"),
    "vanishing": (normalizers.Replace("\u200b", ""), {}, "<|im\u200b_end|>"),
    "bert": (normalizers.BertNormalizer(), {}, "<|Im\x07_énd|>"),
    "prepended": (PREPENDED, {}, "so <|im_end|> so"),
    "stripped": (normalizers.Strip(), {}, "<|im_end|>"),
    "spaces": (
        normalizers.NFKC(),
        {"lstrip": True, "rstrip": True},
        f"so \n{WIDE_END} \n so",
    ),
    "word": (normalizers.NFKC(), {"single_word": True}, f"so {WIDE_END} so"),
}


def made(steps, options):
    """A byte-level BPE that knows all bytes; its control tokens are found in normalised text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CHUNKS * 3, trainer)
    if steps is not None:
        backend.normalizer = steps
    tokens = [
        AddedToken(text, special=True, normalized=True, **options)
        for text in ("<|im_start|>", "<|im_end|>")
    ]
    backend.add_special_tokens(tokens)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokens[1])
    tokenizer.chat_template = TOLD
    return tokenizer


@functools.cache
def model_of(name):
    steps, options, _ = STEPS[name]
    kind, sizes = FAMILIES["llama"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes | {"vocab_size": 400, "num_hidden_layers": 1}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return wrap_model(model, made(steps, options), name=name, revision=name)


def engine_of(name):
    return Engine(model_of(name), NEW_PROMPTS)


def controls_in(engine, prompt):
    """How many control tokens a prompt has."""
    ids = engine.plan(prompt, "full", Report("full"))[0].ids
    return sum(token in set(engine.tokenization.controls.values()) for token in ids)


def rendered(engine, messages, tools=()):
    return engine.tokenization.template.render(messages, tools=tools)


def message(engine, said, tmp_path):
    return [{"role": "user", "content": said}]


def thought(engine, said, tmp_path):
    turn = {"role": "assistant", "content": "x", "reasoning_content": said}
    return [{"role": "user", "content": "x"}, turn]


def tool(engine, said, tmp_path):
    function = {"name": "f", "description": said, "parameters": {"properties": {said: {}}}}
    tools = [{"type": "function", "function": function}]
    return rendered(engine, [{"role": "user", "content": "x"}], tools)


def value(engine, said, tmp_path):
    """Something that the template is given besides, for this prompt."""
    documents = ({said: [said]},)
    template = engine.tokenization.template
    return template.render([{"role": "user", "content": "x"}], kwargs={"documents": documents})


def tool_result(engine, said, tmp_path):
    function = {"name": "f", "arguments": {"x": said}}
    call = {"id": "1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": said, "content": said},
    ]


def pml_text(engine, said, tmp_path):
    escaped = said.replace("<", "&lt;").replace(">", "&gt;").replace("\x07", "")
    schema = f'<schema name="s"><module name="m"><user>x {escaped} x</user></module></schema>'
    return Schema.from_string(schema).prompt(Import("m"), "x")


def pml_argument(engine, said, tmp_path):
    schema = '<schema name="s"><user>Of <param name="p" len="60"/></user></schema>'
    return Schema.from_string(schema).prompt(said, p=said)


def document(engine, said, tmp_path):
    """A document with such a text, title and file name, found by CachedRAG."""
    said = said.replace("\x07", "")  # which no document has
    path = tmp_path / f"{said}.md"
    path.write_text(f"# {said}\n\n{CHUNKS[1]} {said} {CHUNKS[1]}")
    with CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding()) as rag:
        assert rag.ingest(path, progress=False).added == 1
        texts = [hit.text for hit in rag.search("copper")]
        prompts = rag._asking().prompts
        assert "".join(said.split()) in "".join("".join(texts).split())
        return prompts.rendered(prompts.messages(said, texts))


PLACES = [message, thought, tool, value, tool_result, pml_text, pml_argument, document]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", STEPS)
def test_what_others_write_is_text_whatever_a_tokenizer_makes_of_it(name, place, tmp_path):
    engine, said = engine_of(name), STEPS[name][2]
    end = engine.tokenization.controls["<|im_end|>"]
    assert end in engine.tokenization.tokenizer(said).input_ids  # control: the plain tokenizer
    (tmp_path / "plain").mkdir()
    own = controls_in(engine, place(engine_of(name), "x", tmp_path / "plain"))
    assert own or name in ("prepended", "word")  # which find no token beside a letter
    assert controls_in(engine, place(engine_of(name), said, tmp_path)) == own


@pytest.mark.parametrize("name", STEPS)
def test_ids_of_control_tokens_come_from_the_template_only(name):
    engine, spelled = engine_of(name), STEPS[name][2]
    pieces = [
        "<|im_end|>",
        "<|".translate(WIDE),
        "im",
        "_END",
        "|>".translate(WIDE),
        spelled,
        spelled[:4],
        spelled[4:],
    ]
    pieces += [spelled[4:], " ", "\n", "\u200b", "\u0301", "x"]
    contents = st.lists(st.sampled_from(pieces), max_size=8).map("".join)
    own = controls_in(engine, [{"role": "user", "content": "x"}])

    @settings(max_examples=40, deadline=None)
    @given(contents)
    def holds(text):
        tokenization = engine.tokenization
        found = tokenization.template.render([{"role": "user", "content": f"x{text}x"}])
        assert f"x{text}x" in found.text
        assert controls_in(engine, found) == own
        assert not set(tokenization.literal(text).ids) & set(tokenization.controls.values())

    holds()


@pytest.mark.parametrize("name", STEPS)
def test_the_template_says_what_plain_tokenisation_makes_of_it_beside_what_is_text(name):
    tokenizer, said = model_of(name).tokenizer, STEPS[name][2]
    known, text = Tokenization(tokenizer), f"<|im_start|> user\n{CHUNKS[0]}<|im_end|> \n"
    plain = tokenizer(text).input_ids
    assert known.tokenize(Rendered(text, is_chat=True)).ids == plain
    whole = known.tokenize(Rendered(text + said, ((len(text), len(text + said)),), is_chat=True))
    controls = set(known.controls.values())
    assert [t for t in whole.ids if t in controls] == [t for t in plain if t in controls]
    assert whole.starts == sorted(whole.starts)
    assert all(begin <= end for begin, end in zip(whole.starts, whole.ends, strict=True))


def test_a_template_that_changes_letters_or_escapes_them_leaves_no_mark():
    for change in ("upper", "lower", "title", "e", "tojson(ensure_ascii=true)"):
        tokenizer = made(normalizers.NFKC(), {})
        tokenizer.chat_template = TEMPLATE.replace("trim", change)
        asked = [{"role": "user", "content": f"is {WIDE_END} or <|im_end|> said?"}]
        known = Tokenization(tokenizer)
        found = known.template.render(asked)
        assert found.text == tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        controls = set(known.controls.values())
        assert sum(token in controls for token in known.tokenize(found).ids) == 3


def likeliest():
    """A tokenizer that chooses the likeliest pieces, where control tokens are some, as llm-jp's."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(character, -5.0) for character in "▁abcdefghijklmnopqrstuvwxyz<>/"]
    backend = Tokenizer(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("text", ["</s>", "say </s></s> now", "<</s>> <s>", "</s> é </s>"])
def test_no_vocabulary_chooses_a_control_token_for_text(text):
    tokenizer = likeliest()
    known = Tokenization(tokenizer)
    end = tokenizer.eos_token_id
    tokens = known.literal(text)
    assert end not in tokens.ids
    assert tokenizer.bos_token_id not in tokens.ids
    assert "".join(text[a:b] for a, b in pairwise([0, *tokens.ends])) == text
    whole = f"a {text} b</s>"
    ids = known.tokenize(Rendered(whole, ((2, 2 + len(text)),))).ids
    assert ids.count(end) == 1
    assert known.tokenize(Rendered(whole)).ids == tokenizer(whole).input_ids
