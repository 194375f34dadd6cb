"""JSON that a client sends: parsed within limits, and the images in it, as base64 or data URLs.

Other URLs are rejected and nothing is fetched: a server that fetched what a client names would send
requests, in its own name, to whatever it can reach.
"""

import base64
import binascii
import json
import re

from serving.api_error import ApiError

# In one body or line; what may hold more inputs or classes by its limits, may hold more values.
MOST_VALUES = 10_000
_MOST_KEYS = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes, most: int = MOST_VALUES) -> object:
    """UTF-8 JSON -> dicts, lists, strings and numbers, about `most` of them.

    Raises ApiError 400 `invalid_json` for more, before any is made, for what is no UTF-8, no JSON
    or nested too deep, and for a key that stands twice, an object of many keys, a number of
    thousands of digits and half a surrogate pair. Of megabytes it takes long: call it in a thread.
    """
    _check_count(raw, most)
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_doubles)
        if _SURROGATE.search(raw):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise _invalid("it is nested too deep") from error
    except UnicodeDecodeError as error:
        raise _invalid(f"its byte {error.start} is no UTF-8") from error
    except UnicodeEncodeError as error:
        raise _invalid("a text holds half a surrogate pair") from error
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at line {error.lineno} column {error.colno}") from error
    except ValueError as error:
        raise _invalid(str(error)) from error
    return found


def _check_count(raw: bytes, most: int) -> None:
    """Each value, or pair of key and value, stands after one of `,` `[` `{` that is in no string.

    Both passes run in C and make nothing that is much longer than `raw`.
    """
    if _count_starts(raw) <= most:
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    is_over = bare.count(b'"') > 4 * most  # two of a key, two of its value
    if is_over or _count_starts(b"".join(bare.split(b'"')[::2])) > most:
        raise _invalid(f"it holds over {most} values: send fewer at once")


def _count_starts(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > _MOST_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, at most {_MOST_KEYS}")
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} stands twice")
        found[key] = value
    return found


def _invalid(reason: str) -> ApiError:
    return ApiError(400, "invalid_json", f"Invalid JSON: {reason}")


_DATA_URL = re.compile(r"data:(image/[\w.+-]+|application/octet-stream)?;base64,", re.IGNORECASE)
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")


def picture_bytes(text: str, field: str) -> bytes:
    """Base64 of a picture file, or `data:image/…;base64,…` -> its bytes.

    Raises ApiError: 422 `urls_refused` for any other URL, 400 `invalid_base64`; `field` names it.
    """
    data_url = _DATA_URL.match(text)
    if data_url is None and _URL.match(text[:64]):
        raise ApiError(
            422,
            "urls_refused",
            f"{field} is a URL, and this server fetches nothing: send the picture itself, in "
            "base64, as a file of a form, or as the body with Content-Type: image/jpeg",
        )
    start = 0 if data_url is None else data_url.end()
    try:
        return base64.b64decode(text[start:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(
            400, "invalid_base64", f"{field} is not base64 of a picture file ({error})"
        ) from error
