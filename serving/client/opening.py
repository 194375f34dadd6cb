"""The two ways to one server: httpx's own, and one that sends a body while it reads the answer."""

import httpx

from serving.client.duplex import Duplex

# An empty line keeps a stream open that has nothing to send.
_SIGN_OF_LIFE, _SILENCE_SECONDS = b"\n", 5.0


def opened(url: str, token: str | None, timeout: float) -> tuple[httpx.Client, httpx.Client]:
    """Nothing is sent yet. Raises ValueError for what is no URL, and for what is no token."""
    headers = _authorization(token)
    base = _checked(url)
    return httpx.Client(base_url=base, headers=headers, timeout=timeout), httpx.Client(
        transport=Duplex(sign_of_life=_SIGN_OF_LIFE, silence_seconds=_SILENCE_SECONDS),
        base_url=base,
        headers=headers | {"Accept-Encoding": "identity", "Connection": "close"},
        timeout=timeout,
    )


def _authorization(token: str | None) -> dict[str, str]:
    """No error may show the token; a file of one ends with a newline."""
    if token is None:
        return {}
    token = token.strip()
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ValueError("token is no single word of ASCII letters, digits and signs: give one")
    return {"Authorization": f"Bearer {token}"}


def _checked(url: str) -> httpx.URL:
    try:
        found = httpx.URL(url)
        found.raw_host.decode("ascii").encode("idna")  # as every look-up of the name will
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{url} is no URL: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise ValueError(f"{url} is no URL of a server: it is http://HOST or https://HOST")
    return found
