"""The body of every refusal, to servers and clients alike: `{"error": {"code", "message"}}`.

Free of FastAPI.
"""

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    code: str
    message: str


class ErrorBody(BaseModel):
    """The body of every answer whose status is 4xx or 5xx."""

    error: ErrorDetail
