"""ChatCachedRAG by itself: messages, settings, streaming, async, cancellation, identity."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading

import pytest
from conftest import CHUNKS, NEW_PROMPTS, TEMPLATE, count_at_rest, tiny_model, tiny_tokenizer
from doubles import Recording, slow
from langchain_cached_rag import ChatCachedRAG
from langchain_core import exceptions
from langchain_core.caches import InMemoryCache
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.prompts import ChatPromptTemplate
from pydantic import ValidationError

from cached_rag import CachedRAG, ConfigError, Engine, wrap_model
from cached_rag.errors import BusyError, ContextOverflowError

QUESTION = f"{CHUNKS[0]}\n\nWhy?"


@pytest.fixture
def engine():
    return Engine(Recording(tiny_model("llama")), NEW_PROMPTS)


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=8)


def report(message):
    return message.response_metadata["cached_rag"]


def test_all_ways_of_asking_give_the_same_text(llm):
    llm.encode(CHUNKS)
    whole = llm.invoke(QUESTION)
    chunks = list(llm.stream(QUESTION))
    merged = sum(chunks[1:], chunks[0])
    assert merged.content == whole.content
    assert merged.usage_metadata == whole.usage_metadata
    assert merged.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]

    async def streamed():
        return "".join([chunk.content async for chunk in llm.astream(QUESTION)])

    assert asyncio.run(streamed()) == whole.content
    assert asyncio.run(llm.ainvoke(QUESTION)).content == whole.content
    assert [answer.content for answer in llm.batch([QUESTION] * 2)] == [whole.content] * 2
    prompt = [{"role": "user", "content": QUESTION}]
    assert llm.engine.generate(prompt, max_tokens=8).text == whole.content


def test_messages_of_all_kinds_become_roles_and_text(llm):
    messages = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "One."}, " Two."]),
        HumanMessage("Three."),
        AIMessage("Well."),
        AIMessage("", tool_calls=[{"name": "search", "args": {"q": "x"}, "id": "1"}]),
        ToolMessage("A result.", tool_call_id="1"),
        ChatMessage("Four.", role="developer"),
        AIMessage(
            [
                {"type": "reasoning", "reasoning": "hm"},
                {"type": "reasoning", "id": "of another model, which does not show it"},
                {"type": "text", "text": "Five."},
            ]
        ),
    ]
    from langchain_cached_rag.messages import plain

    assert [(m["role"], m["content"]) for m in plain(messages)] == [
        ("system", "Be brief."),
        ("user", "One. Two."),
        ("user", "Three."),
        ("assistant", "Well."),
        ("assistant", ""),
        ("tool", "A result."),
        ("system", "Four."),
        ("assistant", "Five."),
    ]
    assert plain(messages)[7]["reasoning_content"] == "hm"
    call = {"name": "search", "arguments": {"q": "x"}}
    assert plain(messages)[4]["tool_calls"] == [{"type": "function", "id": "1", "function": call}]
    assert plain(messages)[5]["tool_call_id"] == "1"
    assert isinstance(llm.invoke(messages), AIMessage)


def test_text_blocks_without_a_text_are_left_out(llm):
    from langchain_cached_rag.messages import plain

    blocks = [{"type": "text", "text": None}, {"type": "text"}, {"type": "text", "text": "One."}]
    for message in (HumanMessage(blocks), AIMessage(blocks)):
        assert plain([message])[0]["content"] == message.text == "One."
    bad = {
        "name": "weather",
        "args": '{"ci',
        "id": "1",
        "error": "cut",
        "type": "invalid_tool_call",
    }
    cut = AIMessage("Well.", invalid_tool_calls=[bad])
    assert plain([cut])[0]["content"] == 'Well.\nweather({"ci'
    elsewhere = {"type": "text-plain", "url": "http://x"}
    with pytest.raises(ValueError, match="text-plain"):
        plain([HumanMessage([elsewhere])])


def test_a_streamed_answer_can_be_part_of_the_next_prompt(llm):
    first, *others = llm.stream(QUESTION)
    answer = sum(others, first)
    again = llm.invoke([HumanMessage(QUESTION), answer, HumanMessage("And when?")])
    whole = [HumanMessage(QUESTION), AIMessage(answer.content), HumanMessage("And when?")]
    assert again.content == llm.invoke(whole).content
    with pytest.raises(ValueError, match="type 'remove'"):
        llm.invoke([HumanMessage("Why?"), RemoveMessage(id="1")])


def test_what_the_model_cannot_read_is_refused(llm):
    image = {"type": "image", "base64": "aaaa", "mime_type": "image/png"}
    for message in (HumanMessage([image]), AIMessage([image])):
        with pytest.raises(ValueError, match=r"of type 'image'.*reads text only"):
            llm.invoke([HumanMessage("Why?"), message, HumanMessage("Why?")])


def test_text_blocks_hand_modules_over(llm):
    def ask(*texts):
        blocks = [{"type": "text", "text": text} for text in (*texts, "\n\nWhich of these is old?")]
        answer = llm.invoke([SystemMessage("Be brief."), HumanMessage(blocks)])
        llm.engine.write_back.drain()
        return answer

    first = ask(*CHUNKS[:2])
    details = first.usage_metadata["input_token_details"]
    assert details["cache_read"] == 0
    assert details["cache_creation"] == report(first)["missed_tokens"] > 0
    second = ask(CHUNKS[1], CHUNKS[0])
    assert report(second)["modules_hit"] == 2
    assert second.usage_metadata["input_token_details"]["cache_creation"] == 0
    # Questions stay live, also those of earlier turns.
    asked = "Which one of all these documents is about a lamp, and which about a dog?"
    earlier = HumanMessage([{"type": "text", "text": text} for text in (CHUNKS[2], asked)])
    llm.invoke([earlier, AIMessage("", tool_calls=[call()]), ToolMessage("x", tool_call_id="1")])
    table = llm.engine.library.table
    assert table.get(CHUNKS[2]) is not None
    assert table.get(asked) is None
    assert table.get("Which of these is old?") is None


def call():
    return {"name": "search", "args": {}, "id": "1"}


def test_blocks_before_another_message_of_the_user_are_all_modules(llm):
    blocks = HumanMessage([{"type": "text", "text": chunk} for chunk in CHUNKS])
    llm.invoke([blocks, HumanMessage("Which one is about a lamp?")])
    assert all(llm.engine.library.table.get(chunk) for chunk in CHUNKS)


def test_settings_reach_the_engine_and_can_be_bound(llm):
    full = llm.bind(method="full", max_tokens=2).invoke(QUESTION)
    assert report(full)["method"] == "full"
    assert full.usage_metadata["output_tokens"] <= 2
    assert report(llm.bind(quality="exact").invoke(QUESTION))["method"] == "prefix"
    with pytest.raises(ConfigError, match="unknown setting"):
        llm.invoke("Hello", no_such_option=1)
    text = llm.invoke(QUESTION).content
    stop = text[2:4]
    assert llm.invoke(QUESTION, stop=[stop]).content == text.split(stop)[0]
    assert ChatCachedRAG(engine=llm.engine, stop=stop).stop == [stop]
    for asked in (llm.bind(stop=stop), llm.bind(stop=[stop])):  # a string is one stop, no letters
        assert asked.invoke(QUESTION).content == text.split(stop)[0]
    assert llm.invoke(QUESTION, stop=stop).content == text.split(stop)[0]
    absent = text[:1] + "no such end"
    assert llm.bind(stop=absent).invoke(QUESTION).content == text


def test_options_that_change_nothing_are_passed_over(llm):
    llm = llm.model_copy(update={"temperature": 2.0, "seed": 3})
    text = llm.invoke(QUESTION).content
    options = {"timeout": 3, "extra_headers": {"x": "y"}, "extra_query": {}, "temperature": None}
    bound = llm.bind(**options, max_tokens=None, model=None)
    answer = bound.invoke(QUESTION)
    assert (answer.content, answer.response_metadata["model_name"]) == (text, "llama")
    assert "".join(chunk.content for chunk in bound.stream(QUESTION)) == text
    assert llm._get_ls_params(temperature=None, model=None)["ls_temperature"] == 2.0
    found = {llm.invoke(QUESTION, seed=None).content for _ in range(8)}
    assert len(found) > 1  # which is a setting: a new one each time
    with pytest.raises(ConfigError, match="unknown setting"):
        llm.invoke(QUESTION, no_such_option=None)


def test_an_empty_prompt_is_refused_with_a_reason(llm):
    with pytest.raises(ConfigError, match="message"):
        llm.invoke([])


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_says_what_it_used(llm, is_async):
    asked = [[HumanMessage("Why?")], [HumanMessage("And how often?")]]
    done = asyncio.run(llm.agenerate(asked)) if is_async else llm.generate(asked)
    told = [found[0].message.usage_metadata for found in done.generations]
    counts = done.llm_output["token_usage"]
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert counts[name] == sum(one[name] for one in told) > 0
    assert done.llm_output["model_name"] == llm._model
    streamed = ChatCachedRAG(engine=llm.engine, max_tokens=2, streaming=True).generate(asked)
    assert streamed.llm_output == {}


def test_bad_settings_are_refused_when_made():
    with pytest.raises(ValueError, match="recompute_ration"):
        ChatCachedRAG(recompute_ration=0.5)
    with pytest.raises(ValueError, match="temperature is 0 or more"):
        ChatCachedRAG(temperature=-1)
    with pytest.raises(ValidationError, match="engine"):
        ChatCachedRAG(engine="smollm2")
    with pytest.raises(ConfigError, match="model_name and model are one setting"):
        ChatCachedRAG(model="a", model_name="b")
    ChatCachedRAG(api_key="k", timeout=3, max_retries=2)  # applications pass these to any model


def test_drafts_are_a_setting(engine):
    settings = {"engine": engine, "max_tokens": 60}
    found = [ChatCachedRAG(**settings, drafts=drafts).invoke(QUESTION) for drafts in (False, True)]
    assert found[0].content == found[1].content
    drafted = [report(answer)["drafted_tokens"] for answer in found]
    assert drafted[1] > drafted[0] == 0


def test_a_response_cache_never_mixes_settings(engine):
    cache = InMemoryCache()
    base = {"engine": engine, "cache": cache, "max_tokens": 4}
    ChatCachedRAG(**base).invoke(QUESTION)
    variants = (
        *({"method": "full"}, {"recompute_ratio": 0.5}, {"temperature": 0.5}, {"top_p": 0.5}),
        *({"top_k": 3}, {"max_tokens": 5}, {"stop": ["x"]}, {"seed": 1}),
        {"repetition_penalty": 1.2},
        {"engine": Engine(tiny_model("qwen3"))},
        {"engine": Engine(engine.model, chat_template_kwargs={"enable_thinking": False})},
    )
    for count, variant in enumerate(variants, 2):
        ChatCachedRAG(**(base | variant)).invoke(QUESTION)
        assert len(cache._cache) == count, variant
    ChatCachedRAG(**base).invoke(QUESTION)
    assert len(cache._cache) == len(variants) + 1
    own = {ChatCachedRAG(**v)._get_llm_string() for v in ({}, {"store": "a"}, {"dtype": "float32"})}
    assert len(own) == 3


def test_engines_are_loaded_late_and_shared(monkeypatch, tmp_path):
    loads = []

    def load(name, backend, **options):
        loads.append(name)
        return tiny_model("llama")

    monkeypatch.setattr("cached_rag.engine.engine.load_backend", load)
    one, two = (ChatCachedRAG(model="tiny-a", max_tokens=2) for _ in range(2))
    other = ChatCachedRAG(model="tiny-a", store=str(tmp_path))
    assert loads == []
    threads = [threading.Thread(target=llm.loaded_engine) for llm in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["tiny-a"]
    assert one.loaded_engine() is two.loaded_engine()
    assert other.loaded_engine() is not one.loaded_engine()
    other.loaded_engine().close()
    profile = getattr(one, "profile", None)  # langchain-core has none before 1.1
    assert profile is None or "max_input_tokens" not in profile
    one.invoke("Hello there")
    assert profile is None or one.profile["max_input_tokens"] == 1024
    elsewhere = one.invoke("Hello", model="tiny-b")
    assert elsewhere.response_metadata["model_name"] == "tiny-b"
    one.invoke("Hello", model="tiny-b")
    assert loads[-1] == "tiny-b"
    assert loads.count("tiny-b") == 1


def test_an_index_can_be_the_engine(engine, tmp_path):
    with CachedRAG.open(tmp_path, engine=engine) as rag:
        assert ChatCachedRAG(engine=rag).loaded_engine() is engine
    with CachedRAG.open(tmp_path / "new", "no-such-model") as unloaded:
        assert ChatCachedRAG(engine=unloaded)._model == "no-such-model"  # and nothing was loaded


def test_the_first_token_is_handed_over_when_it_is_made(llm):
    steps, is_here = llm.engine.model.steps, threading.Event()
    stream = llm.stream(QUESTION)
    next(stream)
    assert len(steps) <= 1  # LangChain holds nothing back; one token may be half a character
    list(stream)
    assert len(steps) > 3

    def held(_):
        assert len(steps) <= 1 or is_here.wait(60)

    async def first():
        async for _ in llm.astream(QUESTION):
            is_here.set()

    steps.clear()
    llm.engine.model.before = held
    asyncio.run(first())
    assert len(steps) > 3


@pytest.fixture
def steps(engine):
    """The engine's steps, each of which takes 20 ms."""
    engine.model.before = slow(0.02)
    return engine.model.steps


@pytest.mark.parametrize("streams", [True, False])
def test_cancelling_stops_the_generation(llm, steps, streams):
    # nothing the random model says ends it early
    llm = llm.model_copy(update={"max_tokens": 400, "temperature": 5.0, "seed": 1})

    async def use():
        if streams:
            async for _ in llm.astream(QUESTION):
                pass
        else:
            await llm.ainvoke(QUESTION)

    async def main():
        task = asyncio.create_task(use())
        while len(steps) < 2:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert count_at_rest(steps) < 50
    assert llm.invoke(QUESTION, max_tokens=2, temperature=0).content  # the model is free again


def test_closing_a_stream_stops_the_generation(llm, steps):
    stream = llm.stream(QUESTION, max_tokens=400)
    next(stream)
    stream.close()
    assert count_at_rest(steps) <= 3


@pytest.mark.usefixtures("steps")
def test_the_event_loop_goes_on_while_the_model_works(llm):

    async def main():
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                await asyncio.sleep(0.001)
                beats += 1

        beating = asyncio.create_task(beat())
        await llm.ainvoke(QUESTION)
        after_invoke = beats
        async for _ in llm.astream(QUESTION):
            pass
        beating.cancel()
        return after_invoke, beats

    after_invoke, beats = asyncio.run(main())
    assert after_invoke > 10
    assert beats > 2 * 10


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_is_a_batch(llm, is_async):
    questions = [f"{chunk}\n\nWhy?" for chunk in CHUNKS * 2]
    alone = [llm.invoke(question).content for question in questions]
    llm.engine.model.steps.clear()
    config = {"max_concurrency": 6}
    if is_async:
        together = asyncio.run(llm.abatch(questions, config))
    else:
        together = llm.batch(questions, config)
    assert [answer.content for answer in together] == alone
    sizes = [len(rows) for rows in llm.engine.model.steps]
    assert max(sizes) > 2
    assert len(sizes) < sum(sizes) / 2


