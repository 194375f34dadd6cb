"""A picture inside JSON: base64, or a data URL of it. Other URLs are refused: nothing is fetched.

A server that fetched what a client names would ask, in its own name, whatever it can reach.
"""

import base64
import binascii
import re

from serving.errors import ApiError

_DATA_URL = re.compile(r"data:(image/[\w.+-]+|application/octet-stream)?;base64,", re.IGNORECASE)
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")


def picture_bytes(text: str, field: str) -> bytes:
    """Base64 of a picture file, or `data:image/…;base64,…` -> its bytes.

    Raises ApiError: 422 `urls_refused` for any other URL, 400 `invalid_base64`; `field` names it.
    """
    data_url = _DATA_URL.match(text)
    if data_url is None and _URL.match(text[:64]):
        raise ApiError(
            422,
            "urls_refused",
            f"{field} is a URL, and this server fetches nothing: send the picture itself, in "
            "base64, as a file of a form, or as the body with Content-Type: image/jpeg",
        )
    start = 0 if data_url is None else data_url.end()
    try:
        return base64.b64decode(text[start:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(
            400, "invalid_base64", f"{field} is not base64 of a picture file ({error})"
        ) from error
