"""A server that answers whatever it likes, in the place of a remote store."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import create_server, socket

# In Redis' protocol, to each command that asks for a value, or whether there is one.
REDIS = {
    "nested": b"*1\r\n" * 100_000,
    "numbers": b":5\r\n" * 3,
    "one number": b":5\r\n",
    "a huge number": b":" + b"9" * 100_000 + b"\r\n",
    "too short a list": b"*1\r\n$1\r\nx\r\n",
    "a list without end": b"*1000000000000\r\n" + b"$1\r\nx\r\n" * 1000,
    "a value without end": b"$1000000000000\r\n",
    "a line without end": b"+",
    "a negative length": b"$-5\r\n",
    "errors": b"-ERR no\r\n" * 3,
    "a map": b"%1\r\n+a\r\n%1\r\n+a\r\n*0\r\n",
    "no protocol at all": b"HTTP/1.1 200 OK\r\n\r\n",
    "nothing": b"",
}
_OK = b"HTTP/1.1 200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: x\r\n"
HTTP = {
    "a value without end": _OK + b"Transfer-Encoding: chunked\r\n\r\n",
    "a length without end": _OK + b"Content-Length: 1000000000000\r\n\r\n",
    "a part that was not asked for": _OK.replace(b"200 OK", b"206 Partial Content")
    + b"Content-Range: bytes 7-1000000000000/1000000000001\r\nContent-Length: 1000000000\r\n\r\n",
    "less than it says": _OK + b"Content-Length: 100\r\n\r\nx",
    "no protocol at all": b"+OK\r\n",
    "nothing": b"",
}


def _with_end(data: bytes) -> bool:
    """Whether a reply ends by itself; others go on with zeros until nobody reads."""
    return b"000000\r\n" not in data[:400] and data != b"+" and b"chunked" not in data


@contextmanager
def hostile(reply: bytes) -> Iterator[int]:
    """The port of a server that answers so to whoever asks for values."""
    listening = create_server(("127.0.0.1", 0))

    def serve(client: socket) -> None:
        with client, suppress(OSError):
            while data := client.recv(1 << 16):
                if data.startswith(b"PUT") or not re.search(rb"GETRANGE|EXISTS|HTTP/1", data):
                    done = b"+OK\r\n" * len(re.findall(rb"\*\d+\r\n", data))
                    client.sendall(_OK + b"Content-Length: 0\r\n\r\n" if b"PUT" in data else done)
                    continue
                client.sendall(reply)
                chunk = b"100000\r\n" if b"chunked" in reply else b""
                while not _with_end(reply):
                    client.sendall(chunk + bytes(1 << 20) + (b"\r\n" if chunk else b""))

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listening.getsockname()[1]
    listening.close()
