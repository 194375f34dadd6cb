"""A replica takes no more of a body than it has use for: the client, and the proxy, wait."""

import asyncio

_PARTS = 4


def bound_bodies() -> None:
    """Keep at most a few parts of a request's body between Ray and the application.

    Ray 2.60 reads ahead without a limit: a stream that is sent faster than it is answered would
    all be kept in memory. Call it in a replica's constructor. Raises RuntimeError where Ray has
    changed and this no longer works.
    """
    from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy

    if not isinstance(getattr(ASGIDIReceiveProxy, "queue", None), property):
        raise RuntimeError("this version of Ray reads bodies in a way unknown to kway: take 2.60")

    def queue(proxy: ASGIDIReceiveProxy) -> asyncio.Queue:
        if proxy._queue is None:
            proxy._queue = asyncio.Queue(_PARTS)
        return proxy._queue

    ASGIDIReceiveProxy.queue = property(queue)  # type: ignore[method-assign,assignment]
