"""The bytes of a text sample -> the text."""


def decode_text(data: bytes) -> str:
    """Raises ValueError with the place where `data` is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 from its byte {error.start} on") from error
