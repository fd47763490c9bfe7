"""No request, whatever it has in it, makes the server fail."""

from __future__ import annotations

import gzip
import json
import random
import re

import httpx
import pytest
from conftest import CHUNKS, tiny_model
from served import GREEDY, serving

from cached_rag import Engine

VALUES = [
    *(None, True, False, -1, 0, 1, 2, 2**31, 2**63, 2**70, -(2**63), 10**400),
    *(1e-308, 1e308, -1e-308, 0.5, 1e-5, float("nan"), float("inf"), float("-inf")),
    *("", "x", "0", "nan", "\ud800", "a\udfffb", "a\x00", "x" * 2000, "<|im_end|>", "{documents}"),
    *([], [None], [[]], [1], [""], ["x"], ["\ud800"], ["x"] * 65, [{}], {}, {"type": "text"}),
    *({"\ud800": 1}, [[[[[[[[]]]]]]]], "epic:anchor_tokens=9999999999999999999999"),
    *("random:seed=1e400", "random:seed=99999999999999999999", "cacheblend:check_layer=9999"),
    *("cacheblend:check_layer=[3]", "epic:anchor_tokens=1.5", "infoflow:depth=-0.0", "union"),
    *("cacheblend:check_layer=[],gradual=true", "anchorflow:recompute_ratio=1e-320", "a+b:=,+"),
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": "x", "name": "\ud800"}],
    [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
    [{"role": "assistant", "content": ""}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "x", "\ud800": 1}],
]
FIELDS = [
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "stop", "seed"),
    *("max_completion_tokens", "temperature", "top_p", "method", "quality", "top_k"),
    *("recompute_ratio", "repetition_penalty", "cache_salt", "n", "logit_bias", "tools", "\ud800"),
]
CHAT = GREEDY | {"max_tokens": 1, "messages": [{"role": "user", "content": CHUNKS[0]}]}
COMPLETION = GREEDY | {"max_tokens": 1, "prompt": CHUNKS[0]}
DOCUMENTS = {"texts": ["A text."], "messages": [{"role": "user", "content": "{documents}"}]}


@pytest.fixture(scope="module")
def asked():
    """Sends a body (what is not bytes, as JSON); the response, which is no failure."""
    with Engine(tiny_model("llama")) as engine, serving(engine) as (address, _):
        engine.encode(CHUNKS, context=None)
        with httpx.Client(base_url=f"{address}/v1", timeout=60) as client:

            def ask(path, body, method="POST", **headers):
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                headers = {"Content-Type": "application/json"} | headers
                got = client.request(method, path, content=content, headers=headers)
                assert got.status_code in (200, 400, 404), (got.text[:300], content[:300])
                if got.status_code != 200:
                    assert len(got.content) < 3000
                    assert got.json()["error"]["type"] == "invalid_request_error"
                if "data: " in got.text[:6]:
                    assert '"server_error"' not in got.text
                return got

            yield ask


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_any_field(asked, field):
    path, body = ("completions", COMPLETION) if field == "prompt" else ("chat/completions", CHAT)
    for value in VALUES:
        asked(path, body | {field: value})


@pytest.mark.parametrize(
    "field", ["texts", "messages", "cache_salt", "pinned", "ttl_seconds", "\ud800"]
)
def test_any_value_of_documents(asked, field):
    for value in VALUES:
        asked("documents", DOCUMENTS | {field: value})
        asked("documents", DOCUMENTS | {field: value}, "DELETE")


@pytest.mark.parametrize("seed", range(4))
def test_values_together(asked, seed):
    draw = random.Random(seed)
    for _ in range(40):
        fields = draw.sample(FIELDS[5:18], 4)
        body = CHAT | {field: draw.choice(VALUES) for field in fields}
        asked("chat/completions", body | {"stream": draw.random() < 0.3})


@pytest.mark.parametrize(
    "changed",
    [
        {"repetition_penalty": 1e-4, "temperature": 1e-4},
        {"repetition_penalty": 1e4, "temperature": 2},
        {"temperature": 1e-4, "top_p": 1e-300},
        {"top_k": 2**62, "temperature": 1},
        {"recompute_ratio": 1e-300},
        {"seed": -(2**63) + 1, "temperature": 1},
    ],
)
def test_the_most_extreme_values_that_are_taken(asked, changed):
    assert asked("chat/completions", CHAT | changed).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fields", {str(number): 0 for number in range(200)}),
        ("messages", [{str(number): 0 for number in range(200)}]),
        ("messages", [{"role": "user", "content": "lone \ud800"}]),
        ("stop", "\ud800"),
        ("cache_salt", "\udc00"),
        ("repetition_penalty", 1e-308),
        ("recompute_ratio", float("nan")),
        ("messages", [0] * 10_001),
    ],
)
def test_what_cannot_be_is_refused_with_its_fields_name(asked, field, value):
    got = asked("chat/completions", CHAT | (value if field == "fields" else {field: value}))
    assert got.status_code == 400
    assert field in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0.content"),
        ({"stop": [5]}, "stop.0"),
        ({"stop": {}}, "stop"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"Made-up[x]": 1}, "Made-up[x]"),
    ],
)
def test_places_are_told_in_the_clients_words(asked, changed, place):
    said = asked("chat/completions", CHAT | changed).json()["error"]["message"]
    places = [one.partition(": ")[0] for one in said.split("; ")]
    assert place in places
    assert not re.search(r"function-|Value error|0x|list\[|\bstr\b|NamedChoice", said)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"[]", b'"x"', b"1", b"{", b"\xff\xfe", b"\x00", b"NaN", b"{}"),
        *(b"[" * 200_000, b'{"a":' * 200_000, b"1" * 10_000, b"[],[]" * 1000),
        b'{"messages": [' + b"[" * 500 + b"]" * 500 + b"]}",
        b'{"tools": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": "tiny", "model": 3, "prompt": "x"}',
        b'{"' + b"k" * 100_000 + b'": 1}',
        b'{"tools": "' + b"x" * 100_000 + b'"}',
        gzip.compress(json.dumps(COMPLETION).encode(), mtime=0),
    ],
    ids=lambda body: body[:20],
)
def test_any_body(asked, body):
    for path in ("chat/completions", "completions", "documents"):
        assert asked(path, body).status_code == 400


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is to be a JSON object"),
        ('{"prompt": "größe"}'.encode("cp1252"), "send JSON in UTF-8"),  # as of PowerShell 5.1
        (gzip.compress(b"{}", mtime=0), "neither compressed nor"),
    ],
)
def test_what_is_no_json_is_told_what_would_be(asked, body, said):
    assert said in asked("completions", body).json()["error"]["message"]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "/", "x"])
def test_only_json_is_taken(asked, kind):
    """What a page in a browser may send anywhere without being asked is none."""
    body = json.dumps(COMPLETION).encode()
    assert asked("completions", body, **{"Content-Type": kind}).status_code == 400
