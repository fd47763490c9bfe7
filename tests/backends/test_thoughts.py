"""What a model thinks: switched on and off by its template, and shown again in later turns.

And told apart from what it says, in every way to ask. A random model is asked, whose mark behind a
thought is a letter that it writes anyway.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from types import SimpleNamespace

import httpx
import pytest
from conftest import NEW_PROMPTS, tiny_model, tiny_tokenizer
from indexes import WordEmbedding
from langchain_cached_rag import ChatCachedRAG
from langchain_cached_rag.messages import plain as of_langchain
from langchain_core.messages import AIMessage, HumanMessage
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock
from llama_index.llms.cached_rag import CachedRAGLLM
from llama_index.llms.cached_rag.messages import plain as of_llama_index
from served import serving

from cached_rag import CachedRAG, ConfigError, Engine, Grammar, Tools, wrap_model
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.grammar.thought import ThoughtForm

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
    with pytest.raises(ConfigError, match="chat_template_kwargs takes strings"):
        template.render([USER], kwargs={"when": object()})
    deep = functools.reduce(lambda inner, _: [inner], range(400), "x")
    with pytest.raises(ConfigError, match="64 levels deep at most"):
        template.render([USER], kwargs={"documents": deep})


# Told apart ------------------------------------------------------------------------------------

FORMS = {
    # Qwen 3 shows a thought, and an empty one where there is none.
    "<t>{{ m.reasoning_content }}\n</t>\n\n|": ("<t>", "</t>", ""),
    # GLM 4.7's header begins one, and the mark behind it stands alone where there is none.
    "{{ '<t>' + m.reasoning_content if m.reasoning_content }}</t>|<t>": ("<t>", "</t>", "</t>"),
    # gpt-oss has a channel for each.
    "{% if m.thinking %}<c>one<m>{{ m.thinking }}<e><s>{% endif %}<c>two<m>|": (
        *("<c>one<m>", "<e><s>", "<c>two<m>"),
    ),
    # DeepSeek R1 leaves thoughts out, and names their marks.
    "{% if '</think>' in m.content %}{% endif %}|<think>\n": ("<think>", "</think>", ""),
    "{% set marks = '[THINK]', '[/THINK]' %}|": ("[THINK]", "[/THINK]", ""),
    "{% set marks = '<|channel>thought', '<channel|>' %}|": ("<|channel>thought", "<channel|>", ""),
    "{% set marks = '[INST]', '[/INST]', '</think' %}|": None,
}


def formed(turn):
    shown, header = turn.split("|") if turn.count("|") == 1 else turn.rsplit("|", 1)
    made = copy.deepcopy(tiny_tokenizer())
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + shown
        + "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n"
        + header
        + "{% endif %}"
    )
    return Tokenization(made)


@pytest.mark.parametrize("turn", FORMS)
def test_the_form_of_a_thought_is_found_out_from_the_template(turn):
    found = formed(turn).template.thought_form
    wanted = FORMS[turn]
    assert found == (wanted and ThoughtForm(*wanted))


@pytest.mark.parametrize("turn", [turn for turn, form in FORMS.items() if form])
@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_read_in_pieces_is_the_answer_read_whole(turn, ends):
    opening, close, lead = FORMS[turn]
    tools = Tools(formed(turn))
    is_begun = tools.prompt([USER]).text.rstrip().endswith(opening)
    behind = f"\n{close}\n\n{lead}It is <b>.\n" if ends else ""
    answer = f"{'' if is_begun else opening}\nHm, </ or <.{behind}"
    assert tools.parts(answer)[0] == "Hm, </ or <."
    assert tools.read(answer) == ("It is <b>.\n" if ends else "", [])
    growing, said, thought = tools.growing(), "", ""
    for letter in [*answer, ""]:
        said += growing.push(letter, is_over=not letter)[0]
        thought += growing.new_thought
    assert (said, thought) == (tools.read(answer)[0], tools.parts(answer)[0])
    plain = "It is so."
    if is_begun:  # all of it is a thought that is not over
        assert (tools.parts(plain)[0], tools.read(plain)[0]) == (plain, "")
    else:
        assert (tools.parts(plain)[0], tools.read(lead + plain)[0]) == ("", plain)
    for other in (
        Tools(tools.tokenization, parts_thoughts=False),
        Tools(tools.tokenization, schema=True),
    ):
        assert (other.parts(answer)[0], other.read(answer)[0]) == ("", answer)


OPTIONS = {"max_tokens": 40, "temperature": 0.0}


@pytest.fixture(scope="module")
def thinker():
    """An engine whose prompts begin a thought, the mark behind it, and an answer to `USER`."""
    llama = tiny_model("llama").decoder.model

    def engine(close):
        made = tokenizer("reasoning_content")
        made.chat_template = made.chat_template.replace("</t>", close)
        return Engine(wrap_model(llama, made, name="t", revision="t"), NEW_PROMPTS)

    with engine("</t>") as unmarked:
        prompt = Tools(unmarked.tokenization).prompt([USER])
        answer = unmarked.generate(prompt, **OPTIONS).text
    letters = [letter for letter in answer[4:20] if letter.isalpha() and letter not in answer[:4]]
    close = max(letters, key=answer.count)
    with engine(close) as made:
        thought, _, said = answer.partition(close)
        yield made, answer, thought.strip(), said.lstrip()


def test_the_server_tells_thoughts_apart(thinker):
    engine, answer, thought, said = thinker
    with serving(engine) as (address, _):
        served = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
        asked = {"model": served, "messages": [USER], **OPTIONS}
        chats = f"{address}/v1/chat/completions"
        message = httpx.post(chats, json=asked, timeout=60).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (thought, said)
        lines = httpx.post(chats, json=asked | {"stream": True}, timeout=60).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == said
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
        prompt = engine.tokenization.template.render([USER]).text
        plain = httpx.post(
            f"{address}/v1/completions", json={"model": served, "prompt": prompt, **OPTIONS}
        ).json()
        assert plain["choices"][0]["text"] == answer  # it is no chat
        asked = {"model": served, "input": "Why?", "temperature": 0, "max_output_tokens": 40}
        whole = httpx.post(f"{address}/v1/responses", json=asked, timeout=60).json()["output"]
        assert [(item["type"], item["content"][0]["text"]) for item in whole] == [
            ("reasoning", thought),
            ("message", said),
        ]
        told = httpx.post(f"{address}/v1/responses", json=asked | {"stream": True}, timeout=60).text
        events = [json.loads(line[6:]) for line in told.split("\n") if line.startswith("data: {")]
        for kind, text in (("reasoning_text", thought), ("output_text", said)):
            parts = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta"]
            assert "".join(parts) == text
        kinds = [item["type"] for item in events[-1]["response"]["output"]]
        assert kinds == ["reasoning", "message"]


def test_langchain_has_thoughts_as_blocks(thinker):
    engine, _, thought, said = thinker
    llm = ChatCachedRAG(engine=engine, **OPTIONS)
    whole = llm.invoke("Why?")
    grown = sum(list(llm.stream("Why?"))[1:], next(llm.stream("Why?")))
    for message in (whole, grown):
        assert message.content == said
        blocks = [(block["type"], block.get("reasoning")) for block in message.content_blocks]
        assert blocks[0] == ("reasoning", thought)
    assert llm.profile["reasoning_output"]
    raw = llm.invoke("Why?", grammar=Grammar.regex("[ab]{9}"))
    assert set(raw.content) <= {"a", "b"}
    assert len(raw.content) == 9
    assert "reasoning_content" not in raw.additional_kwargs


def test_llama_index_has_thoughts_as_blocks(thinker):
    engine, answer, thought, said = thinker
    llm = CachedRAGLLM(engine=engine, **OPTIONS)
    asked = [ChatMessage("Why?", role="user")]
    *_, last = llm.stream_chat(asked)
    for message in (llm.chat(asked).message, last.message):
        assert message.content == said
        blocks = [block.content for block in message.blocks if isinstance(block, ThinkingBlock)]
        assert blocks == [thought]
    assert "".join(piece.delta for piece in llm.stream_chat(asked)) == said
    assert llm.complete("Why?").text == said
    assert "".join(piece.delta for piece in llm.stream_complete("Why?")) == said
    prompt = engine.tokenization.template.render([USER]).text
    assert llm.complete(prompt, formatted=True).text == answer


def test_an_index_answers_without_thoughts(thinker, tmp_path, monkeypatch):
    engine, *_ = thinker
    text = "The valve is reset by turning the red key to the left for three seconds."
    with CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding()) as rag:
        rag.add_texts({"manual": text})
        asked = "How is the valve reset?"
        answers = (rag.ask(asked, max_tokens=40, temperature=1.0, seed=n) for n in range(20))
        seed, answer = next((n, one) for n, one in enumerate(answers) if one.text)
        options = {"max_tokens": 40, "temperature": 1.0, "seed": seed}
        assert answer.thought
        assert answer.thought not in answer.text
        stream = rag.stream(asked, **options)
        assert "".join(stream) == answer.text == stream.answer.text
        assert stream.answer.thought == answer.thought

        async def pieces():
            other = rag.stream(asked, **options)
            return [piece async for piece in other]

        assert "".join(asyncio.run(pieces())) == answer.text
        chat = rag.chat(**options)
        chat.ask(asked)
        assert chat.messages[1]["content"] == answer.text
        thought = SimpleNamespace(text="0 0 0")  # about the follow-up; it is no question
        monkeypatch.setattr(engine, "generate", lambda *_: thought)
        assert chat.ask("And then?").searched == f"And then?\n{asked}"
        monkeypatch.undo()
        cut = rag.ask(asked, **options | {"max_tokens": 1})
        assert (cut.text, "within its thought" in str(cut.report.notes)) == ("", True)
