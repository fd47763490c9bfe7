"""Chains as their authors wrote them: only the model is exchanged and the retriever wrapped.

Each is run twice, without any KV and with it, and says how many tokens came from cache.
"""

from __future__ import annotations

import asyncio

import pytest
from conftest import CHUNKS
from langchain_cached_rag import CachedRAGLLM, CachedRetriever, CacheReportHandler, ChatCachedRAG
from langchain_classic.agents import AgentExecutor, create_react_agent
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.summarize import load_summarize_chain
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import create_retriever_tool

pytestmark = [
    # langchain-classic warns of its own age
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DOCUMENTS = [Document(chunk, metadata={"source": f"{i}.txt"}) for i, chunk in enumerate(CHUNKS)]
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "You answer briefly."), ("human", "{context}\n\nQuestion: {question}")]
)
STUFF = ChatPromptTemplate.from_messages(
    [
        ("system", "Use this:\n\n{context}"),
        MessagesPlaceholder("chat_history", optional=True),
        ("human", "{input}"),
    ]
)
REACT = PromptTemplate.from_template(
    "Tools:\n{tools}\nNames: {tool_names}\nQuestion: {input}\nThought:{agent_scratchpad}"
)
CHUNK_TOKENS = 50  # a few less than all chunks have together


class AllChunks(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager, **kwargs):
        return DOCUMENTS


@pytest.fixture
def llm(engine):
    return ChatCachedRAG(engine=engine, max_tokens=6, method="reuse")


@pytest.fixture
def retriever(llm):
    return CachedRetriever(retriever=AllChunks(), llm=llm)


def join(documents):
    return "\n\n".join(document.page_content for document in documents)


def runs(llm, use):
    """Answers, and the reports of all requests, before and after the texts were encoded."""
    answers, reports = [], []
    for prepare in (lambda: None, lambda: llm.encode(CHUNKS)):
        prepare()
        handler = CacheReportHandler()
        answers.append(use({"callbacks": [handler]}))
        reports.append(handler.reports)
        llm.engine.write_back.drain()
    return answers, reports


def cached(reports):
    return max(report.cached_tokens for report in reports)


def test_a_chain_by_hand(llm, retriever):
    chain = {"context": retriever | join, "question": RunnablePassthrough()} | PROMPT | llm
    (before, after), (cold, warm) = runs(llm, lambda c: chain.invoke("What turned green?", c))
    assert (cached(cold), cold[0].modules_hit) == (0, 0)
    assert cached(warm) > CHUNK_TOKENS
    assert warm[0].modules_hit == 3
    assert after.usage_metadata["input_token_details"]["cache_read"] == warm[0].cached_tokens
    exact = {"context": retriever | join, "question": RunnablePassthrough()} | PROMPT
    exact |= llm.bind(method="cacheblend", recompute_ratio=1.0)
    assert exact.invoke("What turned green?").content == before.content


def test_stuff_and_retrieval_chains(llm, retriever):
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, STUFF))
    answers, (cold, warm) = runs(llm, lambda c: chain.invoke({"input": "What turned green?"}, c))
    assert isinstance(answers[1]["answer"], str)
    assert cached(cold) == 0
    assert cached(warm) > CHUNK_TOKENS


def test_a_document_prompt_with_metadata(llm, retriever):
    document_prompt = PromptTemplate.from_template("[{source}] {page_content}")
    stuff = create_stuff_documents_chain(llm, STUFF, document_prompt=document_prompt)
    chain = create_retrieval_chain(retriever, stuff)
    _, (cold, warm) = runs(llm, lambda c: chain.invoke({"input": "What turned green?"}, c))
    assert warm[0].modules_hit == 3
    assert cached(warm) > CHUNK_TOKENS > cached(cold) == 0


def test_a_conversation_with_history(llm, retriever):
    rephrase = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}\nRephrase that.")]
    )
    aware = create_history_aware_retriever(llm, retriever, rephrase)
    chain = create_retrieval_chain(aware, create_stuff_documents_chain(llm, STUFF))
    history = [HumanMessage("What is copper?"), AIMessage("A metal.")]
    given = {"input": "Why green?", "chat_history": history}
    answers, (cold, warm) = runs(llm, lambda c: chain.invoke(given, c))
    assert len(warm) == 2  # the question is rephrased first
    assert cached(cold) == 0
    assert warm[1].cached_tokens > CHUNK_TOKENS
    assert answers[0]["context"] == DOCUMENTS


def test_a_conversation_that_langchain_remembers(llm, retriever):
    stores = {}
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, STUFF))
    talk = RunnableWithMessageHistory(
        chain,
        lambda session: stores.setdefault(session, InMemoryChatMessageHistory()),
        input_messages_key="input",
        history_messages_key="chat_history",
        output_messages_key="answer",
    )
    handler = CacheReportHandler()
    config = {"configurable": {"session_id": "a"}, "callbacks": [handler]}
    llm.encode(CHUNKS)
    for question in ("What turned green?", "Why?", "When?"):
        talk.invoke({"input": question}, config)
    assert len(stores["a"].messages) == 6
    prompts = [report.prompt_tokens for report in handler.reports]
    assert prompts == sorted(prompts)
    assert all(report.cached_tokens > CHUNK_TOKENS for report in handler.reports)


