"""A receiver of webhooks: an HTTP server in this process that checks signatures."""

import base64
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = bytes(range(32))
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"


@dataclass
class Message:
    """A request with a valid signature, or without one if it has none."""

    id: str
    path: str
    is_signed: bool
    body: dict[str, Any]
    accepted: bool

    @property
    def hits(self) -> list[dict]:
        return self.body["data"]["hits"]


@dataclass
class Receiver:
    """`respond` decides how to answer a request: a status, or None to close the connection."""

    url: str = ""
    host: str = ""
    respond: Callable[[Message], int | None] = lambda message: 200
    messages: list[Message] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    response: bytes = b""

    def accepted(self, path: str = "/") -> list[dict]:
        """Return the hits of accepted messages."""
        found = [one for one in self.messages if one.accepted and one.path == path]
        return [hit for message in found for hit in message.hits]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Listen on a free port of loopback."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if problem := _problem(self.headers, body):
                receiver.problems.append(problem)
            is_signed = "webhook-signature" in self.headers
            message = Message(
                self.headers["webhook-id"], self.path, is_signed, json.loads(body), accepted=False
            )
            status = receiver.respond(message)
            message.accepted = status is not None and 200 <= status < 300
            receiver.messages.append(message)
            if status is None:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(receiver.response)))
            self.end_headers()
            self.wfile.write(receiver.response)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 100

        def handle_error(self, *_: object) -> None:
            """Ignore clients that closed the connection."""

    server = Server(("127.0.0.1", 0), Handler)
    receiver.host = f"127.0.0.1:{server.server_port}"
    receiver.url = f"http://{receiver.host}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def _problem(headers: Any, body: bytes) -> str:
    """Return what is wrong with a request, as a receiver would check it."""
    stamp = headers["webhook-timestamp"]
    if headers["content-type"] != "application/json" or abs(int(stamp) - time.time()) > 60:
        return f"invalid headers: {dict(headers)}"
    if "webhook-signature" not in headers:
        return ""
    signed = f"{headers['webhook-id']}.{stamp}.".encode() + body
    expected = base64.b64encode(hmac.digest(KEY, signed, "sha256")).decode()
    found = headers["webhook-signature"]
    return "" if found == f"v1,{expected}" else f"invalid signature: {found}"
