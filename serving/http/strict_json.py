"""JSON from outside, read without surprises: what is ambiguous or cannot be shown is refused.

Python's own parser, told to be strict: of two equal keys it would drop one, and a lone surrogate
would break whatever text it is copied into.
"""

import json
import re

from serving.errors import ApiError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes) -> object:
    """UTF-8 JSON -> dicts, lists, strings and numbers.

    Raises ApiError 400 `invalid_json` for what is no UTF-8, no JSON or nested too deep, and for a
    key that stands twice, a number of thousands of digits and half a surrogate pair.
    """
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


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} stands twice")
        found[key] = value
    return found


def _invalid(reason: str) -> ApiError:
    return ApiError(400, "invalid_json", f"Invalid JSON: {reason}")