def test_one_failure_in_a_batch_is_its_own(llm):
    good, bad = llm.batch(["Hello there", "word " * 2000], return_exceptions=True)
    assert isinstance(good, AIMessage)
    assert "exceed the model's context" in str(bad)


def asked_in_all_ways(llm, prompt):
    async def streamed():
        return [chunk async for chunk in llm.astream(prompt)]

    yield lambda: llm.invoke(prompt)
    yield lambda: list(llm.stream(prompt))
    yield lambda: asyncio.run(llm.ainvoke(prompt))
    yield lambda: asyncio.run(streamed())


def test_errors_are_those_that_agents_know(llm, monkeypatch):
    """Where langchain-core has them."""
    theirs = getattr(exceptions, "ContextOverflowError", Exception)
    for ask in asked_in_all_ways(llm, "word " * 2000):
        with pytest.raises(ContextOverflowError, match="exceed the model's context") as caught:
            ask()
        assert isinstance(caught.value, theirs)
    monkeypatch.setattr(llm.engine.scheduler, "submit", busy)
    theirs = getattr(exceptions, "ModelRateLimitError", Exception)
    for ask in asked_in_all_ways(llm, QUESTION):
        with pytest.raises(BusyError, match="too many") as caught:
            ask()
        assert isinstance(caught.value, theirs)
        assert pickle.loads(pickle.dumps(caught.value)).retry_after == 7


