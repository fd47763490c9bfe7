"""What answers as a vLLM server does."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Server:
    """What a vLLM server says, and what it was asked."""

    status: int = 200
    events: tuple[dict, ...] = ()
    before: dict[int, threading.Event] = field(default_factory=dict)
    asked: list[dict] = field(default_factory=list)
    url: str = ""


@contextmanager
def served(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            said = {"/v1/models": {"data": [{"id": "m"}]}, "/version": {"version": "0.32.0"}}
            self.begin(200, said[self.path])

        def do_POST(self):
            server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if server.status != 200:
                self.begin(server.status, {"message": "too long"})
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, event in enumerate(server.events):
                if number in server.before:
                    assert server.before[number].wait(30)
                self.piece(f"data: {json.dumps(event)}\n\n".encode())
            self.piece(b"data: [DONE]\n\n")
            self.piece(b"")

        def begin(self, status, said):
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def piece(self, data):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()

        def log_message(self, *_):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    server.url = f"http://127.0.0.1:{running.server_port}"
    try:
        yield server
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def tokens(*ids):
    return {"choices": [{"index": 0, "text": "x", "token_ids": list(ids)}]}
