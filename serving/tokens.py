"""Token authentication with a file that may change while the server is running.

The file contains one token per line; blank lines and lines that begin with # are skipped. Replace
the file with `mv`. Each request reads the file, so tokens that were removed are rejected at once.
"""

import hmac
import logging
import os
import stat
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from serving.api_error import RETRY, ApiError

MIN_CHARS, _MAX_CHARS = 24, 512
_MAX_FILE_BYTES = 2**20
ANONYMOUS = "anonymous"
_log = logging.getLogger("kway.serving")


class Clients:
    """Identifies clients by their tokens or, without a token file, by their addresses.

    Each replica has one instance for both HTTP and gRPC, so that a problem with the file is logged
    once.
    """

    def __init__(self, file: Path | None) -> None:
        """Accept the tokens in `file`, of which only the SHA-256 digests are stored; None: accept
        every client. Raises OSError or ValueError if the file cannot be read or has unsafe
        permissions."""
        self._file = file
        self._content: bytes | None = None
        self._digests: list[bytes] = []
        if file is not None:
            self._refresh(file)
        self._reported: str | None = None

    def client_of(self, authorization: Sequence[str], address: str) -> str:
        """Return the client, to which limits per client apply, of a request with these values of
        the header Authorization: the first 8 hex digits of the SHA-256 of its token or, without a
        token file, its `address`.

        Raises ApiError: 401 if the token is missing or wrong; 503 while the file cannot be read,
        because the tokens read earlier may have been revoked.
        """
        if self._file is None:
            return address
        scheme, _, word = authorization[0].partition(" ") if len(authorization) == 1 else ("",) * 3
        token = word.strip() if scheme.lower() == "bearer" else None
        try:
            self._refresh(self._file)
        except (OSError, ValueError) as error:
            if str(error) != self._reported:  # log it once, not for every request
                self._reported = str(error)
                _log.error("rejecting all requests: %s", error)
            message = "the server cannot read its token file; see the server log. Try again later"
            raise ApiError(503, "no_tokens", message, RETRY) from error
        self._reported = None
        # Takes constant time, whether or not the token is found.
        sent = sha256((token or "").encode("utf-8", "surrogatepass")).digest()
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        if any(matches):
            return sent.hex()[:8]
        if token is None:
            message = "this server requires a token. Send the header Authorization: Bearer TOKEN"
            raise ApiError(401, "no_token", message, {"WWW-Authenticate": "Bearer"})
        message = "this server does not recognize the token. Check the token"
        challenge = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        raise ApiError(401, "wrong_token", message, challenge)

    def _refresh(self, file: Path) -> None:
        """Read the file. Its time stamps would not show every change."""
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_file(file, os.fstat(descriptor))
            content = os.read(descriptor, _MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
        if content != self._content:
            self._content = None
            self._digests = _digests(file, content)
            self._content = content


def _check_file(path: Path, state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise ValueError(f"token file {path} is not a regular file. Pass the path of a file")
    # Another user's file, such as a mounted secret, is readable only through its group.
    own = state.st_uid == os.geteuid()
    if state.st_mode & (0o077 if own else 0o027):
        raise ValueError(
            f"token file {path} is accessible to other users (mode "
            f"{stat.S_IMODE(state.st_mode):04o}). Run chmod {'600' if own else '440'} {path}"
        )


def _digests(path: Path, content: bytes) -> list[bytes]:
    """Return the SHA-256 of each token. Error messages must not contain any token."""
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(
            f"token file {path} is larger than {_MAX_FILE_BYTES} bytes. Check the path"
        )
    digests = []
    for number, line in enumerate(content.splitlines(), 1):
        token = line.strip()
        if not token or token.startswith(b"#"):
            continue
        if not all(0x21 <= byte <= 0x7E for byte in token):
            raise ValueError(
                f"token file {path} line {number}: the token contains characters other than "
                "printable ASCII. Remove them"
            )
        if not MIN_CHARS <= len(token) <= _MAX_CHARS:
            raise ValueError(
                f"token file {path} line {number}: the token has {len(token)} characters, but "
                f"must have {MIN_CHARS} to {_MAX_CHARS}. Create one with: openssl rand -hex 32"
            )
        digests.append(sha256(token).digest())
    if not digests:
        raise ValueError(
            f"token file {path} does not contain any tokens. Create one with: openssl rand -hex 32"
        )
    return digests
