"""Requests as other programs send them by default, by their sources as of November 2026.

Fields that they leave undefined do not arrive. None of the programs is run here; Open WebUI is, in
test_open_webui.py.
"""

from __future__ import annotations

import json

import httpx
import pytest
from applications import DOCUMENTS, open_webui
from conftest import CHUNKS, NEW_PROMPTS, tiny_model
from served import NAME, serving

from cached_rag import Engine, StoreConfig

SYSTEM = "Given the following conversation, answer the user's question.\nContext:\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "required": ["filepath"],
            "properties": {"filepath": {"type": "string"}},
        },
    },
}
TITLE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"title": {"type": "string", "description": "At most 5 words."}},
    "required": ["title"],
    "additionalProperties": False,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
CHAT, TEXT = "chat/completions", "completions"


def contexts(texts):
    return "".join(f"[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n" for n, text in enumerate(texts))


def said(*contents):
    roles = ["system", "user", "assistant", "user"]
    return [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]


REQUESTS = {
    "Open WebUI: an answer": (
        CHAT,
        STREAMED | {"messages": said("Be brief.", f"<source id='1'>{CHUNKS[0]}</source> Who?")},
    ),
    "Open WebUI: an answer with all advanced parameters that are not refused": (
        CHAT,
        STREAMED
        | {
            "messages": said("Be brief.", "Who?"),
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "repeat_penalty": 1.1,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "seed": 1,
            "stop": ["###"],
            "max_tokens": 20,
        },
    ),
    "Open WebUI: a title": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "### Task:\nGenerate a title.\n"}],
            "stream": False,
            "max_tokens": 200,
        },
    ),
    "Open WebUI: its other tasks, such as search queries": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "### Task:\nGenerate queries.\n"}],
            "stream": False,
        },
    ),
    "Continue: an answer, with tools for its agent": (
        CHAT,
        STREAMED
        | {
            "messages": said("You are in agent mode.", "Read the file."),
            "max_tokens": 64,
            "tools": [TOOL],
        },
    ),
    "Continue: what a tool said": (
        CHAT,
        STREAMED
        | {
            "messages": [
                *said("You are in agent mode.", "Read the file."),
                {
                    "role": "assistant",
                    "content": " ",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "read_file", "arguments": '{"filepath": "a"}'},
                        }
                    ],
                },
                {"role": "tool", "content": CHUNKS[0], "tool_call_id": "call_1"},
            ],
            "max_tokens": 20,
            "tools": [TOOL],
        },
    ),
    "Continue: autocomplete, of which it writes the prompt itself": (
        TEXT,
        {
            "prompt": "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n<|fim_middle|>",
            "max_tokens": 32,
            "temperature": 0.01,
            "stream": True,
            "stop": [
                *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
                *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"),
                *("\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```"),
                *("t.", "\nt", "<file_sep>"),
            ],
        },
    ),
    "LibreChat: an answer": (
        CHAT,
        STREAMED
        | {
            "messages": [
                {"role": "system", "content": f"The user has attached a file:\n{CHUNKS[0]}"},
                {"role": "user", "content": [{"type": "text", "text": "Who was he?"}]},
            ],
            "temperature": 1,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "user": "66f2c0ffee",
        },
    ),
    "LibreChat: a title": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Provide a concise title.\nUser: Who?"}],
            "stream": False,
            "user": "66f2c0ffee",
        },
    ),
    "LibreChat: a title by titleMethod functions": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Analyze this conversation.\nUser: Who?"}],
            "stream": False,
            "max_tokens": 64,
            "tools": [{"type": "function", "function": {"name": "title", "parameters": TITLE}}],
            "tool_choice": {"type": "function", "function": {"name": "title"}},
        },
    ),
    "LibreChat: a title by a schema": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Analyze this conversation.\nUser: Who?"}],
            "stream": False,
            "max_tokens": 64,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "title", "schema": TITLE, "strict": True},
            },
        },
    ),
    "AnythingLLM: an answer": (
        CHAT,
        {
            "stream": True,
            "messages": said(SYSTEM + contexts(CHUNKS[:2]), "Who?", "He.", "Who else?"),
            "temperature": 0.7,
            "max_tokens": 64,
        },
    ),
    "AnythingLLM: an answer, with GENERIC_OPEN_AI_REPORT_USAGE": (
        CHAT,
        STREAMED | {"messages": said(SYSTEM, "Who?"), "temperature": 0.7, "max_tokens": 64},
    ),
    "AnythingLLM: an answer in one piece, for its API": (
        CHAT,
        {"messages": said(SYSTEM, "Who?"), "temperature": 0.7, "max_tokens": 64},
    ),
}


def test_documents_in_a_tenants_prompts_are_learned_for_that_tenant():
    settings = StoreConfig(learn="recurring", sequence_bytes=0)
    with (
        Engine(tiny_model("llama"), settings) as engine,
        serving(engine, ["red:his", "blue:hers"]) as (address, service),
    ):

        def cached(names, key="his"):
            content = open_webui([DOCUMENTS[name] for name in names])
            body = {"model": NAME, "max_tokens": 2, "method": "reuse", "temperature": 0}
            headers = {"Authorization": f"Bearer {key}"}
            asked = {"messages": [{"role": "user", "content": content}]} | body
            url = f"{address}/v1/chat/completions"
            done = httpx.post(url, json=asked, headers=headers, timeout=60).json()["usage"]
            with service.tenants.using("red", None) as tenant:
                tenant.write_back.drain()
            return done["prompt_tokens_details"]["cached_tokens"] / done["prompt_tokens"]

        assert [cached(names) > 0.6 for names in ("ABC", "CBA", "BAC")] == [False, False, True]
        assert cached("BAC", "hers") == 0


@pytest.fixture(scope="module")
def address():
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine, serving(engine) as (found, _):
        yield found


@pytest.mark.parametrize("name", REQUESTS)
def test_what_a_client_sends_is_answered(address, name):
    path, body = REQUESTS[name]
    response = httpx.post(f"{address}/v1/{path}", json=body | {"model": NAME}, timeout=60)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        assert response.json()["usage"]["prompt_tokens"] > 0  # an answer may end at once
        return
    *events, end = (line for line in response.text.splitlines() if line)
    assert end == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in events]
    assert not any("error" in chunk for chunk in chunks)
    assert any(chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"])
    assert ("usage" in chunks[-1]) == ("stream_options" in body)
