"""`cached-rag serve` as a process: what it says, and when."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from cached_rag import ConfigError
from cached_rag.server.run import bind

SERVE = [sys.executable, "-c", "from cached_rag.cli.main import main; main()", "serve"]


def test_a_port_in_use_is_an_error_and_nothing_is_served(model_folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [*SERVE, "--model", model_folder, "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=300,
        )
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


def test_what_says_that_it_serves_can_be_asked(model_folder):
    with subprocess.Popen(
        [*SERVE, "--model", model_folder, "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as server:
        line = next(line for line in server.stderr if "serving" in line)
        address = re.search(r"http://127.0.0.1:\d+", line).group()
        assert httpx.get(f"{address}/health").status_code == 200
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=300)
