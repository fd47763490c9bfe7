"""Templates that refuse what others take, that want another form, or that never end."""

from __future__ import annotations

import copy
import threading

import httpx
import pytest
from conftest import CHUNKS, NEW_PROMPTS, TEMPLATE, tiny_model, tiny_tokenizer
from indexes import WordEmbedding
from langchain_cached_rag import ChatCachedRAG
from llama_index.core.llms import ChatMessage
from llama_index.llms.cached_rag import CachedRAGLLM
from served import GREEDY, serving

from cached_rag import CachedRAG, ConfigError, Engine, Schema, wrap_model
from cached_rag.backends import untrusted
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.engine.tools import Tools

# As Gemma's and the first Mistral's.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Says nothing of a system message, and nothing about that.
DEAF = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As those of models for pictures and text.
IN_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM, ASKED = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
)


def tokenizer_with(template):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def template_of(text):
    return Tokenization(tokenizer_with(text)).template


def engine_with(template):
    model = tiny_model("llama").decoder.model
    return Engine(wrap_model(model, tokenizer_with(template), name="t", revision="t"), NEW_PROMPTS)


@pytest.mark.parametrize("template", [STRICT, DEAF])
def test_what_a_system_message_says_begins_the_users_turn_where_there_is_no_other_place(template):
    render = template_of(template).render
    assert render([SYSTEM, ASKED]).text == "[user]Be brief.\n\nWhy?[end][assistant]"
    later = [ASKED, {"role": "assistant", "content": "So."}, SYSTEM, ASKED]
    assert render(later).text == (
        "[user]Why?[end][assistant]So.[end][user]Be brief.\n\nWhy?[end][assistant]"
    )
    empty = {"role": "system", "content": ""}
    assert render([empty, ASKED]).text == render([ASKED]).text
    assert render([SYSTEM]).text == "[user]Be brief.[end][assistant]"
    tools = [
        {"type": "function", "function": {"name": "lamp", "description": "", "parameters": {}}}
    ]
    known = Tokenization(tokenizer_with(template))
    assert "[user]You may call functions." in Tools(known, tools).prompt([ASKED]).text


