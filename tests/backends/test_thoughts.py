"""What a model thinks: switched on and off by its template, and shown again in later turns."""

from __future__ import annotations

import copy

import httpx
import pytest
from conftest import NEW_PROMPTS, tiny_model, tiny_tokenizer
from langchain_cached_rag.messages import plain as of_langchain
from langchain_core.messages import AIMessage, HumanMessage
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock
from llama_index.llms.cached_rag.messages import plain as of_llama_index
from served import serving

from cached_rag import ConfigError, Engine, wrap_model
from cached_rag.backends.tokenizer import Tokenization

# As Qwen 3.5's and gpt-oss's templates look for it.
NAMES = ("reasoning_content", "thinking")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.NAME %}<t>{{ m.NAME }}</t>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ reasoning_effort }}<t>{{ '</t>' if enable_thinking is defined and not enable_thinking }}
{%- endif %}"""
USER = {"role": "user", "content": "Why?"}


def tokenizer(name):
    made = copy.deepcopy(tiny_tokenizer())
    made.chat_template = TEMPLATE.replace("NAME", name)
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", [*NAMES, "reasoning"])
def test_a_thought_is_shown_under_the_name_that_the_template_looks_for(name, given):
    template = Tokenization(tokenizer(name)).template
    turn = {"role": "assistant", "content": "So."}
    shown = template.render([USER, turn | {given: "Hm."}, USER]).text
    assert "assistant\n<t>Hm.</t>So.<|im_end|>" in shown
    without = template.render([USER, turn, USER]).text
    assert shown.replace("<t>Hm.</t>", "") == without


@pytest.mark.parametrize(
    "messages",
    [
        of_langchain(
            [
                HumanMessage("Why?"),
                AIMessage("So.", additional_kwargs={"reasoning_content": "Hm."}),
            ]
        ),
        of_langchain(
            [
                HumanMessage("Why?"),
                AIMessage(
                    [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "So."}]
                ),
            ]
        ),
        of_llama_index(
            [
                ChatMessage("Why?", role="user"),
                ChatMessage(
                    blocks=[ThinkingBlock(content="Hm."), TextBlock(text="So.")], role="assistant"
                ),
            ]
        ),
    ],
)
def test_frameworks_messages_have_their_thoughts(messages):
    template = Tokenization(tokenizer("thinking")).template
    assert "<t>Hm.</t>So." in template.render(messages).text


def test_one_prompt_may_be_given_other_values_than_all():
    template = Tokenization(tokenizer("thinking")).template
    quiet = template.render([USER], kwargs={"enable_thinking": False}).text
    assert quiet.endswith("<t></t>")
    assert template.render([USER]).text.endswith("<t>")
    own = Tokenization(tokenizer("thinking"), {"reasoning_effort": "high"}).template
    both = own.render([USER], kwargs={"enable_thinking": False}).text
    assert both.endswith("high<t></t>")
    with pytest.raises(ConfigError, match="chat_template_kwargs has"):
        template.render([USER], kwargs={"messages": []})


def test_the_server_takes_what_its_clients_send():
    model = wrap_model(
        tiny_model("llama").decoder.model, tokenizer("thinking"), name="t", revision="t"
    )
    turns = [USER, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}, USER]
    with Engine(model, NEW_PROMPTS) as engine, serving(engine) as (address, _):
        served = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]

        def tokens(messages=(USER,), **more):
            asked = {"model": served, "messages": list(messages), "max_tokens": 1, **more}
            answer = httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=60).json()
            assert "usage" in answer, answer
            return answer["usage"]["prompt_tokens"]

        quiet = tokens(chat_template_kwargs={"enable_thinking": False})
        assert quiet > tokens() == tokens(think=True) == tokens(chat_template_kwargs={})
        assert tokens(think=False) == quiet
        assert tokens(reasoning_effort="low") > tokens()
        quiet_text = {"think": False, "chat_template_kwargs": {}, "reasoning_effort": "low"}
        plain = {"model": served, "prompt": "Why?", "max_tokens": 1, "temperature": 0}
        texts = [
            httpx.post(f"{address}/v1/completions", json=plain | more, timeout=60).json()
            for more in ({}, quiet_text)
        ]
        assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]
        bare = [turns[0], {"role": "assistant", "content": "So."}, turns[2]]
        assert tokens(turns) > tokens(bare)


def test_a_prompts_own_values_are_kept_for_the_next_one_within_bounds():
    template = Tokenization(tokenizer("thinking")).template
    for number in range(40):
        given = {"reasoning_effort": f"level {number}"}
        assert template.render([USER], kwargs=given).text.endswith(f"level {number}<t>")
    assert template.render([USER], kwargs={"reasoning_effort": "level 3"}).text.endswith("3<t>")
    with pytest.raises(ConfigError, match="are JSON values"):
        template.render([USER], kwargs={"when": object()})
