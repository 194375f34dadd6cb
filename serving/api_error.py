"""`ApiError`: a request that cannot be answered, over HTTP or gRPC."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """A refusal: HTTP status, a code for programs, a message for people, extra headers."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


def invalid(code: str, error: ValidationError, *, status: int = 422) -> ApiError:
    """What is wrong with what a client sent; its value is not repeated."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return ApiError(status, code, first_of(found))


def first_of(errors: Sequence[Any]) -> str:
    """The first of pydantic's errors, as one line."""
    first = errors[0]
    where = ".".join(str(part)[:80] for part in first["loc"] if part not in ("query", "body"))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
