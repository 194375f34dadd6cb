"""JSON from outside, read without surprises: what is ambiguous or cannot be shown is refused.

Python's own parser, told to be strict: of two equal keys it would drop one, and a lone surrogate
would break whatever text it is copied into. What takes a byte or two of JSON takes a hundred of
memory, and more where it is wrong: values are counted before they are made.
"""

import json
import re

from serving.errors import ApiError

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
