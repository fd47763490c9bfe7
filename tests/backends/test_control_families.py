"""No text of a document becomes a control token, whatever family of templates these are of."""

from __future__ import annotations

import pytest
from controls import made
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.tokenizer import Tokenization

# The control tokens of each family, and how its template begins and ends a turn.
FAMILIES = {
    "chatml": (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], "<|im_start|>{}\n{}<|im_end|>\n"),
    "llama3": (
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>",
    ),
    "gemma": (
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        "<start_of_turn>{}\n{}<end_of_turn>\n",
    ),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"], "[INST]{} {}[/INST]"),
    "phi": (["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], "<|user|>\n{} {}<|end|>\n"),
    "deepseek": (["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"], "<\uff5cUser\uff5c>{} {}"),
    "harmony": (
        ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"],
        "<|start|>{}<|message|>{}<|end|>",
    ),
}


def tokenization(name, stripping):
    """Of a family; its tokens take the white space beside them along, as Phi's do, or not."""
    tokens, turn = FAMILIES[name]
    options = {"special": True, "lstrip": stripping, "rstrip": stripping}
    tokenizer = made(added=[AddedToken(token, **options) for token in tokens])
    written = turn.format("{{ m.role }}", "{{ m.content }}")
    tokenizer.chat_template = "{% for m in messages %}" + written + "{% endfor %}"
    return Tokenization(tokenizer)


@pytest.mark.parametrize("stripping", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_document_says_what_controls_the_model(name, stripping):
    known = tokenization(name, stripping)
    tokens = FAMILIES[name][0]
    controls = {known.controls[token] for token in tokens}
    pieces = [*tokens, *(token[: len(token) // 2] for token in tokens), tokens[0][1:]]
    pieces += [" ", "\n", "\u200b", "a", "user", "system", "<", "|>", "\ue000", tokens[0].upper()]

    def count(ids):
        return sum(token in controls for token in ids)

    def asked(content):
        return known.template.render([{"role": "user", "content": content}])

    own = count(known.tokenize(asked("x")).ids)
    assert own  # the template's own are obeyed
    assert count(known.tokenize(Rendered(tokens[0])).ids) == 1  # control: a plain prompt, too

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(pieces), max_size=10).map("".join))
    def holds(text):
        assert count(known.literal(text).ids) == 0
        assert count(known.tokenize(Rendered(text, ((0, len(text)),))).ids) == 0
        rendered = asked(text)
        assert text in rendered.text
        assert count(known.tokenize(rendered).ids) == own

    holds()
