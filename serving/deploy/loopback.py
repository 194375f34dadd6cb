"""Ray's gRPC servers on this machine only: Ray 2.60 has no setting for where they listen."""

from functools import wraps


def keep_grpc_servers_on_loopback() -> None:
    """Bind this process's gRPC servers of Python to loopback, where Ray asks for all addresses.

    One of them takes pickles. Call it before they open: at a worker's start, or in a replica's
    constructor. Twice does no harm.
    """
    from grpc.aio._server import Server

    add_port = Server.add_insecure_port

    @wraps(add_port)
    def add_loopback_port(server: Server, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    Server.add_insecure_port = add_loopback_port
