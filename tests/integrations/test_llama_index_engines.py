"""Query and chat engines as their users write them; only the model and the retriever change.

Each is run without any KV and with it, and says how many tokens came from cache.
"""

from __future__ import annotations

import asyncio
import gc
import re
import warnings
from typing import Literal

import llama_index.core
import pytest
from conftest import CHUNKS, tiny_model
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.agent.react import ReActChatFormatter
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.cached_rag import CachedRAGLLM, module_text
from llama_index.postprocessor.cached_rag import CachedPostprocessor
from llama_index.response_synthesizers.cached_rag import CachedSynthesizer, WholeChunks
from llama_index.retrievers.cached_rag import CachedRetriever
from pydantic import BaseModel, Field

from cached_rag import Engine, StoreConfig

# Of the chat memory's database, where it is collected while a test still runs (see `unclosed`).
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:<aiosqlite:ResourceWarning")]
CHUNK_TOKENS = 50  # a few less than all chunks have together
QUESTION = "What turned green?"


@pytest.fixture(autouse=True)
def unclosed():
    """LlamaIndex leaves its chat memory's database and its own event loops to the collector."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


class Recording(CachedRAGLLM):
    """Keeps the report of every answer."""

    def _start(self, prompt, tools, options):
        stream, tools = super()._start(prompt, tools, options)
        self.__dict__.setdefault("streams", []).append(stream)
        return stream, tools

    def reports(self):
        streams = self.__dict__.pop("streams", [])
        return [stream.report for stream in streams]


@pytest.fixture
def llm(engine, monkeypatch):
    llm = Recording(engine=engine, max_tokens=6, method="reuse")
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(4))
    monkeypatch.setattr(Settings, "_llm", llm)
    monkeypatch.setattr(Settings, "_tokenizer", llm.token_ids)
    return llm


def nodes():
    return [TextNode(text=chunk, metadata={"page": i}) for i, chunk in enumerate(CHUNKS)]


@pytest.fixture
def index(llm):
    return VectorStoreIndex(nodes())


def runs(llm, use):
    """Reports without any KV, and with that of all nodes."""
    use()
    cold = llm.reports()
    llm.loaded_engine().write_back.drain()
    llm.encode_nodes(nodes())
    use()
    return cold, llm.reports()


def test_nodes_of_one_document_are_encoded_behind_each_other(llm):
    given = [TextNode(text=chunk) for chunk in CHUNKS]
    for node, document in zip(given, ("d0", "d0", "d1"), strict=True):
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    llm.encode_nodes(given)
    library = llm.loaded_engine().library
    (behind,) = library.encoded_after()
    chunks = [library.table.get(chunk).token_ids for chunk in CHUNKS]
    first, second, other = (library.shelf.fetch(behind, ids).start for ids in chunks)
    assert first == other < second


def cached(reports):
    return sum(report.cached_tokens for report in reports)


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("compact", 1),
        ("refine", 3),
        ("tree_summarize", 1),
        ("accumulate", 3),
        ("compact_accumulate", 1),
    ],
)
def test_stock_modes_reuse_every_node(llm, index, mode, calls):
    engine = index.as_query_engine(similarity_top_k=3, response_mode=mode)
    cold, warm = runs(llm, lambda: engine.query(QUESTION))
    assert cached(cold) == 0
    assert len(warm) == calls
    assert sum(report.modules_hit for report in warm) == 3
    assert cached(warm) > CHUNK_TOKENS


def test_simple_summarize_mangles_its_nodes_and_whole_synthesis_does_not(llm, index):
    # The stock mode puts the repr of a list in the prompt: metadata's line breaks are escaped.
    stock = index.as_query_engine(similarity_top_k=3, response_mode="simple_summarize")
    _, warm = runs(llm, lambda: stock.query(QUESTION))
    assert sum(report.modules_hit for report in warm) == 0
    whole = index.as_query_engine(similarity_top_k=3, response_synthesizer=CachedSynthesizer(llm))
    _, warm = runs(llm, lambda: whole.query(QUESTION))
    assert [report.modules_hit for report in warm] == [3]


def test_little_room_cuts_nodes_in_the_stock_synthesizer_only(llm, index):
    llm.encode_nodes(nodes())

    def ask(synthesizer, room):
        synthesizer._prompt_helper.chunk_size_limit = room
        engine = index.as_query_engine(similarity_top_k=3, response_synthesizer=synthesizer)
        engine.query(QUESTION)
        return [report.modules_hit for report in llm.reports()]

    cut = ask(get_response_synthesizer(llm=llm), 30)
    whole = ask(CachedSynthesizer(llm), 60)
    assert sum(cut) < 3
    assert len(whole) > 1
    assert sum(whole) == 3


def test_whole_chunks_are_packed_in_order_and_never_changed(llm):
    helper = WholeChunks.of(llm)
    prompt = get_response_synthesizer(llm=llm)._text_qa_template
    assert helper.repack(prompt, [" a ", "", "b"], llm=llm) == ["a\n\nb"]
    assert helper.repack(prompt, ["", " "], llm=llm) == [""]  # of none a tree has no end
    helper.chunk_size_limit = 45
    packs = helper.repack(prompt, CHUNKS, llm=llm)
    assert len(packs) > 1
    assert "\n\n".join(packs).split("\n\n") == CHUNKS
    helper.chunk_size_limit = 1  # too little for any: one each, and the model decides
    assert helper.repack(prompt, CHUNKS, llm=llm) == CHUNKS
    assert helper.truncate(prompt, CHUNKS) == CHUNKS


@pytest.mark.parametrize("system", [None, "Say what is true, and no more than that."])
@pytest.mark.parametrize("mode", ["tree_summarize", "accumulate", "compact_accumulate", "whole"])
def test_nodes_that_fill_the_context_fit_it(engine, monkeypatch, mode, system):
    llm = Recording(engine=engine, max_tokens=6, method="full", system_prompt=system)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", llm.token_ids)
    # One that is cut as it fills a prompt, or many whose separators count for as much as they do.
    texts = [" ".join(CHUNKS * 30)] if mode != "whole" else [f"{i}: ok" for i in range(400)]
    helper = {"prompt_helper": WholeChunks.of(llm)} if mode == "whole" else {}
    named = "tree_summarize" if mode == "whole" else mode
    synthesizer = get_response_synthesizer(llm=llm, response_mode=named, **helper)
    synthesizer.get_response(QUESTION, texts)
    longest = max(report.prompt_tokens for report in llm.reports())
    assert 900 < longest <= 1024 - 6


def test_whole_chunks_count_separators_where_they_stand(llm):
    def tokens(text):  # as GPT-2's: two line breaks are one token alone, and two before a word
        return re.findall(r"\s+(?!\S)|\s|\w+|[^\w\s]", text)

    helper = WholeChunks.from_llm_metadata(llm.metadata, tokenizer=tokens, chunk_size_limit=60)
    texts = ["Row.", "- ok", "Is it?", "1"] * 40
    packs = helper.repack(get_response_synthesizer(llm=llm)._text_qa_template, texts, llm=llm)
    assert "\n\n".join(packs) == "\n\n".join(texts)
    assert max(len(tokens(pack)) for pack in packs) in range(55, 61)


def test_streaming_and_async_queries(llm, index):
    async def aquery():
        return str(await index.as_query_engine(similarity_top_k=3).aquery(QUESTION))

    async def astream():
        engine = index.as_query_engine(similarity_top_k=3, streaming=True)
        response = await engine.aquery(QUESTION)
        return "".join([piece async for piece in response.response_gen])

    def stream():
        engine = index.as_query_engine(similarity_top_k=3, streaming=True)
        return "".join(engine.query(QUESTION).response_gen)

    llm.encode_nodes(nodes())
    text = str(index.as_query_engine(similarity_top_k=3).query(QUESTION))
    assert stream() == text
    assert asyncio.run(aquery()) == text
    assert asyncio.run(astream()) == text
    reports = llm.reports()
    assert len(reports) == 4
    assert all(report.modules_hit == 3 for report in reports)


def test_a_retriever_query_engine_learns_from_use(llm, index):
    retriever = CachedRetriever(index.as_retriever(similarity_top_k=3), llm)
    engine = RetrieverQueryEngine.from_args(retriever)
    engine.query(QUESTION)
    llm.loaded_engine().write_back.drain()
    engine.query("And who lit the lamp?")
    first, second = llm.reports()
    assert (first.modules_hit, first.modules_missed) == (0, 3)
    assert (second.modules_hit, second.modules_missed) == (3, 0)
    assert second.cached_tokens > CHUNK_TOKENS


@pytest.mark.parametrize(("mode", "calls"), [("context", 2), ("condense_plus_context", 3)])
def test_chat_engines(llm, index, mode, calls):
    def talk():
        engine = index.as_chat_engine(chat_mode=mode, similarity_top_k=3)
        engine.chat(QUESTION)
        engine.chat("And why?")

    cold, warm = runs(llm, talk)
    assert cached(cold) == 0
    assert len(warm) == calls  # condensing is a call of its own, once there is a history
    assert sum(report.modules_hit == 3 for report in warm) == 2
    engine = index.as_chat_engine(chat_mode=mode, similarity_top_k=3)
    assert "".join(engine.stream_chat(QUESTION).response_gen)


def test_a_condense_question_chat_engine(llm, index):
    engine = index.as_chat_engine(chat_mode="condense_question", similarity_top_k=3)
    _, warm = runs(llm, lambda: engine.chat(QUESTION))
    assert max(report.modules_hit for report in warm) == 3


def test_a_chat_engine_with_postprocessors(llm):
    parts = SentenceWindowNodeParser(window_size=1).get_nodes_from_documents(
        [Document(text=" ".join(CHUNKS), metadata={"page": 7})]
    )
    last = [MetadataReplacementPostProcessor("window"), CachedPostprocessor(llm)]
    chat = VectorStoreIndex(parts).as_chat_engine(
        chat_mode="context", similarity_top_k=3, node_postprocessors=last
    )
    texts = [module_text(found.node) for found in chat.chat(QUESTION).source_nodes]
    (whole,) = (text for text in texts if text.startswith(f"page: 7\n\n{CHUNKS[0]}  {CHUNKS[1]}  "))
    assert CHUNKS[2] in whole
    llm.loaded_engine().write_back.drain()
    chat.reset()
    chat.chat(QUESTION)
    assert [report.modules_hit for report in llm.reports()] == [0, 3]


def test_a_citation_engine_shows_nodes_without_metadata(llm, index):
    retriever = CachedRetriever(index.as_retriever(similarity_top_k=3), llm)
    engine = CitationQueryEngine.from_args(index, retriever=retriever)
    engine.query(QUESTION)
    llm.loaded_engine().write_back.drain()
    assert "Source 1:" in engine.query("And why?").source_nodes[0].text
    first, second = llm.reports()
    assert (second.modules_hit, second.modules_missed) == (3, 0)
    assert not [note for note in (*first.notes, *second.notes) if "retrieved" in note]


@pytest.mark.parametrize("reorder", [False, True])
def test_nodes_come_in_the_order_of_an_earlier_prompt_if_that_is_wanted(index, reorder):
    with Engine(tiny_model("llama"), StoreConfig(settle=False)) as engine:
        llm = CachedRAGLLM(engine=engine, max_tokens=2)
        found = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
        llm.encode_nodes([one.node for one in found])
        texts = [module_text(one.node) for one in found[::-1]]
        engine.generate("\n\n".join([*texts, "Why?"]), method="full", max_tokens=1)
        retriever = CachedRetriever(index.as_retriever(similarity_top_k=3), llm, reorder=reorder)
        again = [module_text(one.node) for one in retriever.retrieve(QUESTION)]
        assert again == (texts if reorder else texts[::-1])


def test_a_model_that_is_asked_something_else_warns_of_nothing(llm, index):
    found = CachedRetriever(index.as_retriever(similarity_top_k=3), llm).retrieve(QUESTION)
    llm.encode_nodes([one.node for one in found])
    assert llm.complete("Write a haiku").raw["cached_rag"]["notes"] == []
    changed = llm.complete("\n".join(module_text(one.node).lower() for one in found))
    (note,) = changed.raw["cached_rag"]["notes"]
    assert "texts that were retrieved before is in this prompt" in note


class Questions(BaseQuestionGenerator):
    def generate(self, tools, query):
        return [SubQuestion(sub_question=q, tool_name="docs") for q in ("Which metal?", "Why?")]

    async def agenerate(self, tools, query):
        return self.generate(tools, query)

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass


class First(BaseSelector):
    def _select(self, choices, query):
        return SelectorResult(selections=[SingleSelection(index=0, reason="the only one")])

    async def _aselect(self, choices, query):
        return self._select(choices, query)

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass


def tool(index):
    engine = index.as_query_engine(similarity_top_k=3)
    return QueryEngineTool.from_defaults(engine, name="docs", description="All there is to know.")


class Asked(BaseModel):
    """What to ask, and whom."""

    sub_question: str = Field(max_length=8)
    tool_name: Literal["docs"]


class Several(BaseModel):
    """Questions."""

    items: list[Asked] = Field(min_length=1, max_length=2)


def test_sub_questions_of_any_model_name_tools_that_there_are(llm, index):
    llm.max_tokens = 200
    asking = LLMQuestionGenerator.from_defaults(
        llm.as_structured_llm(Several), "Ask {tools_str} about this: {query_str}"
    )
    engine = SubQuestionQueryEngine.from_defaults(
        [tool(index)], question_gen=asking, verbose=False, use_async=False
    )
    llm.encode_nodes(nodes())
    first, *sources = engine.query(QUESTION).source_nodes
    assert first.text.startswith("Sub question: ")
    assert len(sources) >= 3
    assert llm.reports()[0].modules_hit == 3


@pytest.mark.parametrize("use_async", [False, True])
def test_a_sub_question_query_engine(llm, index, use_async):
    engine = SubQuestionQueryEngine.from_defaults(
        [tool(index)], question_gen=Questions(), verbose=False, use_async=use_async
    )
    cold, warm = runs(llm, lambda: engine.query(QUESTION))
    assert use_async or cached(cold) == 0  # those asked together share their beginning
    assert not any(report.modules_hit for report in cold)
    assert [report.modules_hit for report in warm] == [3, 3, 0]


def test_a_router(llm, index):
    engine = RouterQueryEngine(selector=First(), query_engine_tools=[tool(index)])
    cold, warm = runs(llm, lambda: engine.query(QUESTION))
    assert cached(cold) == 0
    assert [report.modules_hit for report in warm] == [3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its base looks at itself
def test_a_workflow_agent_with_a_query_tool(engine, monkeypatch, index):
    class Scripted(Recording):
        """What a random model says is no use to an agent; it reads the prompts all the same."""

        async def achat(self, messages, **kwargs):
            response = await super().achat(messages, **kwargs)
            seen = any("Observation" in (m.content or "") for m in messages[1:])
            text = (
                "Thought: known.\nAnswer: oxygen"
                if seen
                else ('Thought: look.\nAction: docs\nAction Input: {"input": "copper"}')
            )
            response.message = ChatMessage(role="assistant", content=text)
            return response

    scripted = Scripted(engine=engine, max_tokens=6, method="reuse")
    monkeypatch.setattr(Settings, "_llm", scripted)
    header = ReActChatFormatter.from_defaults(system_header="Use {tool_names}: {tool_desc}")
    agent = ReActAgent(tools=[tool(index)], llm=scripted, streaming=False, formatter=header)
    scripted.encode_nodes(nodes())

    async def main():
        return str(await agent.run(QUESTION))

    assert "oxygen" in asyncio.run(main())
    reports = scripted.reports()
    assert len(reports) == 3  # the agent, the query tool, the agent
    assert reports[1].modules_hit == 3
