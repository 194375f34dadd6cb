"""The ports of a server and its addresses."""

import errno
import random
import socket
from contextlib import suppress
from typing import NamedTuple, Self

import psutil

from serving.config import ServingConfig

# Below the range from which systems choose the ports of outgoing connections, because such a
# connection could take a port before the server listens on it.
_FREE_PORTS = range(10_000, 32_768)


class Addresses(NamedTuple):
    """The addresses of a server: its URL, the host:port of gRPC if it is enabled, and the URL of
    the metrics if they have a port of their own."""

    url: str
    grpc: str | None
    metrics: str | None = None

    @classmethod
    def of(cls, config: ServingConfig) -> Self:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
        local = f"[{host}]" if ":" in host else host
        grpc = None if config.grpc_port is None else f"{local}:{config.grpc_port}"
        return cls(f"http://{local}:{config.port}", grpc)

    def ready(self, curl: str) -> str:
        """Return what a server prints when it is ready. `curl` are the arguments of a query."""
        lines = [
            f"ready: {self.url}  (API docs: {self.url}/docs; press Ctrl-C to stop)",
            f"curl {self.url}/v1/query {curl}",
        ]
        if self.grpc is not None:
            lines.append(f"Open Inference Protocol over gRPC: {self.grpc}")
        if self.metrics is not None:
            lines.append(f"metrics: {self.metrics}")
        lines.append(f"listening: {', '.join(_listening())}")
        return "\n".join(lines)


def _listening() -> list[str]:
    """Return the addresses on which this process and its children accept TCP connections, with the
    names of the processes."""
    found, this = set(), psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host, port = connection.laddr
                    host = host.removeprefix("::ffff:")
                    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                    found.add(f"{where} ({process.name()})")
    return sorted(found)


def with_free_ports(config: ServingConfig) -> ServingConfig:
    """Replace ports of 0 with free ports. Raises the same exceptions as `free_port`."""
    port, grpc_port = free_port(config.host, config.port), config.grpc_port
    if grpc_port is not None:
        while (found := free_port(config.host, grpc_port, option="--grpc-port")) == port:
            pass
        grpc_port = found
    return config.model_copy(update={"port": port, "grpc_port": grpc_port})


def free_port(host: str, port: int, *, option: str = "--port") -> int:
    """Return `port`, or any free port if it is 0.

    Raises OSError if the port is taken or `host` is not an address of this machine. The message
    names the `option` to change.
    """
    if port == 0:
        for candidate in random.sample(_FREE_PORTS, 20):
            with suppress(OSError):
                return _bound(host, candidate)
    try:
        return _bound(host, port)
    except OSError as error:
        fix = f"Stop the process that uses it, or pass another port with {option}"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            fix = "Pass an address of this machine with --host"
        raise OSError(
            f"cannot listen on {host} port {port} ({error.strerror or error}). {fix}"
        ) from error


def _bound(host: str, port: int) -> int:
    """Bind a socket to the port for a moment, and return the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        found: int = listener.getsockname()[1]
        return found
