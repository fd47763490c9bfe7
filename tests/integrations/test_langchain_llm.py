"""CachedRAGLLM: strings in, strings out, several at once."""

from __future__ import annotations

import asyncio

import pytest
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from doubles import Recording
from langchain_cached_rag import CachedRAGLLM
from langchain_core.caches import InMemoryCache
from langchain_core.prompts import PromptTemplate

from cached_rag import ConfigError, Engine, Grammar

PROMPTS = [f"{chunk}\n\nQ: why?\nA:" for chunk in CHUNKS * 2]
TEMPLATE = PromptTemplate.from_template("Read this.\n\n{context}\n\nQ: {question}\nA:")


@pytest.fixture
def engine():
    return Engine(Recording(tiny_model("llama")), NEW_PROMPTS)


@pytest.fixture
def llm(engine):
    return CachedRAGLLM(engine=engine, max_tokens=8)


def test_all_ways_of_asking_give_the_same_text(llm):
    llm.encode(CHUNKS)
    text = llm.invoke(PROMPTS[0])
    assert text == llm.engine.generate(PROMPTS[0], max_tokens=8).text
    assert "".join(llm.stream(PROMPTS[0])) == text
    assert asyncio.run(llm.ainvoke(PROMPTS[0])) == text

    async def streamed():
        return "".join([piece async for piece in llm.astream(PROMPTS[0])])

    assert asyncio.run(streamed()) == text


def test_a_stop_string_is_one_stop_and_no_letters(llm):
    text = llm.invoke(PROMPTS[0])
    absent = text[:1] + "no such end"  # its letters are there
    assert llm.bind(stop=absent).invoke(PROMPTS[0]) == text
    assert llm.invoke(PROMPTS[0], stop=absent) == text
    stop = text[2:4]
    expected = text.split(stop)[0]
    assert llm.invoke(PROMPTS[0], stop=stop) == expected
    assert llm.bind(stop=stop).invoke(PROMPTS[0]) == expected
    assert asyncio.run(llm.ainvoke(PROMPTS[0], stop=stop)) == expected
    assert "".join(llm.stream(PROMPTS[0], stop=stop)) == expected


def test_a_batch_is_one_call(llm, monkeypatch):
    alone = [llm.invoke(prompt) for prompt in PROMPTS]
    llm.engine.model.steps.clear()
    calls, generate_batch = [], llm.engine.generate_batch

    def recording(prompts, *args, **options):
        calls.append(len(prompts))
        return generate_batch(prompts, *args, **options)

    monkeypatch.setattr(llm.engine, "generate_batch", recording)
    assert llm.batch(PROMPTS) == alone
    assert calls == [len(PROMPTS)]
    assert max(map(len, llm.engine.model.steps)) > 2
    assert asyncio.run(llm.abatch(PROMPTS)) == alone


@pytest.mark.parametrize("is_async", [False, True])
def test_a_response_cache_never_mixes_settings(engine, is_async):
    cache = InMemoryCache()
    llm = CachedRAGLLM(engine=engine, max_tokens=4, cache=cache)
    variants = (
        *({}, {"method": "full"}, {"temperature": 0.5}, {"seed": 1}, {"max_tokens": 5}),
        *({"grammar": Grammar.choice(["a"])}, {"grammar": Grammar.choice(["b"])}),
        *({"logprobs": 1}, {"logprobs": True, "top_logprobs": 2}, {"ignore_eos": True}),
    )
    for count, variant in enumerate(variants, 1):
        bound = llm.bind(**variant)
        asyncio.run(bound.ainvoke("Why?")) if is_async else bound.invoke("Why?")
        assert len(cache._cache) == count, variant
        assert llm.bind(**variant).invoke("Why?") is not None
        assert len(cache._cache) == count


@pytest.mark.parametrize("is_async", [False, True])
def test_options_that_change_nothing_are_passed_over(llm, is_async):
    llm = llm.model_copy(update={"cache": InMemoryCache(), "temperature": 2.0, "seed": 3})
    text = llm.invoke("Why?")
    options = {"timeout": 3, "extra_headers": {"x": "y"}, "extra_query": {}, "temperature": None}
    bound = llm.bind(**options, max_tokens=None, model=None)
    assert (asyncio.run(bound.ainvoke("Why?")) if is_async else bound.invoke("Why?")) == text
    assert "".join(bound.stream("Why?")) == text
    assert len(llm.cache._cache) == 1


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        ({"quality": "exact"}, {"method": "full"}),
        ({"recompute_ratio": 0.3}, {"method": "full"}),
        ({"method": "reuse"}, {"quality": "exact"}),
    ],
)
def test_a_call_takes_the_place_of_what_it_excludes(llm, own, asked):
    llm = llm.model_copy(update=own)
    assert llm.invoke("Why?", **asked) == "".join(llm.stream("Why?", **asked))


def test_a_result_carries_usage_and_report(llm):
    llm.encode(CHUNKS)
    result = llm.generate(PROMPTS[:2])
    infos = [generations[0].generation_info for generations in result.generations]
    for info in infos:
        report, usage = info["cached_rag"], info["usage_metadata"]
        assert report["modules_hit"] == 1
        assert usage["input_token_details"]["cache_read"] == report["cached_tokens"] > 0
    counts = result.llm_output["token_usage"]
    assert counts["input_tokens"] == sum(i["usage_metadata"]["input_tokens"] for i in infos)


def test_a_prompt_is_completed_as_it_is(llm):
    bare = llm.generate([PROMPTS[0]]).generations[0][0].generation_info["usage_metadata"]
    assert bare["input_tokens"] == len(llm.get_token_ids(PROMPTS[0]))
    assert llm.invoke(PROMPTS[0]) == llm.engine.generate(PROMPTS[0], max_tokens=8).text
    assert llm._get_ls_params()["ls_model_name"] == "llama"


def test_texts_encoded_for_a_prompt_stand_behind_its_head(llm):
    llm = CachedRAGLLM(engine=llm.engine, max_tokens=2, method="prefix")
    llm.encode(CHUNKS, prompt=TEMPLATE)
    value = TEMPLATE.format(context=CHUNKS[2], question="Why?")
    result = llm.generate([value]).generations[0][0].generation_info["cached_rag"]
    head = value[: value.index(CHUNKS[2])]
    assert result["cached_tokens"] >= len(llm.get_token_ids(head)) - 2


def test_a_prompt_without_a_common_head_is_refused(llm):
    with pytest.raises(ValueError, match="no variable 'documents'"):
        llm.encode(CHUNKS, prompt=TEMPLATE, variable="documents")
    turned = PromptTemplate.from_template("Q: {question}\n\n{context}\nA:")
    with pytest.raises(ValueError, match=r"\{question\} stands before \{context\}"):
        llm.encode(CHUNKS, prompt=turned)
    altered = PromptTemplate.from_template("Read: {context:.9} {question}")
    with pytest.raises(ConfigError, match=r"does not show \{context\} as it is"):
        llm.encode(CHUNKS, prompt=altered)
