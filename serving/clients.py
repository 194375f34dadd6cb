"""Who sends a request, by the bearer token that comes with it; the same over HTTP and gRPC."""

import logging
from pathlib import Path
from typing import Self

from serving.errors import ApiError
from serving.tokens import Tokens

_log = logging.getLogger("kway.serving")
ANONYMOUS = "anonymous"


class Clients:
    """Those that send one of `tokens`; without tokens everybody, as "anonymous".

    A replica has one of these for all its ways in: a fault of the file is told once.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens
        self._told: str | None = None

    @classmethod
    def of_file(cls, file: Path | None) -> Self:
        """Those whose tokens `file` holds; without one everybody. Errors are those of `Tokens`."""
        return cls(None if file is None else Tokens(file))

    def name_of(self, token: str | None) -> str:
        """The client that sends `token`.

        Raises ApiError: 401 for a missing or wrong one; 503 while the file cannot be read, for its
        old tokens may have been revoked.
        """
        if self._tokens is None:
            return ANONYMOUS
        try:
            client = self._tokens.client_of(token or "")
        except (OSError, ValueError) as error:
            self._tell(str(error))
            message = "the server cannot read its tokens; its log says why: try again"
            raise ApiError(503, "no_tokens", message, {"Retry-After": "1"}) from error
        self._told = None
        if client is not None:
            return client
        if token is None:
            message = "this server asks for a token: send the header Authorization: Bearer TOKEN"
            raise ApiError(401, "no_token", message, {"WWW-Authenticate": "Bearer"})
        challenge = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        raise ApiError(401, "wrong_token", "the token is not known to this server", challenge)

    def _tell(self, reason: str) -> None:
        if reason != self._told:  # once, not at every request
            self._told = reason
            _log.error("all requests are refused: %s", reason)


def bearer_token(header: str) -> str | None:
    """The token in an Authorization header; None for another scheme."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None
