"""An HTTP server for tests that prints nothing."""

from http.server import ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    """A `ThreadingHTTPServer` that ignores clients that disconnect.

    Its threads may outlive a test, and their tracebacks would appear in the standard error that
    another test captures.
    """

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass
