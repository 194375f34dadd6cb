"""Token authentication with a file that may change while the server is running.

The file contains one token per line; blank lines and lines that begin with # are skipped. Replace
the file with `mv`. The server rereads the file on the next request and then rejects tokens that
were removed.
"""

import hmac
import logging
import os
import stat
import time
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv6Address, IPv6Network, ip_address
from pathlib import Path

from serving.api_error import RETRY, ApiError

MIN_CHARS, _MAX_CHARS = 24, 512
_MAX_FILE_BYTES = 2**20
# File system timestamps have a resolution of milliseconds. A file modified more recently than this
# may change again without a new timestamp, so it is reread on the next request.
_SETTLED_SECONDS = 1.0
ANONYMOUS = "anonymous"
# A network provider usually assigns a whole /64 network of IPv6 addresses to one client.
_IPV6_PREFIX = 64
_log = logging.getLogger("kway.serving")


class Clients:
    """Identifies clients by their tokens or, without a token file, by their addresses.

    Each replica has one instance for both HTTP and gRPC, so that a problem with the file is logged
    once. `address_header` is the header in which a proxy sends the address of the client. If it is
    None, the address is that of the connection, so all clients behind a proxy share the limits of
    one client.
    """

    def __init__(self, file: Path | None, address_header: str | None = None) -> None:
        """Accept the tokens in `file`, of which only the SHA-256 digests are stored; None: accept
        every client. Raises OSError or ValueError if the file cannot be read or has unsafe
        permissions."""
        self._file = file
        self._seen: tuple[int, ...] | None = None
        self._digests: list[bytes] = []
        if file is not None:
            self._refresh()
        self.address_header = None if address_header is None else address_header.lower()
        self._reported: str | None = None

    def client_of(self, authorization: Sequence[str], addresses: Sequence[str]) -> str:
        """Return the client, to which limits per client apply, of a request with these values of
        the header Authorization: the first 8 hex digits of the SHA-256 of its token or, without a
        token file, its address. `addresses` are the values of `address_header`.

        Raises ApiError: 401 if the token is missing or wrong; 503 while the file cannot be read,
        because the tokens read earlier may have been revoked.
        """
        if self._file is None:
            return address_key(addresses)
        scheme, _, word = authorization[0].partition(" ") if len(authorization) == 1 else ("",) * 3
        token = word.strip() if scheme.lower() == "bearer" else None
        try:
            self._refresh()
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

    def _refresh(self) -> None:
        assert self._file is not None
        descriptor = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            state = os.fstat(descriptor)
            seen = (
                state.st_ino,
                state.st_mtime_ns,
                state.st_ctime_ns,
                state.st_size,
                state.st_mode,
            )
            if seen == self._seen:
                return
            self._seen = None
            _check_file(self._file, state)
            self._digests = _digests(self._file, os.read(descriptor, _MAX_FILE_BYTES + 1))
            if time.time() - state.st_ctime > _SETTLED_SECONDS:
                self._seen = seen
        finally:
            os.close(descriptor)


def address_key(addresses: Sequence[str]) -> str:
    """Return the key of the last address in the values of a header, which the proxy in front of the
    server has added. A missing or invalid address is "anonymous"."""
    return _key_of(addresses[-1].rpartition(",")[2].strip()) if addresses else ANONYMOUS


@lru_cache(1024)  # parsing an address takes longer than the rest of `client_of`
def _key_of(text: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ip_address(text)
    except ValueError:
        return ANONYMOUS
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), _IPV6_PREFIX), strict=False))


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
