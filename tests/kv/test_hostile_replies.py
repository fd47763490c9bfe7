"""A remote store that answers whatever it likes: each reply is a hit or a miss, and small."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, tiny_model
from hostile import HTTP, REDIS, hostile

from cached_rag import Engine, StoreConfig
from cached_rag.backends.machine import peak_bytes
from cached_rag.kv import transports

pytestmark = pytest.mark.slow

PROMPT = "\n\n".join([*CHUNKS, "Who lit the lamp?"])


def _answers(url: str) -> None:
    settings = StoreConfig(remote=url, remote_timeout=1.0, sequence_bytes=0, finish_seconds=0.0)
    with Engine(tiny_model("llama"), settings) as engine:
        before = peak_bytes()
        engine.register(CHUNKS)
        assert engine.generate(PROMPT, method="reuse", max_tokens=4).text == _expected()
        engine.encode(CHUNKS)
        assert engine.generate(PROMPT, method="full", max_tokens=4).text == _expected()
    assert peak_bytes() - before < 200 << 20


def _expected() -> str:
    with Engine(tiny_model("llama")) as engine:
        return engine.generate(PROMPT, method="full", max_tokens=4).text


@pytest.mark.parametrize("reply", REDIS)
def test_what_redis_answers_is_a_miss_at_worst(reply, monkeypatch):
    monkeypatch.setattr(transports, "_FIRST_S", 0.01)
    with hostile(REDIS[reply]) as port:
        _answers(f"redis://127.0.0.1:{port}/0")


@pytest.mark.parametrize("reply", HTTP)
def test_what_an_object_store_answers_is_a_miss_at_worst(reply, monkeypatch):
    monkeypatch.setattr(transports, "_FIRST_S", 0.01)
    with hostile(HTTP[reply]) as port:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"AWS_{name}", "user")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        _answers("s3://bucket/kv")
