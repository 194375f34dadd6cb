"""A patch for gRPC's Python servers that makes Ray's servers listen only on loopback.

Ray's C++ servers have bound to the node's address since ray-project/ray#59852. The Python servers
of Ray Serve 2.60 bind to `[::]`, with no option for another address.
"""

from functools import wraps
from typing import Any

from serving.deploy.private_ray import hide_pandas


def set_up_worker() -> None:
    """Set up a worker process of a server that has gRPC enabled. Ray calls this when a worker
    starts."""
    hide_pandas()
    bind_servers_to_loopback()


def bind_servers_to_loopback() -> None:
    """Bind this process's asyncio gRPC servers to loopback if they would otherwise bind to all
    addresses.

    This is a security measure: one of Ray's servers accepts pickles. Call this function before the
    servers start: when a worker starts, or in a replica's constructor. Repeated calls have no
    effect. Raises RuntimeError if the installed gRPC no longer has the method;
    `tests/serving/test_private_names.py` checks this.
    """
    import grpc
    from grpc.aio import _server

    add_port = getattr(_server.Server, "add_insecure_port", None)
    if add_port is None:
        raise RuntimeError(
            f"grpcio {grpc.__version__} is not supported: grpc.aio's Server does not have "
            "add_insecure_port"
        )

    @wraps(add_port)
    def add_loopback_port(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    _server.Server.add_insecure_port = add_loopback_port
