"""Ray on one machine, reachable from that machine only.

Ray's services listen on every network interface by default; code can be run through some.
"""

import os

ENVIRONMENT = {
    # Despite its name this is Ray's switch, on every system, for "the node's address is loopback".
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def set_environment() -> None:
    """Set what Ray reads when it is first imported, and its processes inherit."""
    os.environ.update(ENVIRONMENT)


def keep_replica_port_on_loopback() -> None:
    """Bind this replica's gRPC port, which takes pickles from anybody, to loopback.

    Ray 2.60 binds it to "[::]" with no setting for it. Call it in the replica's constructor: the
    port opens after that. Raises RuntimeError when Ray has changed and this no longer works.
    """
    from ray.serve._private import replica

    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is None:
        raise RuntimeError("this version of Ray opens its replica port in a way unknown to kway")

    def add_loopback_port(server: object, address: str) -> int:
        return add_port(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = add_loopback_port
