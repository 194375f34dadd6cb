"""A real HTTP server that serves a folder and can fail, truncate its responses, or redirect."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.quiet_server import QuietServer


@dataclass
class FileServer:
    """How the server answers the next requests, and the number of requests for each file so far."""

    folder: Path
    url: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    # How the next requests for each file fail, in order: a status, "cut", "damage" or "hang up".
    failures: dict[str, list[int | str]] = field(default_factory=dict)
    redirect: str | None = None
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def shards(self) -> int:
        """Return the number of requests for shards so far."""
        return sum(count for name, count in self.requests.items() if name.endswith(".tar"))


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, server: FileServer, *args: object) -> None:
        self.files = server
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        with self.files.lock:
            self.files.requests[name] += 1
            failures = self.files.failures.get(name)
            failure = failures.pop(0) if failures else None
        path = self.files.folder / name
        if self.files.redirect is not None:
            self.send_response(302)
            self.send_header("Location", f"{self.files.redirect}/{name}")
            self.end_headers()
        elif failure == "hang up":
            self.close_connection = True
        elif isinstance(failure, int) or not path.is_file():
            self.send_error(failure if isinstance(failure, int) else 404)
        else:
            content = path.read_bytes()
            time.sleep(self.files.seconds)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if failure == "damage":
                content = content.replace(b"a", b"b")
            content = content[: len(content) // 2] if failure == "cut" else content
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """Serve the files of `folder` on a free port from a thread."""
    files = FileServer(folder)
    server = QuietServer(("127.0.0.1", 0), partial(_Handler, files))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    files.url = f"http://127.0.0.1:{server.server_port}/set"
    try:
        yield files
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()
