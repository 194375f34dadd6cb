"""Patches for uvicorn, which Ray starts in each replica without exposing its options.

Call these in a replica's constructor, before Ray starts the replica's server. They raise
RuntimeError if the installed uvicorn no longer has the names that they need;
`tests/serving/test_private_names.py` checks both functions.
"""

import inspect
from typing import Any

import uvicorn


def set_server_options(max_message_bytes: int) -> None:
    """Accept WebSocket messages of at most `max_message_bytes`, without compression.

    uvicorn's default limit is 16 MiB per message, and a single read may decompress to any number of
    such messages. These options of `uvicorn.Config` are public, but Ray cannot set them.
    """
    options = {
        "ws_max_size": max_message_bytes,
        "ws_per_message_deflate": False,
        "http": "httptools",  # the implementation that `drop_trailers` patches
    }
    init = uvicorn.Config.__init__
    if missing := options.keys() - inspect.signature(init).parameters.keys():
        raise _changed(f"uvicorn.Config does not have {', '.join(sorted(missing))}")

    def with_options(config: uvicorn.Config, *arguments: Any, **given: Any) -> None:
        init(config, *arguments, **{**given, **options})

    with_options.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    uvicorn.Config.__init__ = with_options  # type: ignore[method-assign,assignment]


def drop_trailers() -> None:
    """Drop the trailers of a chunked body instead of adding them to the request headers.

    HAProxy's rules are not applied to trailers, and HAProxy 2.8 cannot drop them. uvicorn, which
    does not support trailers (Kludex/uvicorn#1596), appends them to `scope["headers"]`, which Ray
    and the application read.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    add_header = getattr(HttpToolsProtocol, "on_header", None)
    complete = getattr(HttpToolsProtocol, "on_headers_complete", None)
    if add_header is None or complete is None or "scope" not in complete.__code__.co_names:
        raise _changed("HttpToolsProtocol reads headers differently")

    def on_header(protocol: HttpToolsProtocol, name: bytes, value: bytes) -> None:
        if "method" not in protocol.scope:  # set once the headers are complete
            add_header(protocol, name, value)

    HttpToolsProtocol.on_header = on_header  # type: ignore[method-assign,assignment]


def _changed(reason: str) -> RuntimeError:
    return RuntimeError(f"uvicorn {uvicorn.__version__} is not supported: {reason}")
