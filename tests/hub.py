"""A local server with the part of the Hugging Face hub's interface that downloads use."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_model(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of `folder` as the model `name`. Yields the address, for HF_ENDPOINT, and the
    list of downloaded files, which grows.
    """
    downloaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{name}"):
                files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                about = {"id": name, "sha": _COMMIT, "siblings": files}
                tree = [_entry(file) for file in sorted(folder.iterdir())]
                self._send(json.dumps(tree if "/tree/" in path else about).encode())
                return
            file = folder / path.rpartition("/")[2]
            if not path.startswith(f"/{name}/resolve/") or not file.is_file():
                self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
                return
            if self.command == "GET":
                downloaded.append(file.name)
            content = file.read_bytes()
            tag = hashlib.sha1(content).hexdigest()
            self._send(content, 200, {"ETag": f'"{tag}"', "X-Repo-Commit": _COMMIT})

        def _send(
            self, content: bytes, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", downloaded
        server.shutdown()


def _entry(file: Path) -> dict[str, Any]:
    digest = hashlib.sha1(file.read_bytes()).hexdigest()
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest}