def test_a_system_message_that_a_template_takes_stays_one():
    messages = [SYSTEM, ASKED, ASKED]
    known = Tokenization(tokenizer_with(TEMPLATE))
    assert known.template.render(messages).text == known.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_a_leading_system_message_stays_one_where_later_ones_are_refused():
    refusal = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    render = template_of(TEMPLATE.replace("%}", "%}" + refusal, 1)).render
    answer = {"role": "assistant", "content": "So."}
    assert render([SYSTEM, SYSTEM, ASKED, answer, SYSTEM, ASKED]).text == (
        "<|im_start|>system\nBe brief.\n\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"
        "<|im_start|>user\nBe brief.\n\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [STRICT, DEAF, IN_PARTS])
def test_every_way_to_ask_works_with_such_templates(template, tmp_path):
    with engine_with(template) as engine:
        wanted = engine.generate([SYSTEM, ASKED], max_tokens=4, method="full")
        said = ChatCachedRAG(engine=engine, max_tokens=4, method="full").invoke(
            [("system", "Be brief."), ("human", "Why?")]
        )
        assert said.content == wanted.text
        llm = CachedRAGLLM(engine=engine, max_tokens=4, method="full")
        messages = [ChatMessage(role=m["role"], content=m["content"]) for m in (SYSTEM, ASKED)]
        assert llm.chat(messages).message.content == wanted.text
        schema = '<schema name="s"><system>Be brief.</system><user>Why?</user></schema>'
        prompt = Schema.from_string(schema).prompt()
        assert engine.count_tokens(prompt) == wanted.report.prompt_tokens
        with serving(engine) as (address, _):
            body = GREEDY | {"messages": [SYSTEM, ASKED], "max_tokens": 4, "method": "full"}
            got = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
        assert got["choices"][0]["message"]["content"] == wanted.text
        assert got["usage"]["prompt_tokens"] == wanted.report.prompt_tokens


@pytest.mark.parametrize("template", [STRICT, DEAF, IN_PARTS, TEMPLATE])
@pytest.mark.parametrize("system", [None, "", "Answer."])
def test_documents_are_asked_with_such_templates(template, system, tmp_path):
    engine = engine_with(template)
    options = {"embedding": WordEmbedding(), "chunk_tokens": 128, "system": system}
    with engine, CachedRAG.open(tmp_path / "index", engine=engine, **options) as rag:
        rag.add_texts({"a": CHUNKS[0], "b": CHUNKS[1]}, progress=False)
        first = rag.ask("Why is copper green?", k=2, max_tokens=2)
        assert first.report.cached_tokens > 0
        again = rag.ask("And the lamp?", k=2, max_tokens=2, history=[first])
        assert again.report.modules_hit == 2
        prompts = rag._asking().prompts
        rendered = prompts.rendered(prompts.messages("?", CHUNKS[:1])).text
        role = "user" if system == "" or template in (STRICT, DEAF) else "system"
        opening = f"<|im_start|>{role}\n" if template == TEMPLATE else f"[{role}]"
        assert rendered.startswith(opening + (CHUNKS[0] if system == "" else ""))
        assert CHUNKS[0] in rendered


@pytest.mark.parametrize(
    "template", ["", "{% for m in messages %}[{{ m.role }}]{% endfor %}", "{{ messages[0].text }}"]
)
def test_a_template_that_leaves_out_what_is_said_is_refused(template):
    with pytest.raises(ConfigError, match=r"leaves out what messages say|no chat template"):
        template_of(template).render([ASKED])


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": (LOOP, "takes more than 0.3 s"),
    "tree": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "takes more than 0.3 s",
    ),
    "long range": ("{% for i in range(999999) %}{% endfor %}", "Range too big"),
    "huge range": ("{% for i in range(10**9) %}{% endfor %}", "huge numbers"),
    "power": ("{{ 10 ** 10 ** 10 }}", "huge numbers"),
    "text": ("{{ 'a'.ljust(10000000000) }}", "huge numbers"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "memory": ("{{ 'a' * 999999 * 999999 * 999999 }}", "MemoryError"),
    "overflow": ("{{ 'aa' * (999999 * 999999 * 999999 * 999999) }}", "OverflowError"),
    "zero": ("{{ 1 // 0 }}", "division"),
    "key": ("{{ '%(x)s' % {} }}", "KeyError"),
    "growth": (
        "{% set n = namespace(x='ab' * 1000) %}{% for i in range(40) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}",
        "bytes of memory",
    ),
    "length": ("{{ messages[0].content }}{{ 'a' * 100000 * 1000 }}", "characters"),
    "syntax": ("{% for %}", "refuses the messages"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_ends_in_time_and_memory_with_an_error_of_ours(name, monkeypatch):
    template, says = HOSTILE[name]
    if "0.3 s" in says:
        monkeypatch.setattr(untrusted, "SECONDS", 0.3)
    if "bytes of memory" in says:
        monkeypatch.setattr(untrusted, "BYTES", 1 << 26)
    found = []

    def work():  # not on the main thread: so servers render
        with pytest.raises(ConfigError, match=says) as caught:
            template_of(template + TEMPLATE).render([SYSTEM, ASKED])
        found.append(caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found


def test_whoever_is_not_stopped_hears_nothing_of_the_watch(monkeypatch):
    monkeypatch.setattr(untrusted, "SECONDS", 0)
    monkeypatch.setattr(untrusted, "_LOOK_SECONDS", 0.001)
    ends = set()
    for count in range(2000):  # some end as they are stopped
        if count >= 200 and len(ends) == 2:
            break
        try:
            ends.add(untrusted.bounded("it", lambda n=count: str(sum(range(n * 2000)))).isdigit())
        except ConfigError:
            ends.add(False)
    assert ends == {True, False}
