"""A replica takes no more of a body than it has use for: the client, and the proxy, wait.

Nor does it take what may follow a body, its trailers, or WebSocket messages that are longer than
it reads.
"""

import asyncio
import inspect
from typing import Any

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


def bound_messages(most_bytes: int) -> None:
    """Take WebSocket messages of at most `most_bytes`, as they are, without compression.

    uvicorn's own bounds are 16 MiB and, of what is compressed, any number of such messages out of
    one read. Call it in a replica's constructor, before Ray starts the replica's server. Raises
    RuntimeError where Ray or uvicorn have changed and this no longer works.
    """
    import uvicorn
    from ray.serve._private.http_util import start_asgi_http_server

    bounds = {"ws_max_size": most_bytes, "ws_per_message_deflate": False}
    code, make = start_asgi_http_server.__code__, uvicorn.Config.__init__
    is_known = (
        start_asgi_http_server.__globals__.get("uvicorn") is uvicorn
        and "Config" in code.co_names
        and bounds.keys() <= inspect.signature(make).parameters.keys()
    )
    if not is_known:
        raise RuntimeError(
            "this version of Ray bounds messages in a way unknown to kway: take 2.60"
        )

    def bounded(config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        make(config, *arguments, **{**options, **bounds})

    uvicorn.Config.__init__ = bounded  # type: ignore[method-assign,assignment]


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
