"""PMLPromptTemplate in LlamaIndex: predict, query engines, and models that know nothing of it."""

from __future__ import annotations

import pytest
from conftest import CHUNKS
from llama_index.core import Document, SummaryIndex
from llama_index.core.llms.mock import MockLLM
from llama_index.llms.cached_rag import CachedRAGLLM, PMLPromptTemplate

from cached_rag import Schema
from cached_rag.errors import PMLError

RULES = "You are given notes of a journey. Answer from them, and say so where they are silent."
SCHEMA = Schema.from_string(
    f"""<schema name="notes"><system>{RULES}</system><user>
    <module name="polite">Answer in whole sentences, as in a letter to a stranger.</module>
    </user></schema>"""
)
TEMPLATE = PMLPromptTemplate.from_schema(
    SCHEMA, "<prompt><polite/>\n{context_str}\n\nQuestion: {query_str}</prompt>"
)
VALUES = {"context_str": CHUNKS[0], "query_str": "Who lit the lamp?"}


def test_predicting_reuses_the_schemas_modules(engine):
    llm = CachedRAGLLM(engine=engine, max_tokens=6)
    first = llm.predict(TEMPLATE, **VALUES)
    messages = TEMPLATE.format_messages(llm=llm, **VALUES)
    again = llm.chat(messages)
    assert again.message.content == first
    report = again.raw["cached_rag"]
    assert report["modules_hit"] == 1
    assert report["modules_missed"] == 0
    full = llm.chat(messages, method="full").message.content
    whole = llm.chat(messages, method="cacheblend", recompute_ratio=1.0).message.content
    assert whole == full


def test_query_engines_take_it_as_their_template(engine):
    llm = CachedRAGLLM(engine=engine, max_tokens=6)
    index = SummaryIndex.from_documents([Document(text=CHUNKS[0])])
    asked = index.as_query_engine(llm=llm, text_qa_template=TEMPLATE)
    assert str(asked.query("Who lit the lamp?")) == llm.predict(TEMPLATE, **VALUES)


def test_other_models_get_the_same_text():
    said = TEMPLATE.format_messages(**VALUES)
    assert [message.role.value for message in said] == ["system", "user"]
    assert said[1].content.endswith(f"{CHUNKS[0]}\n\nQuestion: Who lit the lamp?")
    assert CHUNKS[0] in MockLLM().predict(TEMPLATE, **VALUES)
    partial = TEMPLATE.partial_format(query_str="Who?")
    assert partial.format_messages(context_str="x")[1].content.endswith("x\n\nQuestion: Who?")
    assert "{context_str}" in TEMPLATE.get_template()


def test_a_missing_value_is_named():
    with pytest.raises(PMLError, match="no value for"):
        TEMPLATE.format_messages(context_str="x")


def test_completing_models_take_schemas_without_messages(engine):
    schema = Schema.from_string(f'<schema name="s"><module name="rules">{RULES}</module></schema>')
    template = PMLPromptTemplate.from_schema(schema, "<prompt><rules/> {query_str}</prompt>")
    llm = CachedRAGLLM(engine=engine, max_tokens=4)
    text = template.format(query_str="Why?")
    assert text == f"{RULES} Why?"
    llm.complete(text, formatted=True)
    assert llm.complete(text, formatted=True).raw["cached_rag"]["modules_hit"] == 1
