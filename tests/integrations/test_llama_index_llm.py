"""CachedRAGLLM by itself: chat, completion, streaming, async, events, settings."""

from __future__ import annotations

import asyncio
import copy
from typing import ClassVar

import pytest
from conftest import CHUNKS, NEW_PROMPTS, count_at_rest, tiny_model, tiny_tokenizer
from doubles import Recording, slow
from llama_index.core import Document
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ThinkingBlock, ToolCallBlock
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.extractors import DocumentContextExtractor
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.llms.cached_rag import CachedRAGLLM, CacheReportHandler

from cached_rag import CachedRAG, ConfigError, Engine, wrap_model

QUESTION = "Why is copper green, and the lamp lit?"
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(content=QUESTION)]


@pytest.fixture
def engine():
    return Engine(Recording(tiny_model("llama")), NEW_PROMPTS)


@pytest.fixture
def llm(engine):
    return CachedRAGLLM(engine=engine, max_tokens=8)


def test_it_is_an_llm():
    assert BaseLLM in CachedRAGLLM.__mro__
    assert CachedRAGLLM.class_name() == "CachedRAGLLM"
    assert "method='auto'" in repr(CachedRAGLLM())


def test_all_ways_of_chatting_give_the_same_text(llm):
    text = llm.chat(MESSAGES).message.content
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert llm.loaded_engine().generate(prompt, max_tokens=8).text == text
    streamed = list(llm.stream_chat(MESSAGES))
    assert streamed[-1].message.content == text
    assert "".join(response.delta for response in streamed) == text

    async def main():
        whole = (await llm.achat(MESSAGES)).message.content
        pieces = [response.delta async for response in await llm.astream_chat(MESSAGES)]
        return whole, "".join(pieces)

    assert asyncio.run(main()) == (text, text)


def test_all_ways_of_completing_give_the_same_text(llm):
    text = llm.complete(QUESTION).text
    chat = [{"role": "user", "content": QUESTION}]
    assert llm.loaded_engine().generate(chat, max_tokens=8).text == text
    assert "".join(r.delta for r in llm.stream_complete(QUESTION)) == text

    async def main():
        whole = (await llm.acomplete(QUESTION)).text
        pieces = [response.delta async for response in await llm.astream_complete(QUESTION)]
        return whole, "".join(pieces)

    assert asyncio.run(main()) == (text, text)
    bare = llm.complete(QUESTION, formatted=True).text
    assert bare == llm.loaded_engine().generate(QUESTION, max_tokens=8).text


def test_prompts_are_those_of_the_models_own_template(llm):
    rendered = llm.messages_to_prompt(MESSAGES)
    assert (
        rendered
        == llm.loaded_engine()
        .tokenization.template.render(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        )
        .text
    )
    own = CachedRAGLLM(
        engine=llm.loaded_engine(), messages_to_prompt=lambda messages: "my own", max_tokens=4
    )
    assert own.chat(MESSAGES).message.content == own.complete("my own", formatted=True).text
    system = CachedRAGLLM(engine=llm.loaded_engine(), system_prompt="Be brief.", max_tokens=8)
    assert system.complete(QUESTION).text == llm.chat(MESSAGES).message.content
    tool = [*MESSAGES, ChatMessage(role="tool", content="x"), ChatMessage(role="tool", content="y")]
    assert llm.chat(tool).message.content


@pytest.mark.parametrize("role", ["assistant", "model", "chatbot"])
def test_a_models_messages_may_think_and_call_and_show_nothing(llm, role):
    call = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs={"at": "Rome"})
    blocks = [ThinkingBlock(content="hm"), TextBlock(text="Five."), call]
    (told,) = llm.chat_prompt([ChatMessage(role=role, blocks=blocks)])
    assert (told["role"], told["reasoning_content"]) == ("assistant", "hm")
    assert told["tool_calls"][0]["function"]["name"] == "look"
    image = ImageBlock(image=b"", image_mimetype="image/png")
    with pytest.raises(ValueError, match=r"role 'assistant'.*type 'image'.*reads text only"):
        llm.chat_prompt([ChatMessage(role=role, blocks=[image])])


