"""`cached-rag serve` as a process: what it says, and when."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from fresh import run_fresh
from typer.testing import CliRunner

from cached_rag import ConfigError
from cached_rag.backends.transformers.loading import load_model
from cached_rag.cli.main import app
from cached_rag.server.run import bind

pytestmark = pytest.mark.slow

SERVE = "from cached_rag.cli.main import main; main()"


def test_a_port_in_use_is_an_error_and_nothing_is_served(model_folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_fresh(SERVE, "serve", "--model", model_folder, "--port", port)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert said.startswith(f"error: cannot listen at 127.0.0.1, port {port}:")
    assert "--port" in said
    assert "serving" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70000)])
def test_an_address_that_cannot_be_is_refused(host, port):
    with pytest.raises(ConfigError, match="cannot listen at"):
        bind(host, port)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-connections", "0"], "max_connections must be at least 1"),
        (["--max-body-bytes", "-1"], "max_body_bytes must be at least 1"),
        (["--client-seconds", "-5"], "client_seconds must be at least 1"),
        (["--drain-seconds", "-1"], "drain_seconds must be at least 0"),
        (["--cors-origin", "page.example"], "https://page.example"),
        (["--cors-origin", "https://page.example/"], "https://page.example"),
        (["--allowed-host", "https://server.example"], "--allowed-host"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(model_folder, monkeypatch, options, says):
    monkeypatch.setattr("cached_rag.server.run.Server.run", lambda *_, **__: pytest.fail("serves"))
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["serve", "--model", model_folder, "--port", "0", *options])
    assert result.exit_code
    assert says in re.sub(r"\x1b\[[0-9;]*m", "", result.output + str(result.exception))


@pytest.mark.parametrize("device", ["cuda:99", "nodev", "meta"])
def test_a_device_that_is_not_there_is_named_with_what_is(model_folder, device):
    with pytest.raises(ConfigError, match=f"device '{device}' cannot.*This machine has cpu"):
        load_model(model_folder, device=device)


def test_what_says_that_it_serves_can_be_asked(model_folder):
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", "--model", model_folder, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        line = next(line for line in server.stderr if "serving" in line)
        address = re.search(r"http://127.0.0.1:\d+", line).group()
        assert httpx.get(f"{address}/health").status_code == 200
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=300)
