"""Patches for uvicorn, which Ray starts in each replica without exposing its options.

Call these in a replica's constructor, before Ray starts the replica's server. They raise
RuntimeError if the installed uvicorn no longer has the names that they need;
`tests/serving/test_private_names.py` checks both functions.
"""

import inspect
from typing import Any

import uvicorn


def use_httptools() -> None:
    """Use the implementation of HTTP that `drop_trailers` patches. Ray cannot set this option of
    `uvicorn.Config`."""
    init = uvicorn.Config.__init__
    if "http" not in inspect.signature(init).parameters:
        raise _changed("uvicorn.Config does not have http")

    def with_option(config: uvicorn.Config, *arguments: Any, **given: Any) -> None:
        init(config, *arguments, **{**given, "http": "httptools"})

    with_option.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    uvicorn.Config.__init__ = with_option  # type: ignore[method-assign,assignment]


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