def test_usage_and_report_come_with_every_answer(llm):
    llm.encode(CHUNKS)
    asked = [ChatMessage(content=f"{CHUNKS[0]}\n\n{QUESTION}")]
    for response in (llm.chat(asked), list(llm.stream_chat(asked))[-1]):
        report = response.raw["cached_rag"]
        assert report["modules_hit"] == 1
        assert report["output_tokens"] == response.raw["usage"]["completion_tokens"] > 0
        details = response.raw["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == report["cached_tokens"] > 0
        assert response.message.additional_kwargs["prompt_tokens"] == report["prompt_tokens"]
        assert response.raw["finish_reason"] in ("stop", "length")


def test_log_probabilities_are_in_llama_indexs_own_place(llm):
    ways = {
        "chat": llm.chat(MESSAGES, logprobs=2),
        "stream_chat": list(llm.stream_chat(MESSAGES, logprobs=2))[-1],
        "complete": llm.complete(QUESTION, logprobs=2),
        "stream_complete": list(llm.stream_complete(QUESTION, logprobs=2))[-1],
        "achat": asyncio.run(llm.achat(MESSAGES, logprobs=2)),
    }
    for way, response in ways.items():
        found = response.logprobs
        assert len(found) == response.raw["usage"]["completion_tokens"], way
        assert all(len(at) == 2 and at[0].logprob >= at[1].logprob for at in found)
        spelled = b"".join(bytes(at[0].bytes) for at in found).decode()
        text = response.text if "complete" in way else response.message.content
        assert spelled.startswith(text)
        assert "".join(at[0].token for at in found) == spelled
    assert llm.chat(MESSAGES, logprobs=0).logprobs[0][0].logprob <= 0
    assert llm.chat(MESSAGES).logprobs is None
    assert llm.complete(QUESTION).logprobs is None


def test_callbacks_and_token_counters_hear_of_it(llm):
    debug, counter = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    llm.callback_manager = CallbackManager([debug, counter])
    response = llm.chat(MESSAGES)
    llm.complete(QUESTION)
    asyncio.run(llm.achat(MESSAGES))
    assert len(debug.get_llm_inputs_outputs()) == 3
    first = counter.llm_token_counts[0]
    assert first.prompt_token_count == response.raw["usage"]["prompt_tokens"]
    assert first.completion_token_count == response.raw["usage"]["completion_tokens"]


def test_instrumentation_events_are_fired(llm):
    class Names(BaseEventHandler):
        names: ClassVar[list[str]] = []

        def handle(self, event, **kwargs):
            self.names.append(type(event).__name__)

    handler = Names()
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        list(llm.stream_chat(MESSAGES))
        llm.complete(QUESTION)
    finally:
        dispatcher.event_handlers.remove(handler)
    assert handler.names[0] == "LLMChatStartEvent"
    assert "LLMChatInProgressEvent" in handler.names
    assert handler.names[-2:] == ["LLMCompletionStartEvent", "LLMCompletionEndEvent"]


def test_reports_are_collected_and_printed(llm, capsys):
    llm.encode(CHUNKS)
    handler = CacheReportHandler(prints=True)
    get_dispatcher().add_event_handler(handler)
    try:
        list(llm.stream_chat([ChatMessage(content=f"{CHUNKS[0]}\n\n{QUESTION}")]))
        asyncio.run(llm.acomplete(QUESTION))
    finally:
        get_dispatcher().event_handlers.remove(handler)
    assert [report.modules_hit for report in handler.reports] == [1, 0]
    assert handler.reports[0].output_tokens > 0
    assert capsys.readouterr().err.count("prompt tokens from cache") == 2


def test_metadata_and_serialisation_keep_the_truth(llm):
    around = llm.loaded_engine().count_tokens([{"role": "user", "content": ""}])
    assert llm.metadata.context_window == 1024 - around
    assert llm.metadata.num_output == 8
    assert llm.metadata.is_chat_model
    assert llm.metadata.is_function_calling_model
    assert CachedRAGLLM(engine=llm.loaded_engine(), context_window=64).metadata.context_window == 64
    set_ = CachedRAGLLM(
        model="llama", max_tokens=8, method="epic", stop=["x"], seed=3, dtype="float32"
    )
    kept = CachedRAGLLM.from_dict(set_.to_dict())
    assert kept.to_dict() == set_.to_dict()
    assert (kept.model, kept.method, kept.stop, kept.seed) == ("llama", "epic", ["x"], 3)


def test_settings_reach_the_engine_and_bad_ones_are_refused(llm):
    full = llm.chat(MESSAGES, method="full", max_tokens=2)
    assert full.raw["cached_rag"]["method"] == "full"
    exact = llm.chat(MESSAGES, quality="exact", max_tokens=2)
    assert exact.raw["cached_rag"]["method"] == "prefix"
    assert full.raw["usage"]["completion_tokens"] <= 2
    with pytest.raises(ConfigError, match="unknown setting"):
        llm.chat(MESSAGES, no_such_option=1)
    with pytest.raises(ValueError, match="recompute_ration"):
        CachedRAGLLM(recompute_ration=0.5)
    with pytest.raises(ConfigError, match="temperature"):
        CachedRAGLLM(temperature=-1)
    image = ChatMessage(blocks=[TextBlock(text="See"), ImageBlock(image=b"\x89PNG")])
    with pytest.raises(ValueError, match="of type 'image'"):
        llm.chat([image])


def test_options_of_hosted_models_are_passed_over_in_calls(llm):
    """LlamaIndex's own `DocumentContextExtractor` gives extra_headers to any model."""
    hosted = {"extra_headers": {"anthropic-beta": "x"}, "extra_query": {}, "timeout": 3}
    assert llm.complete(QUESTION, **hosted).text == llm.complete(QUESTION).text
    with pytest.raises(ConfigError, match="unknown setting 'extra_body'"):  # it asks for another
        llm.complete(QUESTION, extra_body={"top_k": 3})
    context = DocumentContextExtractor(SimpleDocumentStore(), llm)._agenerate_node_context
    node, document = TextNode(text=CHUNKS[0]), Document(text=" ".join(CHUNKS))
    found = asyncio.run(context(node, {}, document, "Say what it is about.", "context"))
    assert found["context"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"completion_to_prompt": lambda text: f"Q: {text}\nA:"}, "Q: Why?\nA:"),
        ({"system_prompt": "Be brief."}, "Be brief.\n\nWhy?"),
        ({"query_wrapper_prompt": PromptTemplate("Q: {query_str}\nA:")}, "Q: Why?\nA:"),
    ],
)
def test_a_model_without_chat_template_is_asked_alike_by_complete_and_predict(options, asked):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    model = wrap_model(tiny_model("llama").decoder.model, tokenizer, name="base", revision="base")
    with Engine(model, NEW_PROMPTS) as engine:
        llm = CachedRAGLLM(engine=engine, max_tokens=4, **options)
        assert llm.complete("Why?").raw["usage"]["prompt_tokens"] == engine.count_tokens(asked)
        assert llm.complete("Why?").text == llm.complete(asked, formatted=True).text
        assert llm.predict(PromptTemplate("{x}"), x="Why?") == llm.complete("Why?").text
        assert llm.metadata.context_window < engine.model.context_length  # what stands around it
        llm.encode(CHUNKS, prompt=PromptTemplate("Read {context_str}"))
        (head,) = {one.prefix_ids for one in engine.library.encoded_after()}
        assert tokenizer.decode(head).startswith(asked.split("Why?")[0])


