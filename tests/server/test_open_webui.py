"""Open WebUI, run for real in front of the server.

Opt-in: `CACHED_RAG_OPEN_WEBUI` is the path of its executable (docs/uis.md says how to install it).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess

import httpx
import pytest
from conftest import smollm2
from served import NAME, running, until

from cached_rag import CachedRAG, Engine, StoreConfig
from cached_rag.server.index import ServedIndex

EXECUTABLE = os.environ.get("CACHED_RAG_OPEN_WEBUI", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not EXECUTABLE, reason="CACHED_RAG_OPEN_WEBUI names no executable"),
]
WORDS = ["valve", "pump", "wheel", "oil", "lamp", "copper", "water", "pressure", "left", "right"]
QUESTIONS = ["What is said of valves?", "What of the pump?", "And of lamps?", "And of oil?"]


def section(number):
    """About 200 tokens, and less than Open WebUI's chunks of 1000 characters."""
    draw = random.Random(number)
    said = (" ".join(draw.choices(WORDS, k=12)).capitalize() for _ in range(11))
    return f"Section {number}. {'. '.join(said)}."


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    engine = Engine(smollm2(), StoreConfig(learn="recurring"))
    folder = tmp_path_factory.mktemp("index")
    with (
        engine,
        CachedRAG.open(folder / "manual", engine=engine) as rag,
        running(engine, index=ServedIndex(rag)) as found,
    ):
        yield found


@contextlib.contextmanager
def open_webui(address, folder):
    """Its address, once it can be asked."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "secret",
        "OFFLINE_MODE": "True",
        "ENABLE_OLLAMA_API": "False",
        "ENABLE_RETRIEVAL_QUERY_GENERATION": "False",
        "OPENAI_API_BASE_URL": f"{address}/v1",
        "OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_OPENAI_API_BASE_URL": f"{address}/v1",
        "RAG_OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_MODEL": "all-minilm-l6-v2",
    }
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [EXECUTABLE, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=kept | settings, cwd=folder) as process:
        found = f"http://127.0.0.1:{port}"

        def answers():
            assert process.poll() is None
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{found}/health", timeout=5).status_code == 200

        try:
            assert until(answers, 400)
            yield found
        finally:
            process.terminate()


def test_a_collection_is_asked_and_its_chunks_come_from_cache(server, tmp_path):
    write_back = server.config.app.state.service.engine.write_back
    with (
        open_webui(server.address, tmp_path) as address,
        httpx.Client(base_url=address, timeout=600) as client,
    ):

        def post(path, **body):
            response = client.post(path, **body)
            assert response.status_code == 200, response.text
            return response.json()

        who = {"email": "admin@localhost", "password": "admin"}
        token = post("/api/v1/auths/signin", json=who)["token"]
        client.headers["Authorization"] = f"Bearer {token}"
        assert NAME in [model["id"] for model in client.get("/api/models").json()["data"]]
        text = "\n\n".join(map(section, range(4)))
        file = post(
            "/api/v1/files/",
            files={"file": ("manual.txt", text, "text/plain")},
            params={"process_in_background": "false"},
        )
        about = {"name": "manual", "description": "how things work"}
        collection = post("/api/v1/knowledge/create", json=about)["id"]
        post(f"/api/v1/knowledge/{collection}/file/add", json={"file_id": file["id"]})

        def ask(question):
            body = {
                "model": NAME,
                "stream": False,
                "messages": [{"role": "user", "content": question}],
                "files": [{"type": "collection", "id": collection}],
                "max_tokens": 8,
            }
            done = post("/api/chat/completions", json=body)
            print(question, done["usage"])  # docs/uis.md has the figures
            write_back.drain()
            assert sum(len(source["document"]) for source in done["sources"]) == 3
            return done["usage"]

        first, *_, last = map(ask, QUESTIONS)
    assert first["prompt_tokens_details"]["cached_tokens"] < 0.1 * first["prompt_tokens"]
    assert last["prompt_tokens_details"]["cached_tokens"] > 0.6 * last["prompt_tokens"]
    learned = list(server.config.app.state.service.engine.library.table)
    assert len(learned) >= 3
