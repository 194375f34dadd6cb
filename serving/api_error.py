"""`ApiError`: a rejected request, over HTTP or gRPC."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)
RETRY = {"Retry-After": "1"}


class ApiError(Exception):
    """A rejected request: HTTP status, machine-readable code, message and extra headers."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        # The message may quote client input, which may contain lone surrogates.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.status, self.code, self.headers = status, code, headers


def validated(model: type[M], values: object, code: str, *, status: int = 422) -> M:
    """Validate client input, which is JSON if `values` are bytes, against `model`. Raises ApiError
    for the first error; its message does not contain the invalid value. For invalid JSON, its
    status is 400 and its code `invalid_json`."""
    try:
        if isinstance(values, bytes):
            return model.model_validate_json(values)
        return model.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        if found[0]["type"] == "json_invalid":
            status, code = 400, "invalid_json"
        raise ApiError(status, code, first_of(found)) from error


def first_of(errors: Sequence[Any]) -> str:
    """Format the first of pydantic's errors as one line."""
    first = errors[0]
    where = ".".join(str(part)[:80] for part in first["loc"] if part not in ("query", "body"))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