def test_drafts_are_a_setting(llm):
    plain = CachedRAGLLM(engine=llm.loaded_engine(), drafts=False)
    found = [one.chat(MESSAGES, max_tokens=60) for one in (plain, llm)]
    assert found[0].message.content == found[1].message.content
    drafted = [answer.raw["cached_rag"]["drafted_tokens"] for answer in found]
    assert drafted[1] > drafted[0] == 0


def test_engines_are_loaded_late_and_shared(monkeypatch, tmp_path, engine):
    loads = []

    def load(name, backend, **options):
        loads.append(name)
        return tiny_model("llama")

    monkeypatch.setattr("cached_rag.engine.engine.load_backend", load)
    one, two = (CachedRAGLLM(model="tiny-c", max_tokens=2) for _ in range(2))
    assert loads == []
    assert one.loaded_engine() is two.loaded_engine()
    assert loads == ["tiny-c"]
    with CachedRAG.open(tmp_path, engine=engine) as rag:
        assert CachedRAGLLM(engine=rag).loaded_engine() is engine


def test_a_prompt_gives_its_head_to_what_is_encoded(llm):
    template = PromptTemplate("Read this.\n{context_str}\nNow: {query_str}")
    llm.encode(CHUNKS, prompt=template)
    answer = llm.predict(template, context_str=CHUNKS[1], query_str=QUESTION)
    assert isinstance(answer, str)
    (head,) = {one.prefix_ids for one in llm.loaded_engine().library.encoded_after()}
    rendered = llm.messages_to_prompt([ChatMessage(content="Read this.\n")])
    assert len(head) > len(llm.token_ids("Read this."))
    assert rendered.startswith(llm.loaded_engine().model.tokenizer.decode(head)[:20])
    with pytest.raises(ValueError, match="no variable 'documents'"):
        llm.encode(CHUNKS, prompt=template, variable="documents")
    with pytest.raises(ValueError, match=r"\{context_str\} stands before \{query_str\}"):
        llm.encode(CHUNKS, prompt=template, variable="query_str")


def test_what_a_prompt_was_filled_with_belongs_to_its_head(llm):
    template = PromptTemplate(
        "You are a {role}.\n{context_str}\n{query_str}", template_var_mappings={"who": "role"}
    )
    for values in ({"role": "pirate"}, {"who": "pirate"}):
        filled = template.partial_format(**values)
        llm.encode(CHUNKS, prompt=filled)
        llm.predict(filled, context_str=CHUNKS[1], query_str=QUESTION)
    (head,) = {one.prefix_ids for one in llm.loaded_engine().library.encoded_after()}
    assert "pirate" in llm.loaded_engine().model.tokenizer.decode(head)
    with pytest.raises(ValueError, match=r"\{role\} stands before"):
        llm.encode(CHUNKS, prompt=template)


@pytest.mark.parametrize("streams", [True, False])
def test_cancelling_stops_the_generation_and_the_loop_goes_on(engine, llm, streams):
    steps, beats = engine.model.steps, []
    engine.model.before = slow(0.02)
    options = {"max_tokens": 400, "temperature": 5.0, "seed": 1}

    async def use():
        if streams:
            async for _ in await llm.astream_chat(MESSAGES, **options):
                pass
        else:
            await llm.achat(MESSAGES, **options)

    async def main():
        task = asyncio.create_task(use())
        while len(steps) < 3:
            await asyncio.sleep(0.001)
            beats.append(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert count_at_rest(steps) < 50
    assert len(beats) > 5
