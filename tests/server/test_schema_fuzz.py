"""Requests made from the server's own OpenAPI description, right ones and wrong ones.

`SCHEMA_EXAMPLES=2000 pytest tests/server/test_schema_fuzz.py` looks for longer.
"""

from __future__ import annotations

import os
import time

import pytest
from conftest import CHUNKS, tiny_model
from hypothesis import HealthCheck, given, settings
from served import GREEDY, MESSAGES, NAME, serving

from cached_rag import Engine

pytestmark = pytest.mark.slow
schemathesis = pytest.importorskip("schemathesis", reason="it needs Python 3.11")

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "25"))
KINDS = ("application/json", "text/plain; version=0.0.4", "text/event-stream")
# Most seconds of a request; the longest answer is of 1024 tokens.
PATIENCE = 30


PATHS = [
    *(("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/documents")),
    *(("DELETE", "/v1/documents"), ("GET", "/v1/models"), ("GET", "/v1/models/{name}")),
    *(("GET", "/health"), ("GET", "/metrics"), ("POST", "/v1/responses")),
    ("POST", "/v1/embeddings"),
]
GOOD = {
    "/v1/chat/completions": GREEDY | {"messages": MESSAGES},
    "/v1/completions": GREEDY | {"prompt": CHUNKS[0]},
    "/v1/documents": {"texts": [CHUNKS[0]]},
    "/v1/responses": {"model": NAME, "input": CHUNKS[0], "max_output_tokens": 8},
}


@pytest.fixture(scope="module")
def described():
    with Engine(tiny_model("llama")) as engine, serving(engine) as (address, _):
        engine.encode(CHUNKS, context=None)
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")


def test_every_path_is_tried(described):
    found = [one.ok() for one in described.get_all_operations()]
    assert {(one.method.upper(), one.path) for one in found} == set(PATHS)


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
@pytest.mark.parametrize(("method", "path"), PATHS, ids=[" ".join(one) for one in PATHS])
def test_no_request_is_a_failure_of_the_server(described, method, path, mode):
    operation = described[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
        return  # there is nothing to get wrong

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case):
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = NAME  # else hardly any would get further
        begin = time.monotonic()
        response = case.call()
        assert time.monotonic() - begin < PATIENCE
        assert response.status_code < 500
        [kind] = response.headers["content-type"]
        assert kind.startswith(KINDS)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]
            assert len(response.content) < 4000

    ask()
    if path in GOOD:  # control: not all are refused
        assert operation.Case(body=GOOD[path]).call().status_code == 200
