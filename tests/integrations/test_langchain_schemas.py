"""PMLPromptTemplate in chains: modules for our models, plain text for others."""

from __future__ import annotations

import asyncio
from typing import Annotated

import pytest
from langchain_cached_rag import CachedRAGLLM, ChatCachedRAG, PMLPromptTemplate
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser

from cached_rag import Schema
from cached_rag.errors import PMLError
from cached_rag.pml import MaxTokens, prompt_function

RULES = "Copper is mined in the hills; it turns green when it reacts with the air for years."
CHAT = Schema.from_string(
    f"""<schema name="mine"><system>You answer briefly.</system>
    <user><module name="rules">{RULES} Ask for <param name="what" len="40"/></module></user>
    </schema>"""
)
PLAIN = Schema.from_string(f'<schema name="plain"><module name="rules">{RULES}</module></schema>')
PROMPT = '<prompt schema="mine"><rules what="{what}"/><user>{question}</user></prompt>'
VALUES = {"what": "ore & <b>more</b>", "question": "Why {green}? <rules/>"}


@prompt_function
def mine(what: Annotated[str, MaxTokens(40)], rules: bool = True):
    if rules:
        yield "Copper is mined in the hills, where it has been found since there are people."
    yield f"\nWhat of {what}?"


def test_a_chain_reuses_the_schemas_modules(engine):
    template = PMLPromptTemplate.from_schema(CHAT, PROMPT)
    assert set(template.input_variables) == {"question", "what"}
    llm = ChatCachedRAG(engine=engine, max_tokens=6)
    chain = template | llm
    first = chain.invoke(VALUES)
    again = chain.invoke(VALUES)
    report = again.response_metadata["cached_rag"]
    assert again.text == first.text
    assert report["modules_hit"] == 1
    assert report["modules_missed"] == 0
    assert report["cached_tokens"] > 20
    full = (template | ChatCachedRAG(engine=engine, max_tokens=6, method="full")).invoke(VALUES)
    whole = ChatCachedRAG(engine=engine, max_tokens=6, method="cacheblend", recompute_ratio=1.0)
    assert (template | whole).invoke(VALUES).text == full.text
    assert "".join(chunk.text for chunk in chain.stream(VALUES)) == first.text
    assert asyncio.run(chain.ainvoke(VALUES)).text == first.text


def test_other_models_get_the_same_text():
    template = PMLPromptTemplate.from_schema(CHAT, PROMPT)
    messages = template.invoke(VALUES).to_messages()
    assert [message.type for message in messages] == ["system", "human", "human"]
    assert messages[1].content == f"{RULES} Ask for ore & <b>more</b>"
    assert messages[2].content == "Why {green}? <rules/>"
    chain = template | FakeListChatModel(responses=["green"]) | StrOutputParser()
    assert chain.invoke(VALUES) == "green"


def test_string_models_take_schemas_without_messages(engine):
    template = PMLPromptTemplate.from_schema(PLAIN, "<prompt><rules/> Why {what}?</prompt>")
    llm = CachedRAGLLM(engine=engine, max_tokens=6, method="cacheblend", recompute_ratio=1.0)
    text = f"{RULES} Why green?"
    assert template.format(what="green") == text
    chain = template | llm
    assert (
        chain.invoke({"what": "green"}) == engine.generate(text, method="full", max_tokens=6).text
    )
    answers = llm.generate([template.format(what=what) for what in ("green", "red")])
    for (answer,) in answers.generations:
        assert answer.generation_info["cached_rag"]["modules_hit"] == 1
    assert len(list(chain.stream({"what": "green"}))) > 1


def test_prompt_functions_are_templates(engine):
    template = PMLPromptTemplate.from_function(mine)
    llm = CachedRAGLLM(engine=engine, max_tokens=4)
    assert template.input_variables == ["what"]
    assert template.optional_variables == ["rules"]
    assert template.format(what="tin", more="x") == mine("tin").plain()
    values = {"what": "tin", "rules": True}
    llm.invoke(template.invoke(values))
    answer = llm.generate_prompt([template.invoke(values)]).generations[0][0]
    assert answer.generation_info["cached_rag"]["modules_hit"] == 1
    assert template.partial(rules=False).format(what="tin") == "\nWhat of tin?"


def test_text_that_no_template_made_is_no_schemas_prompt(engine):
    llm = ChatCachedRAG(engine=engine, max_tokens=4)
    template = PMLPromptTemplate.from_schema(CHAT, PROMPT)
    changed = template.invoke(VALUES).to_messages()
    changed[-1].content += "!"
    report = llm.invoke(changed).response_metadata["cached_rag"]
    assert report["modules_hit"] == report["modules_missed"] == 0


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ("<prompt><rule/></prompt>", "did you mean 'rules'"),
        ("<prompt>{0}</prompt>", "variables are names"),
        ("<prompt>{what</prompt>", "write {{ and }}"),
        ("<prompt>{what!r}</prompt>", "variables are names"),
    ],
)
def test_mistakes_show_when_the_template_is_made(prompt, what):
    with pytest.raises(PMLError, match=what):
        PMLPromptTemplate.from_schema(PLAIN, prompt)
    good = PMLPromptTemplate.from_schema(PLAIN, "<prompt>{{x}} {what}</prompt>")
    assert good.format(what="{y}") == "{x} {y}"
