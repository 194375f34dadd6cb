"""`Webhook`: the URL and the secret of a receiver of hits, and the hosts that may receive them.

URLs and hosts match strict patterns, so that no other parser can find another host in them. This
module does not import an HTTP client.
"""

import base64
import binascii
import re
from collections.abc import Collection
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, SecretStr, field_validator

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::(?P<port>[1-9][0-9]{0,4}))?"
# Printable ASCII without a fragment or a backslash, which parsers treat differently.
_PATH = r"[/?][!-\"$-\[\]-~]*"
_URL = re.compile(rf"(?P<scheme>https?)://{_HOST}(?:{_PATH})?", re.ASCII)
_ALLOWED = re.compile(_HOST, re.ASCII)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_SECRET_PREFIX, _MIN_KEY_BYTES, _MAX_KEY_BYTES = "whsec_", 24, 64

# The secret itself is only in JSON, which is how a watch is stored.
_Secret = Annotated[
    SecretStr,
    PlainSerializer(SecretStr.get_secret_value, return_type=str, when_used="json"),
]


class Webhook(BaseModel):
    """Where the hits of a watch are sent."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, Field(max_length=2048)] = Field(
        description="https URL, or http URL on loopback, of a host that the server allows"
    )
    secret: _Secret | None = Field(
        None,
        description="key that signs the requests: whsec_ and the base64 form of 24 to 64 random "
        "bytes. It is never returned",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        found = _URL.fullmatch(url)
        if found is None or not _is_port(found["port"]):
            raise ValueError(
                "the URL must have the form https://host[:port]/path, in ASCII, with a lower-case "
                "host and without a user, a fragment or a backslash"
            )
        if found["scheme"] == "http" and found["host"] not in LOOPBACK_NAMES:
            raise ValueError(f"http is only allowed to {', '.join(LOOPBACK_NAMES)}. Use https")
        return url

    @field_validator("secret")
    @classmethod
    def _check_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and not _MIN_KEY_BYTES <= len(_key(secret)) <= _MAX_KEY_BYTES:
            raise ValueError(
                f"the secret must be {_SECRET_PREFIX} and the base64 form of {_MIN_KEY_BYTES} to "
                f"{_MAX_KEY_BYTES} bytes. Create one with "
                f'echo "{_SECRET_PREFIX}$(openssl rand -base64 32)"'
            )
        return secret

    @property
    def key(self) -> bytes | None:
        """The key of the signature."""
        return None if self.secret is None else _key(self.secret)

    @property
    def host(self) -> str:
        """The host and the port, as HOST:PORT."""
        found = _URL.fullmatch(self.url)
        assert found is not None, "checked by _check_url"
        port = found["port"] or _DEFAULT_PORTS[found["scheme"]]
        return f"{found['host']}:{port}"

    def check_allowed(self, hosts: Collection[str]) -> Self:
        """Return this webhook. Raises ValueError unless its host is one of `hosts`, the server's
        `--webhook-host`."""
        if not hosts:
            raise ValueError(
                "webhooks are disabled. Start the server with --webhook-host to allow hosts"
            )
        name, _, port = self.host.rpartition(":")
        is_default = port == _DEFAULT_PORTS[self.url.partition(":")[0]]
        if not (self.host in hosts or (is_default and name in hosts)):
            raise ValueError(
                f"the server does not allow webhooks to {self.host}. Use an allowed host, or start "
                f"the server with --webhook-host {self.host}"
            )
        return self


def allowed_host(text: str) -> str:
    """Return `HOST` or `HOST:PORT` in lower case. Raises ValueError if it is not of this form."""
    lowered = text.lower()
    found = _ALLOWED.fullmatch(lowered)
    if found is None or not _is_port(found["port"]):
        raise ValueError(f"{text!r} is not HOST or HOST:PORT. Pass a host name without a scheme")
    return lowered


def _is_port(text: str | None) -> bool:
    return text is None or int(text) < 2**16


def _key(secret: SecretStr) -> bytes:
    """Return the key; empty if the secret does not have the right form."""
    text = secret.get_secret_value()
    try:
        encoded = text.removeprefix(_SECRET_PREFIX) if text.startswith(_SECRET_PREFIX) else ""
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return b""