def busy(_):
    raise BusyError("too many wait", 7)


def test_messages_that_a_template_refuses_are_counted_all_the_same(engine):
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no question') }}{% endif %}"
        + TEMPLATE
    )
    model = wrap_model(engine.model.decoder.model, tokenizer, name="strict", revision="1")
    llm = ChatCachedRAG(engine=Engine(model))
    question, answer = HumanMessage("Why is copper green?"), AIMessage("Because of the air.")
    assert llm.get_num_tokens_from_messages([answer]) == len(
        llm.get_token_ids("AI: Because of the air.")
    )
    asked = llm.get_num_tokens_from_messages([question])
    assert llm.get_num_tokens_from_messages([question, answer]) > asked > 5
    room = llm.get_num_tokens_from_messages([answer])
    assert trim_messages([question, answer], max_tokens=room, token_counter=llm) == [answer]


def test_an_applications_own_counter_counts(engine):
    llm = ChatCachedRAG(engine=engine, custom_get_token_ids=lambda text: [*range(len(text))])
    assert llm.get_token_ids("copper") == [0, 1, 2, 3, 4, 5]
    assert llm.get_num_tokens("copper") == 6
    assert llm.get_num_tokens_from_messages([HumanMessage("copper")]) == len("Human: copper")


def test_what_langchain_asks_of_a_model(llm):
    assert llm._llm_type == "cached-rag-chat"
    params = llm.bind(temperature=0.5).bound._get_ls_params(stop=["x"], temperature=0.5)
    assert params["ls_provider"] == "cached-rag"
    assert params["ls_model_name"] == "llama"
    assert params["ls_temperature"] == 0.5
    assert params["ls_stop"] == ["x"]
    assert llm._get_ls_params(stop="END")["ls_stop"] == ["END"]
    prompt = ChatPromptTemplate.from_messages([("human", "{x}")]).format_messages(x="Why?")
    answer = llm.invoke(prompt)
    assert llm.get_num_tokens_from_messages(prompt) == answer.usage_metadata["input_tokens"]
    assert llm.get_num_tokens_from_messages([]) == 0
    assert llm.get_token_ids("copper") == llm.engine.tokenization.literal("copper").ids
    assert "engine" not in repr(llm)
