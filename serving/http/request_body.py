"""Read request bodies within limits: parse the JSON, and decode the images in it, which are base64
or data URLs.

Other URLs are rejected and nothing is fetched, to prevent server-side request forgery: a server
that fetched URLs for clients could be used to send requests to internal hosts.
"""

import base64
import binascii
import json
import re
from collections.abc import Mapping

from fastapi import Request
from python_multipart.multipart import parse_options_header

from serving.api_error import ApiError
from serving.limits import body_too_large
from serving.service import InProgress, Service

# Limit per body. Callers add the limits on inputs and classes where these apply.
MAX_VALUES = 10_000
_MAX_KEYS = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DATA_URL = re.compile(r"data:(image/[\w.+-]+|application/octet-stream)?;base64,", re.IGNORECASE)
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")


def content_type(request: Request) -> tuple[str, dict[str, str]]:
    """Return the media type of a request, in lower case, and its parameters. A missing type is
    ""."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    parameters = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in options.items()
    }
    return kind.decode("latin-1").strip().lower(), parameters


def check_charset(parameters: Mapping[str, str]) -> None:
    """Raise ApiError 415 if a content type states a charset of which not every text is UTF-8."""
    charset = parameters.get("charset", "")
    if charset.lower() not in ("", "utf-8", "utf8", "us-ascii"):
        message = f"charset {charset[:40]!r} is not supported. Send UTF-8"
        raise ApiError(415, "unknown_charset", message)


async def read_body(request: Request, service: Service, progress: InProgress) -> bytes:
    """Receive the body of a request and acquire a slot for `progress`.

    Raises ApiError: 413 if the Content-Length or the body exceeds the limit; 415 for a compressed
    body; 408 and 429 as in `Uploads.receive`. Parse the body only after this, because slots limit
    the amount of concurrent parsing.
    """
    limit = service.config.max_body_bytes
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()) or int(length[:20]) > limit:
        raise body_too_large(limit)
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding {encoding[:40]!r} is not supported. Send the body uncompressed"
        raise ApiError(415, "unknown_encoding", message)
    raw = await service.uploads.receive(request.state.client, request.receive)
    progress.acquire_slot()
    return raw


def parse_json(raw: bytes, most: int = MAX_VALUES) -> object:
    """Parse UTF-8 JSON. It may contain at most about `most` values.

    Raises ApiError 400 `invalid_json` for invalid UTF-8 or JSON, JSON that is nested too deeply,
    duplicate keys, objects with too many keys, numbers with thousands of digits and lone
    surrogates. JSON with too many values is rejected before any value is created. Call this
    function in a thread, because parsing megabytes takes a long time.
    """
    _check_count(raw, most)
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicate_keys)
        if _SURROGATE.search(raw):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise _invalid_json("the nesting is too deep") from error
    except UnicodeDecodeError as error:
        raise _invalid_json(f"invalid UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _invalid_json("a string contains a lone surrogate") from error
    except json.JSONDecodeError as error:
        raise _invalid_json(f"{error.msg} at line {error.lineno} column {error.colno}") from error
    except ValueError as error:
        raise _invalid_json(str(error)) from error
    return found


def _check_count(raw: bytes, most: int) -> None:
    """Check the number of values without parsing. Each value, or key-value pair, follows a `,`, `[`
    or `{` outside a string.

    The first pass also counts these characters inside strings. If that count exceeds the limit, a
    second pass removes the strings first. Both passes run in C and allocate little more than the
    size of `raw`.
    """
    if _count_starts(raw) <= most:
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    is_over = bare.count(b'"') > 4 * most  # two for the key and two for its value
    if is_over or _count_starts(b"".join(bare.split(b'"')[::2])) > most:
        raise _invalid_json(
            f"the JSON contains more than {most} values. Split the request, and send images as "
            "encoded files"
        )


def _count_starts(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _without_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > _MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, but the limit is {_MAX_KEYS}")
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key[:80]!r}")
        found[key] = value
    return found


def _invalid_json(reason: str) -> ApiError:
    return ApiError(400, "invalid_json", f"invalid JSON: {reason}")


def image_bytes(text: str, field: str) -> bytes:
    """Decode a base64-encoded image file, or a URL `data:image/…;base64,…`.

    Raises ApiError: 422 `urls_refused` for any other URL, and 400 `invalid_base64` for invalid
    base64. The message names the input as `field`.
    """
    data_url = _DATA_URL.match(text)
    if data_url is None and _URL.match(text[:64]):
        raise ApiError(
            422,
            "urls_refused",
            f"{field} is a URL, but this server does not fetch URLs. Send the image itself: "
            "base64-encoded, as a file in a form, or as the body with Content-Type: image/jpeg",
        )
    start = 0 if data_url is None else data_url.end()
    try:
        return base64.b64decode(text[start:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(
            400,
            "invalid_base64",
            f"{field} is not valid base64 ({error}). Send a base64-encoded image file",
        ) from error
