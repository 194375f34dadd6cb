EXTRA_COLUMNS: int

def connect(path: str, /) -> bool: ...
def decode(
    data: bytes,
    pixels: object,
    image_height: int,
    image_width: int,
    top: int,
    left: int,
    height: int,
    width: int,
    denominator: int,
    channels: int,
    /,
) -> int: ...