def test_an_agent_whose_tool_returns_documents(engine):
    class Scripted(CachedRAGLLM):
        """What a random model says is no use to an agent; it reads the prompts all the same."""

        def _generate(self, prompts, *args, **kwargs):
            result = super()._generate(prompts, *args, **kwargs)
            is_first = "Observation" not in prompts[0]
            text = (
                " Look.\nAction: search\nAction Input: copper"
                if is_first
                else (" Known.\nFinal Answer: oxygen")
            )
            result.generations[0][0].text = text
            return result

        def _stream(self, prompt, *args, **kwargs):
            from langchain_core.outputs import GenerationChunk

            (generation,) = self._generate([prompt], *args, **kwargs).generations[0]
            yield GenerationChunk(text=generation.text, generation_info=generation.generation_info)

    llm = Scripted(engine=engine, max_tokens=4, method="reuse")
    retriever = CachedRetriever(retriever=AllChunks(), llm=llm)
    tool = create_retriever_tool(retriever, "search", "Finds documents.")
    agent = AgentExecutor(agent=create_react_agent(llm, [tool], REACT), tools=[tool])
    answers, (cold, warm) = runs(llm, lambda c: agent.invoke({"input": "Why green?"}, c))
    assert [answer["output"] for answer in answers] == ["oxygen", "oxygen"]
    assert len(warm) == 2
    assert cold[0].cached_tokens == cold[1].cached_tokens == 0
    assert warm[0].modules_hit == 0  # no document in the first prompt
    assert warm[1].cached_tokens > CHUNK_TOKENS


def test_map_and_reduce_over_documents(llm):
    chain = load_summarize_chain(llm, chain_type="map_reduce", token_max=900)
    given = {"input_documents": DOCUMENTS}
    _, (cold, warm) = runs(llm, lambda c: chain.invoke(given, c))
    assert cached(cold) == 0
    hits = [report for report in warm if report.modules_hit]
    assert len(hits) == len(DOCUMENTS)
    assert len(warm) == len(DOCUMENTS) + 1  # and the summary of the summaries
    assert sum(report.cached_tokens for report in warm) > CHUNK_TOKENS


def test_a_string_chain(engine):
    llm = CachedRAGLLM(engine=engine, max_tokens=6, method="reuse")
    prompt = PromptTemplate.from_template("{context}\n\nQuestion: {question}")
    documents = CachedRetriever(retriever=AllChunks(), llm=llm) | join
    chain = {"context": documents, "question": RunnablePassthrough()} | prompt | llm
    _, (cold, warm) = runs(llm, lambda c: chain.invoke("What turned green?", c))
    assert cached(cold) == 0
    assert cached(warm) > CHUNK_TOKENS
    assert isinstance((chain | StrOutputParser()).invoke("Why?"), str)


def test_what_a_template_alters_is_prefilled_and_the_rest_is_not(llm):
    altered = "Sulphur & copper < iron, as the keeper's book of 1911 has it; nobody asked why."
    llm.encode([*CHUNKS, altered])
    prompt = ChatPromptTemplate(
        [("human", "{{#docs}}{{page_content}}\n{{/docs}}Why?")], template_format="mustache"
    )
    docs = [{"page_content": text} for text in (CHUNKS[0], altered, CHUNKS[1])]
    escaped = (prompt | llm).invoke({"docs": docs}).response_metadata["cached_rag"]
    assert escaped["modules_hit"] == 2
    verbatim = ChatPromptTemplate(
        [("human", "{{#docs}}{{{page_content}}}\n{{/docs}}Why?")], template_format="mustache"
    )
    exact = (verbatim | llm).invoke({"docs": docs}).response_metadata["cached_rag"]
    assert exact["modules_hit"] == 3
    trimmed = PROMPT.format_messages(context=f"  {CHUNKS[0]}\n ", question="Why?")
    assert llm.invoke(trimmed).response_metadata["cached_rag"]["modules_hit"] == 1


def test_reports_reach_handlers_in_every_way_of_running(llm, retriever, capsys):
    chain = {"context": retriever | join, "question": RunnablePassthrough()} | PROMPT | llm
    llm.encode(CHUNKS)
    handler = CacheReportHandler(prints=True)
    config = {"callbacks": [handler]}
    chain.invoke("Why?", config)
    list(chain.stream("Why?", config))
    chain.batch(["Why?", "When?"], config)

    async def main():
        await chain.ainvoke("Why?", config)
        async for _ in chain.astream("Why?", config):
            pass
        return [event async for event in chain.astream_events("Why?", config, version="v2")]

    events = asyncio.run(main())
    assert len(handler.reports) == 7
    assert {report.modules_hit for report in handler.reports} == {3}
    assert capsys.readouterr().err.count("3 chunks hit") == 7
    tokens = [e for e in events if e["event"] == "on_chat_model_stream"]
    assert len(tokens) > 2
    (end,) = [e for e in events if e["event"] == "on_chat_model_end"]
    message = end["data"]["output"]
    assert message.response_metadata["cached_rag"]["modules_hit"] == 3
    assert message.usage_metadata["input_token_details"]["cache_read"] > CHUNK_TOKENS
    assert message.content == "".join(e["data"]["chunk"].content for e in tokens)


def test_new_tokens_reach_handlers(llm):
    from langchain_core.callbacks import BaseCallbackHandler

    class Tokens(BaseCallbackHandler):
        def __init__(self):
            self.tokens = []

        def on_llm_new_token(self, token, **_):
            self.tokens.append(token)

    seen = Tokens()
    streaming = ChatCachedRAG(engine=llm.engine, max_tokens=6, streaming=True)
    answer = streaming.invoke("Why is copper green?", config={"callbacks": [seen]})
    assert "".join(seen.tokens) == answer.content
    other = CachedRAGLLM(engine=llm.engine, max_tokens=6)
    seen = Tokens()
    text = "".join(other.stream("Why is copper green?", config={"callbacks": [seen]}))
    assert "".join(seen.tokens) == text
