"""A real HTTP server on a folder, that can be told to fail, to cut its answers, or to send away."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class FileServer:
    """What it does with the next requests for a file, and how many came for each."""

    folder: Path
    url: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    # Of a file: what comes instead of it, one after the other. A status, "cut", or "hang up".
    instead: dict[str, list[int | str]] = field(default_factory=dict)
    redirect: str | None = None
    ranges: bool = False  # whether it sends a part where a part is asked for
    sent: dict[str, list[int]] = field(default_factory=dict)  # bytes of each answer
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def shards(self) -> int:
        """Request for shards so far."""
        return sum(count for name, count in self.requests.items() if name.endswith(".tar"))


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, server: FileServer, *args: object) -> None:
        self.files = server
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        with self.files.lock:
            self.files.requests[name] += 1
            told = self.files.instead.get(name) or [None]
            what = told.pop(0) if told else None
        path = self.files.folder / name
        if self.files.redirect is not None:
            self.send_response(302)
            self.send_header("Location", f"{self.files.redirect}/{name}")
            self.end_headers()
        elif what == "hang up":
            self.close_connection = True
        elif isinstance(what, int) or not path.is_file():
            self.send_error(what if isinstance(what, int) else 404)
        else:
            content, asked = path.read_bytes(), self.headers.get("Range")
            time.sleep(self.files.seconds)
            if self.files.ranges and asked:
                content = content[int(asked.removeprefix("bytes=").removesuffix("-")) :]
            self.send_response(206 if self.files.ranges and asked else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            content = content[: len(content) // 2] if what == "cut" else content
            self.files.sent.setdefault(name, []).append(len(content))
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """The files of `folder`, served on a free port by a thread."""
    files = FileServer(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, files))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    files.url = f"http://127.0.0.1:{server.server_port}/set"
    try:
        yield files
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
