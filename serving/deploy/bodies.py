"""A replica takes no more of a body than it has use for: the client, and the proxy, wait.

Nor does it take what may follow a body, its trailers.
"""

import asyncio

_PARTS = 4


def bound_bodies() -> None:
    """Keep at most a few parts of a request's body between Ray and the application; no trailers.

    Ray 2.60 reads ahead without a limit: a stream that is sent faster than it is answered would
    all be kept in memory. Call it in a replica's constructor. Raises RuntimeError where Ray has
    changed and this no longer works.
    """
    _drop_trailers()
    from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy

    if not isinstance(getattr(ASGIDIReceiveProxy, "queue", None), property):
        raise RuntimeError("this version of Ray reads bodies in a way unknown to kway: take 2.60")

    def queue(proxy: ASGIDIReceiveProxy) -> asyncio.Queue:
        if proxy._queue is None:
            proxy._queue = asyncio.Queue(_PARTS)
        return proxy._queue

    ASGIDIReceiveProxy.queue = property(queue)  # type: ignore[method-assign,assignment]


def _drop_trailers() -> None:
    """Keep the trailers of a chunked body from becoming headers of its request.

    uvicorn adds them to the headers that Ray and the application read, where no rule of the proxy
    has seen them; HAProxy 2.8 has no setting that drops them.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    hear = HttpToolsProtocol.on_header

    def on_header(protocol: HttpToolsProtocol, name: bytes, value: bytes) -> None:
        if "method" not in protocol.scope:  # set when the head is complete
            hear(protocol, name, value)

    HttpToolsProtocol.on_header = on_header  # type: ignore[method-assign,assignment]
